"""Generators that a data set holds itself: a resume draws what would have been drawn, or says what
it cannot. Runs that are killed: tests/multiprocess/test_own_data.py."""

import logging
import random

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from distdl.data.drawing import seed_all
from distdl.data.keyed import is_marked
from distdl.data.own_generators import CLOSED_PARTS, OwnGenerators
from distdl.data.sampling import TrainPosition
from tests.conftest import ROOT
from tests.multiprocess import drawing
from tests.unit.sample_data import Loaders, share

EPOCHS, BATCH, SKIPPED = 2, 16, 1
REPEATED = [kind for kind in drawing.TRANSFORMS if kind != "entropy"]


def drawn(kind, skipped=0, workers=0, persistent=False, mixing=False):
    """The batches of two epochs, without the first ones, of a data set that is made anew."""
    rows = drawing.Rows(drawing.TRANSFORMS[kind]())
    position = TrainPosition(0, skipped * BATCH)
    options = {"num_workers": workers, "persistent_workers": persistent}
    options |= {"collate_fn": drawing.Mixing()} if mixing else {}
    loaders = Loaders(lambda: DataLoader(rows, BATCH, shuffle=True, **options))
    loader = share(loaders, position=position).train_dataloader()
    batches = []
    for position.epoch in range(EPOCHS):
        batches += [batch["x"] for batch in loader]
        position.consumed = 0
    return torch.stack(batches)


@pytest.mark.parametrize("kind", REPEATED)
def test_the_rest_of_an_epoch_is_drawn_as_without_a_kill(kind):
    whole = drawn(kind)
    assert torch.equal(drawn(kind, SKIPPED), whole[SKIPPED:])
    first, second = (batches.flatten(0, 1).sort(0)[0] for batches in whole.chunk(EPOCHS))
    assert torch.equal(first, second) == (kind == "plain"), "each epoch draws anew"


@pytest.mark.parametrize(("workers", "persistent"), [(1, False), (2, True)])
def test_in_workers_too_and_for_a_whole_batch(workers, persistent):
    """The `collate_fn` draws as well. What a worker drew before makes no difference."""
    options = {"workers": workers, "persistent": persistent, "mixing": True}
    for kind in ("lazy", "monai"):
        assert torch.equal(drawn(kind, SKIPPED, **options), drawn(kind, **options)[SKIPPED:])


def test_two_generators_do_not_draw_the_same():
    def noise():
        return drawing.Noise().set_random_state(0)

    one, other = noise(), noise()
    own = OwnGenerators(dataset=[one, {"two": other}])
    own.look()
    own.seed(1)
    row = np.zeros(4, "float32")
    assert list(one(row)) != list(other(row))
    assert own.places == ["dataset.0.R", "Randomizable.R", "dataset.1.two.R"]


class Held:
    """Beyond what Python can look into, but for `set_random_state`."""

    def __init__(self):
        self.set_random_state(None)

    def set_random_state(self, seed):
        self.held = iter(random.Random(seed).random, None)


class Slotted:
    __slots__ = ("draw", "numbers")

    def __init__(self):
        self.draw = random.Random().random
        self.numbers = (n for n in range(9))


def test_what_is_found_and_what_is_named():
    own = OwnGenerators(dataset=Held(), collate_fn=Slotted())
    own.look()
    assert own.places == ["dataset", "collate_fn.draw"]
    assert own.unknown == ["collate_fn.numbers (an iterator goes on from where it is)"]
    values = []
    for seed in (1, 2, 1):
        own.seed(seed)
        values.append((next(own._roots["dataset"].held), own._roots["collate_fn"].draw()))
    assert values[0] == values[2] != values[1]


def test_global_generators_are_not_its_own():
    """They get their states back in the main process, where the model draws from them."""
    own = OwnGenerators(dataset=[np.random.mtrand._rand, random.shuffle, torch.default_generator])
    own.look()
    seed_all(3)
    before = random.getstate()
    own.seed(1)
    assert not own.places
    assert random.getstate() == before


def test_a_subclass_is_not_its_base():
    class Marked(drawing.Rows):
        is_deterministic = True

    rows = drawing.Rows(drawing.TRANSFORMS["torch"]())
    assert is_marked(TensorDataset(torch.ones(2)))
    assert is_marked(Marked(None))
    assert not is_marked(rows)
    assert not is_marked(type("Drawing", (Marked,), {})(None))
    rows.is_deterministic = True
    assert is_marked(rows)


def test_what_cannot_be_repeated_is_named_at_the_start(caplog):
    caplog.set_level(logging.INFO)
    rows = drawing.Rows(drawing.Entropy())
    source = share(Loaders(lambda: DataLoader(rows, 4)))
    with pytest.warns(UserWarning, match=r"drawn by Entropy.__call__ \(default_rng\(\) without"):
        source.train_dataloader()
    sharded = DistributedSampler(rows, 1, 0)
    share(Loaders(lambda: DataLoader(rows, 4, sharded and None, sharded))).train_dataloader()
    (line,) = caplog.messages
    assert line.startswith(
        "train_dataloader: DataLoader cannot be resumed exactly: inside an epoch"
    )


class Positioned(LightningDataModule):
    def load_state_dict(self, state):
        """Restores its place."""

    def train_dataloader(self):
        return DataLoader(drawing.Stream())


def test_a_loader_that_knows_its_place_does_not_start_again(recwarn):
    share(Positioned(), position=TrainPosition(0, 8)).train_dataloader()
    assert "goes on inside the epoch as Positioned lets it" in str(recwarn.pop(UserWarning).message)
    StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    stream = Loaders(lambda: StatefulDataLoader(drawing.Stream()))
    share(stream, position=TrainPosition(0, 8, has_states=True)).train_dataloader()
    assert not [each for each in recwarn if "train_dataloader" in str(each.message)]
    with pytest.warns(UserWarning, match="again: the checkpoint has no state for this rank"):
        share(stream, position=TrainPosition(0, 8)).train_dataloader()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stateful_loader_of_rows_skips_no_sample_twice(workers):
    """It is divided among ranks as any other, and does not skip what its position has skipped."""
    StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def make(position):
        rows = TensorDataset(torch.arange(24))
        options = {"shuffle": True, "num_workers": workers, "snapshot_every_n_steps": 2}
        source = Loaders(lambda: StatefulDataLoader(rows, 4, **options))
        with _replace_dunder_methods(DataLoader, "dataset"):  # as Lightning calls the hook
            made = share(source, 1, 2, position).train_dataloader()
        assert made.snapshot_every_n_steps == 1
        return made

    loader = make(TrainPosition())
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch[0].tolist() for batch in batches]
    resumed = make(TrainPosition(0, 8, has_states=True))
    resumed.load_state_dict(state)
    assert [batch[0].tolist() for batch in resumed] == rest
    assert len(rest) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_what_workers_of_a_stateful_loader_draw_globally_is_named(workers, caplog):
    """In the main process a checkpoint has the state of these generators."""
    StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    caplog.set_level(logging.INFO)
    stream = Loaders(lambda: StatefulDataLoader(drawing.Stream(), num_workers=workers))
    source = share(stream)
    for _ in range(2):
        source.train_dataloader()
    named = ["the workers of StatefulDataLoader draw from the global" in m for m in caplog.messages]
    assert named == [True] * workers


def test_what_is_closed_of_distdl_names_its_packages():
    """A package that has moved would be searched."""
    names = [name for name in CLOSED_PARTS if name.startswith("distdl.")]
    assert names
    for name in names:
        assert ROOT.joinpath("src", *name.split(".")).is_dir(), name
