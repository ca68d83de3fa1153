"""A checkpoint is of one step, and the same file, whatever the training does meanwhile."""

from __future__ import annotations

import collections
import json
import logging
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from distdl.callbacks import Checkpointer
from distdl.checkpoint.host_copy import HostCopy
from distdl.checkpoint.saving import SaveError
from distdl.runs.checkpoints import CheckpointStore, damage_of, manifest_of
from tests.unit import checkpointing
from tests.unit.checkpointing import numbers

# ------------------------------------------------------------------------------------ the copy


def odd_state() -> dict[str, Any]:
    """What a checkpoint may hold besides plain tensors."""
    network = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    network[2].weight = network[0].weight  # tied
    base = torch.arange(24.0)
    learned = nn.Parameter(torch.ones(2))
    learned.note = ["a user's"]  # type: ignore[attr-defined]
    return {
        "state_dict": network.state_dict(),  # an OrderedDict with an attribute
        "views": [base[:6], base[6:].view(3, 6).t(), base],
        "types": (torch.ones(3, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 4)),
        "graph": [learned, learned * 2, torch.ones(2, requires_grad=True)],
        "not plain": torch.eye(3).to_sparse(),
        "named": collections.Counter(a=2),
        "device": torch.device("cpu"),
        "same": [base, base],
        "none": None,
    }


def test_the_file_is_the_one_that_torch_writes(tmp_path: Path) -> None:
    state = odd_state()
    held = HostCopy()
    held.take(state)
    held.write(tmp_path / "held")
    with (tmp_path / "direct").open("wb") as file:
        torch.save(state, file)
    assert (tmp_path / "held").read_bytes() == (tmp_path / "direct").read_bytes()


def test_a_view_that_is_more_than_a_view(tmp_path: Path) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    held = HostCopy()
    held.take({"conjugated": numbers.conj(), "of another class": numbers.as_subclass(Own)})
    numbers.zero_()
    held.write(tmp_path / "held")
    found = torch.load(tmp_path / "held", weights_only=False)
    assert found["conjugated"].tolist() == [1 - 2j, 3 + 1j]
    assert type(found["of another class"]) is Own
    assert found["of another class"].tolist() == [1 + 2j, 3 - 1j]


class Own(Tensor):
    """As quantised weights are."""


def test_it_is_of_its_moment(tmp_path: Path) -> None:
    weights, steps = torch.zeros(1000), [1, {"a": 1}]
    state = {"weights": weights, "half": weights[:500], "steps": steps, "named": {"x": weights}}
    held = HostCopy()
    held.take(state)
    weights.add_(1)
    steps[1]["a"] = 2  # type: ignore[index]
    steps.append(3)
    held.write(tmp_path / "held")
    found = torch.load(tmp_path / "held", weights_only=True)
    assert found["steps"] == [1, {"a": 1}] and not found["weights"].any()
    assert found["half"].data_ptr() == found["weights"].data_ptr() == found["named"]["x"].data_ptr()


def addresses(held: HostCopy) -> set[int]:
    return {storage.data_ptr() for storages in held._used.values() for storage in storages}


def test_its_memory_is_used_again() -> None:
    held = HostCopy()
    state = {str(i): torch.full((1000 + i % 2,), float(i)) for i in range(6)}
    held.take(state)
    first = addresses(held)
    held.release()
    held.take(state)
    assert addresses(held) == first and len(first) == 6
    held.take({"0": torch.zeros(1000)})
    held.take({"0": torch.zeros(1000)})
    assert addresses(held) < first and held._left == {}, "what has no use any more is given back"


# ---------------------------------------------------------------------------------- in training

LARGE = 1_000_000  # weights of 4 MB: written in more time than a step takes


class Counts(LightningModule):
    """Each step adds 1 to all weights, so the weights say of which step they are."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(LARGE)) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return -sum(layer.sum() for layer in self.layers)  # type: ignore[return-value]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


Fit = Callable[..., Checkpointer]


@pytest.fixture
def fit(tmp_path: Path) -> Iterator[Fit]:
    """Trains for some steps and saves after each `every`; whatever happens, no thread is left."""

    def run(steps: int, *callbacks: Callback, every: int = 1, **more: Any) -> Checkpointer:
        often = {"every_n_steps": every, "every_n_epochs": 1000, **more}
        ours = checkpointing.checkpointer(tmp_path / "checkpoints", **often)
        checkpointing.fit(Counts(), [*callbacks, ours], numbers(1000), max_steps=steps)
        return ours

    before = threading.active_count()
    yield run
    assert threading.active_count() == before


def found(tmp_path: Path) -> dict[int, dict[str, Any]]:
    """step -> what the checkpoint of that step holds."""
    paths = CheckpointStore(tmp_path / "checkpoints").all()
    steps = {json.loads(manifest_of(path).read_text())["step"]: path for path in paths}
    assert all(damage_of(path) is None for path in paths)
    return {step: torch.load(path, weights_only=True) for step, path in steps.items()}


@pytest.mark.parametrize("background", [True, False])
def test_no_checkpoint_mixes_two_steps(fit: Fit, tmp_path: Path, background: bool) -> None:
    fit(6, background=background)
    checkpoints = found(tmp_path)
    assert sorted(checkpoints) == [1, 2, 3, 4, 5, 6]
    for step, checkpoint in checkpoints.items():
        for name, weights in checkpoint["state_dict"].items():
            assert weights.unique().tolist() == [step], name
        assert checkpoint["global_step"] == step
    assert not list((tmp_path / "checkpoints").glob(".*")), "no half of a file is left"


def test_it_is_written_while_the_training_goes_on(fit: Fit) -> None:
    class Watches(Callback):
        seen = 0

        def on_train_batch_start(self, *_: Any) -> None:
            self.seen += any(t.name.endswith(".ckpt") for t in threading.enumerate())

    behind, before = Watches(), Watches()
    fit(3, behind)
    fit(3, before, background=False)
    assert behind.seen == 2 and before.seen == 0


def test_a_save_that_waits_says_so_once(fit: Fit, monkeypatch, caplog) -> None:
    monkeypatch.setattr("distdl.checkpoint.saving.PATIENCE", 0.0)
    with caplog.at_level(logging.WARNING):
        fit(4)
    (said,) = [r.getMessage() for r in caplog.records if "to be written" in r.getMessage()]
    assert "save less often (checkpoint.every_n_steps" in said


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_was_begun_is_published_whatever_ends_the_training(fit: Fit, tmp_path, kind) -> None:
    class Breaks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                raise kind("in the middle")

    with pytest.raises((kind, SystemExit)):
        fit(6, Breaks(), every=3)
    assert sorted(found(tmp_path)) == [3]
    assert damage_of(tmp_path / "checkpoints/last.ckpt") is None


class Fills(Callback):
    """From some step on no file may be larger than 1 MB: as on a disk that is full."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            for thread in threading.enumerate():
                if thread.name.endswith(".ckpt"):
                    thread.join()
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))


@pytest.fixture
def limit() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("steps", [1000, 40])
def test_a_failed_write_ends_the_training(fit: Fit, tmp_path, caplog, limit, steps) -> None:
    """At the latest when the next one is due, or the training ends."""
    reached = 0

    class Watches(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            nonlocal reached
            reached = trainer.global_step

    with pytest.raises(SaveError, match=r"step_00000040.ckpt could not be saved: OSError: .*large"):
        fit(steps, Fills(35), Watches(), every=20)
    assert 40 <= reached <= 60, "the next one is due at 60"
    assert "the checkpoints before it are as they were" in caplog.text
    assert sorted(found(tmp_path)) == [20]
    assert damage_of(tmp_path / "checkpoints/last.ckpt") is None
    assert not list((tmp_path / "checkpoints").glob(".*")), "its half of a file is removed"


def test_what_cannot_be_copied_is_written_at_once(fit: Fit, tmp_path: Path, caplog) -> None:
    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": Stubborn()}

    with torch.serialization.safe_globals([Stubborn]):
        fit(2, Keeps(), every=1)
    paths = CheckpointStore(tmp_path / "checkpoints").all()
    assert len(paths) == 2 and all(damage_of(path) is None for path in paths)
    assert caplog.text.count("no copy could be made: TypeError: only by pickle") == 1


class Stubborn:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("only by pickle")


def test_a_users_own_checkpoint_is_there_at_once(fit: Fit, tmp_path: Path) -> None:
    class Reads(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "own.ckpt")
            step = torch.load(tmp_path / "own.ckpt", weights_only=False)["global_step"]
            assert step == trainer.global_step

    fit(3, Reads())
    assert sorted(found(tmp_path)) == [1, 2, 3]
