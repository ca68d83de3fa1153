"""What two ranks train on under loaders of a user's own; `test_loaders.py` looks at it.

Every kind of loader that resumes exactly: tests/adoption. Here samples are augmented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from distdl.callbacks import Checkpointer
from distdl.data.loading import distribute
from distdl.data.sampling import TrainPosition
from distdl.distributed import process_group
from distdl.job import JobState
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.runs.checkpoints import CheckpointStore
from distdl.util.errors import UserError
from tests.strategies.small import trainer

SAMPLES, ROWS, STEPS, STOP_AT = 32, 2, 12, 9  # of epochs of 8 steps on two ranks


class Numbers(Dataset[Tensor]):
    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


class Stream(IterableDataset[Tensor]):
    shards_itself = False

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i), 0.0]) for i in range(2 * SAMPLES + 1))


class Pairs(Sampler[list[int]]):
    """A batch sampler: neighbours stay together."""

    def __len__(self) -> int:
        return SAMPLES // ROWS

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * i, 2 * i + 1] for i in torch.randperm(SAMPLES // 2).tolist()])


class Named(DataLoader[Tensor]):
    """A subclass with an argument of its own."""

    def __init__(self, name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "batches": lambda: DataLoader(Numbers(), batch_sampler=Pairs()),
    "subclass": lambda: Named("mine", Numbers(), ROWS, shuffle=True, num_workers=1),
}


class Seen(LightningModule):
    def __init__(self, train: Any, val: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.train_data, self.val_data = train, val
        self.seen: list[list[float]] = []
        self.validated = 0

    def train_dataloader(self) -> Any:
        return self.train_data()

    def val_dataloader(self) -> Any:
        return self.val_data() if self.val_data else []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append([round(value, 5) for value in batch.flatten().tolist()])
        return self.layer(batch.flatten()[:1]).sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validated += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.0)


class Asked(Callback):
    """One rank is asked to end after a step."""

    def __init__(self, stop: StopRequest, step: int, rank: int) -> None:
        self.stop, self.step, self.rank = stop, step, rank

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            self.stop.state, self.stop.signal = JobState.PREEMPTED, "SIGTERM"


def fit(module: Seen, folder: Path, stop_at: int = 0, share: bool = True, **more: Any) -> Any:
    """Trains on from the newest checkpoint of the folder, if there is one."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    position, stop = TrainPosition(), StopRequest()
    distribute(module, rank=rank, world_size=world, seed=3, position=position, share=share)
    store = CheckpointStore(folder)
    path = process_group.broadcast(str(store.newest() or "") if rank == 0 else None) or None
    kept = Checkpointer(store, stop, position, global_batch_size=999, every_minutes=None)
    asked = Asked(stop, stop_at, rank=1)
    made = trainer("ddp", STEPS, folder, [asked, kept], **more)
    try:
        made.fit(module, ckpt_path=path, weights_only=True if path else None)
    except Stopped as ended:
        return str(ended)
    return [position.samples, position.per_batch]


def resumed(folder: Path, make: Callable[[], Any], share: bool = True) -> dict[str, Any]:
    whole = Seen(make)
    size = fit(whole, folder / "whole", share=share)
    first, second = Seen(make), Seen(make)
    ended = fit(first, folder / "parts", STOP_AT, share=share)
    fit(second, folder / "parts", share=share)
    return {"whole": whole.seen, "parts": first.seen + second.seen, "ended": ended, "size": size}


def refusal(folder: Path, make: Callable[[], Any], share: bool = True) -> str:
    try:
        return str(fit(Seen(make), folder, share=share))
    except UserError as error:
        return str(error)


def cases(folder: Path) -> Iterator[tuple[str, Any]]:
    rank = torch.distributed.get_rank()
    for name, make in LOADERS.items():
        yield name, resumed(folder / name, make)
    alone = Seen(lambda: DataLoader(Numbers(), ROWS))
    fit(alone, folder / "alone", share=False)
    yield "alone", alone.seen
    stream = Seen(lambda: DataLoader(Stream(), ROWS))
    fit(stream, folder / "stream")
    yield "stream", stream.seen
    Stream.shards_itself = None  # type: ignore[assignment]
    yield "unknown", refusal(folder / "unknown", lambda: DataLoader(Stream(), ROWS))

    def uneven() -> Any:
        return DataLoader(Numbers(3 - rank), 1)

    yield "uneven_training", refusal(folder / "uneven", uneven, share=False)
    even = Seen(lambda: DataLoader(Numbers(4), 1), uneven)
    fit(even, folder / "validated", share=False, limit_val_batches=1.0)
    yield "uneven_validation", even.validated
