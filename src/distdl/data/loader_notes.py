"""What a user is told of a loader: what a resume does not repeat, and what is counted twice."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler

from distdl.data.drawing import samplers_of
from distdl.data.keyed import is_marked
from distdl.data.own_generators import OwnGenerators
from distdl.data.sampling import TrainPosition

log = logging.getLogger(__name__)


def saves_itself(loader: object) -> bool:
    """Whether a loader saves its own state, which Lightning writes into checkpoints."""
    return callable(getattr(loader, "state_dict", None)) and callable(
        getattr(loader, "load_state_dict", None)
    )


def restores_itself(source: LightningDataModule | LightningModule) -> bool:
    """Whether a data module, or a module that has loaders, restores some state of its own."""
    base = LightningModule if isinstance(source, LightningModule) else LightningDataModule
    hooks = ("load_state_dict", "on_load_checkpoint")
    return any(getattr(type(source), hook, None) is not getattr(base, hook, None) for hook in hooks)


def own_generators(loader: DataLoader[Any]) -> OwnGenerators:
    """The generators that the data set of a loader and its `collate_fn` hold."""
    own = OwnGenerators(dataset=loader.dataset, collate_fn=loader.collate_fn)
    own.look()
    return own


@dataclass
class LoaderNotes:
    """Says on rank 0, each thing once, what is special about the loaders of one stage.

    Args:
        stage: "train", "val", "test" or "predict".
        source: Has the loaders.
        rank, world_size: Among the processes that take different data.
        position: Where the training goes on.
    """

    stage: str
    source: LightningDataModule | LightningModule
    rank: int
    world_size: int
    position: TrainPosition
    said: set[str] = field(default_factory=set)

    def warn(self, text: str, topic: str = "") -> None:
        """Once for each topic, which is the text itself by default: of several loaders each may
        have something to say."""
        topic = topic or text
        if self.rank == 0 and topic not in self.said:
            warnings.warn(f"{self.stage}_dataloader: {text}", stacklevel=2)
        self.said.add(topic)

    def _inform(self, text: str, topic: str) -> None:
        if self.rank == 0 and topic not in self.said:
            log.info("%s_dataloader: %s", self.stage, text)
        self.said.add(topic)

    # Evaluation

    def say_counted_twice(self, twice: int, count: int, unit: str) -> None:
        """`unit`: "samples", or the "batches" of a custom batch sampler."""
        text = f"{count} {unit} over {self.world_size} ranks: {twice} of them are counted twice."
        self.warn(f"{text} {self._to_count_once}")

    def say_repeated_by_torch(self, loader: DataLoader[Any]) -> None:
        """What torch's DistributedSampler repeats to give each rank as many samples."""
        if self.stage not in ("val", "test"):
            return
        for sampler in samplers_of(loader):
            if not isinstance(sampler, DistributedSampler):
                continue
            count = len(sampler.dataset)  # type: ignore[arg-type]
            twice = sampler.total_size - count
            if twice > 0:
                text = f"a DistributedSampler gives {twice} of {count} samples twice."
                self.warn(f"{text} {self._to_count_once}, without the sampler")

    @property
    def _to_count_once(self) -> str:
        return (
            "To count each once, return dict samples, set exact_evaluation = True on "
            f'{type(self.source).__name__} and weigh metrics by batch["weight"]'
        )

    def say_workers_stay(self, loader: object) -> None:
        """Workers that stay after a validation go on drawing where they were."""
        if not isinstance(loader, DataLoader) or is_marked(loader.dataset):
            return
        if loader.persistent_workers:
            text = (
                f"what the workers of {type(loader).__name__} draw, if they do, goes on from one "
                "validation to the next, and a resume does not repeat it: persistent_workers=False "
                "lets it"
            )
            self._inform(text, topic="workers")

    # Training

    def say_drawn_unseeded(self, loader: DataLoader[Any]) -> None:
        """Generators of the data set whose state no checkpoint can hold."""
        unknown = own_generators(loader).unknown
        if unknown:
            self.warn(
                f"a resume does not repeat what is drawn by {', '.join(unknown)}: keep a "
                "generator in an attribute, or seed it by the index"
            )

    def say_several(self, loaders: object) -> None:
        """Of several loaders, a resume inside an epoch goes on only if each keeps its place."""
        keep_their_place = all(saves_itself(loader) for loader in tree_leaves(loaders))
        if keep_their_place and (self.position.has_states or not self.position.consumed):
            return
        again = "several loaders start the epoch again: samples repeat"
        self._say_not_exact("several loaders", again)

    def say_where_it_resumes(self, loader: object) -> None:
        """What a resume inside an epoch does with a loader that is left as it is."""
        name = type(loader).__name__
        if saves_itself(loader):
            self._say_drawn_by_stateful(loader)
            if self.position.consumed and not self.position.has_states:
                text = f"{name} starts the epoch again: the checkpoint has no state for this rank"
                self.warn(text, topic="again")
        elif not restores_itself(self.source):
            self._say_not_exact(name, f"{name} starts the epoch again")
        elif self.position.consumed:
            who = "rank 0" if self.world_size > 1 else "it"
            text = (
                f"{name} goes on inside the epoch as {type(self.source).__name__} lets it, with "
                f"the state that {who} has saved"
            )
            self.warn(text, topic="again")

    def _say_drawn_by_stateful(self, loader: object) -> None:
        name = type(loader).__name__
        dataset = getattr(loader, "dataset", None)
        own = OwnGenerators(dataset=dataset, collate_fn=getattr(loader, "collate_fn", None))
        own.look()
        places = [*own.places, *own.unknown]
        if places and not saves_itself(dataset) and not restores_itself(self.source):
            self.warn(
                f"{name} goes on at its place, but a resume does not repeat what is drawn by "
                f"{', '.join(places)}: give {type(dataset).__name__} a state_dict"
            )
        if getattr(loader, "num_workers", 0):
            text = (
                f"what the workers of {name} draw from the global generators of Python, NumPy and "
                "torch, if they do, is not repeated by a resume: keep a generator in the state of "
                f"{type(dataset).__name__}"
            )
            self._inform(text, topic="workers")

    def _say_not_exact(self, name: str, again: str) -> None:
        if self.position.consumed:
            self.warn(again, topic="again")
            return
        text = (
            f"{name} cannot be resumed exactly: inside an epoch a resume starts the epoch again, "
            "and what it draws at random is not repeated"
        )
        self._inform(text, topic="first")
