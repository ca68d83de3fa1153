"""Loaders of a user's own on two real ranks: other samples on each. Resumes: tests/adoption."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from distdl.callbacks import Checkpointer
from distdl.data.loading import distribute
from distdl.data.sampling import TrainPosition
from distdl.ranks.stopping import StopRequest
from distdl.runs.checkpoints import CheckpointStore
from distdl.util.errors import UserError
from tests.strategies import two_ranks
from tests.strategies.small import trainer

# One process group serves this file, test_ddp and test_traffic.
pytestmark = pytest.mark.xdist_group("two_ranks")
SAMPLES, ROWS, STEPS = 32, 2, 12  # of epochs of 8 steps on two ranks


def numbers(count: int = SAMPLES) -> Any:
    return [torch.tensor([float(i)]) for i in range(count)]


class Stream(IterableDataset):
    def __init__(self, shards_itself: bool | None) -> None:
        self.shards_itself = shards_itself

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(numbers(2 * SAMPLES + 1))


class Seen(LightningModule):
    """Records the batches of training, and how many there were of validation."""

    def __init__(self, train: Any, val: Any = ()) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.train_dataloader, self.val_dataloader = lambda: train, lambda: val
        self.seen: list[list[int]] = []
        self.validated = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.flatten().int().tolist())
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


def fit(module: Seen, folder: Path, share: bool = True, **more: Any) -> str:
    """Trains; the refusal, if there was one."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    position = TrainPosition()
    distribute(module, rank=rank, world_size=world, seed=3, position=position, share=share)
    kept = Checkpointer(CheckpointStore(folder), StopRequest(), position, global_batch_size=999)
    try:
        trainer("ddp", STEPS, folder, [kept], **more).fit(module)
    except UserError as error:
        return str(error)
    return ""


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    """What a rank finds in each case; runs on the ranks."""
    uneven = DataLoader(numbers(3 - torch.distributed.get_rank()), 1)
    for name, loader, share in (
        ("shuffled", DataLoader(numbers(), ROWS, shuffle=True, num_workers=1), True),
        ("alone", DataLoader(numbers(), ROWS), False),
        ("stream", DataLoader(Stream(False), ROWS), True),
        ("unknown", DataLoader(Stream(None), ROWS), True),
        ("uneven", uneven, False),
    ):
        module = Seen(loader)
        refusal = fit(module, folder / name, share)
        yield name, refusal or module.seen
    even = Seen(DataLoader(numbers(4), 1), uneven)
    fit(even, folder / "validated", share=False, limit_val_batches=1.0)
    yield "validated", even.validated


def results(name: str) -> list[Any]:
    """What each rank found in a case."""
    return two_ranks.results("tests.multiprocess.test_loaders", timeout=600)[name]


def test_ranks_see_other_samples_and_another_order_in_the_next_epoch() -> None:
    one, two = results("shuffled")
    assert len(one) == STEPS and one[8:] != one[:4]
    assert sorted(i for step in one[:8] + two[:8] for i in step) == list(range(SAMPLES))


def test_loaders_are_left_alone_taken_in_turns_or_refused() -> None:
    one, two = results("alone")  # trainer.use_distributed_sampler=false
    assert one and one == two
    one, two = results("stream")
    assert one[:2] == [[0, 2], [4, 6]] and two[:2] == [[1, 3], [5, 7]]
    for text in results("unknown"):
        assert "Stream, an iterable dataset" in text and "shards_itself" in text


def test_uneven_ranks_finish_a_validation_and_are_refused_in_training() -> None:
    assert results("validated") == [3 * 3, 2 * 3]
    for text in results("uneven"):
        assert "3 batches on rank 0 and 2 on rank 1" in text
        assert "trainer.limit_train_batches=2" in text
