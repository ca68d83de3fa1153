"""A checkpoint is of one step, and the same file, whatever the training does meanwhile."""

from __future__ import annotations

import collections
import json
import resource
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from distdl.callbacks import Checkpointer
from distdl.checkpoint import host_copy
from distdl.checkpoint.host_copy import HostCopy
from distdl.checkpoint.saving import SaveError
from distdl.runs.checkpoints import CheckpointStore, damage_of, manifest_of
from tests.unit import checkpointing


class Own(Tensor):
    """As quantised weights are."""


def copied(state: dict[str, Any], path: Path, change: Callable[[], Any] = lambda: None) -> Any:
    """The file of a copy of `state`, written after a change."""
    copy = HostCopy()
    copy.take(state)
    change()
    copy.write(path)
    return torch.load(path, weights_only=False)


def test_the_file_is_the_one_that_torch_writes(tmp_path: Path) -> None:
    """Also of what is not a plain tensor."""
    network = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    network[2].weight = network[0].weight  # tied
    base, learned = torch.arange(24.0), nn.Parameter(torch.ones(2))
    learned.note = ["a user's"]  # type: ignore[attr-defined]
    state = {
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
    copied(state, tmp_path / "copied")
    with (tmp_path / "direct").open("wb") as file:
        torch.save(state, file)
    assert (tmp_path / "copied").read_bytes() == (tmp_path / "direct").read_bytes()


def test_it_is_of_its_moment(tmp_path: Path) -> None:
    weights, steps = torch.zeros(1000), [1, {"a": 1}]
    complex_ = torch.tensor([1 + 2j, 3 - 1j])
    state = {"weights": weights, "half": weights[:500], "steps": steps, "named": {"x": weights}}
    views = {"conjugated": complex_.conj(), "other": complex_.as_subclass(Own)}

    def change() -> None:
        weights.add_(1)
        complex_.zero_()
        steps[1]["a"] = 2  # type: ignore[index]
        steps.append(3)

    kept = copied({**state, **views}, tmp_path / "copied", change)
    assert kept["steps"] == [1, {"a": 1}] and not kept["weights"].any()
    assert kept["half"].data_ptr() == kept["weights"].data_ptr() == kept["named"]["x"].data_ptr()
    assert kept["conjugated"].tolist() == [1 - 2j, 3 + 1j]
    assert type(kept["other"]) is Own and kept["other"].tolist() == [1 + 2j, 3 - 1j]


def test_its_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    new = host_copy.host_memory

    def spy(size: int, *, pinned: bool) -> torch.UntypedStorage:
        storage = new(size, pinned=pinned)
        made.append(weakref.ref(storage))
        return storage

    monkeypatch.setattr(host_copy, "host_memory", spy)
    copy = HostCopy()
    state = {str(i): torch.full((1000 + i % 2,), float(i)) for i in range(6)}
    counts = []
    for each in (state, state, {"0": torch.zeros(1000)}, state):
        copy.take(each)
        counts.append((len(made), sum(each() is not None for each in made)))
    assert counts == [(6, 6), (6, 6), (6, 1), (11, 6)], "what has no use any more is freed"


LARGE = 1_000_000  # weights of 4 MB: written in more time than a step takes


class Counts(checkpointing.OneWeight):
    """Each step adds 0.1 to all weights, so the weights show of which step they are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(LARGE)) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return -sum(parameter.sum() for parameter in self.parameters())  # type: ignore[return-value]


Fit = Callable[..., Checkpointer]


@pytest.fixture
def fit(tmp_path: Path) -> Iterator[Fit]:
    """Trains for some steps and saves after each `every`; whatever happens, no thread is left, nor
    half of a file."""

    def run(steps: int, *callbacks: Callback, every: int = 1, **more: Any) -> Checkpointer:
        often = {"every_n_steps": every, "every_n_epochs": 1000, **more}
        ours = checkpointing.checkpointer(tmp_path / "checkpoints", **often)
        data = checkpointing.numbers(1000)
        checkpointing.fit(Counts(), [*callbacks, ours], data, max_steps=steps)
        return ours

    before, limits = threading.active_count(), resource.getrlimit(resource.RLIMIT_FSIZE)
    yield run
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert threading.active_count() == before
    assert not list((tmp_path / "checkpoints").glob(".*"))


def at_start(do: Callable[[Trainer], Any]) -> Callback:
    return LambdaCallback(on_train_batch_start=lambda trainer, *_: do(trainer))


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(".ckpt")]


def saved(folder: Path) -> dict[int, Path]:
    """step -> the checkpoint of that step; all are intact, last.ckpt too."""
    paths = CheckpointStore(folder / "checkpoints").all()
    assert all(damage_of(path) is None for path in [*paths, paths[0].with_name("last.ckpt")])
    return {json.loads(manifest_of(path).read_text())["step"]: path for path in reversed(paths)}


@pytest.mark.parametrize("background", [True, False])
def test_no_checkpoint_mixes_two_steps(
    fit: Fit, tmp_path: Path, monkeypatch, caplog, background: bool
) -> None:
    """In the background it is written while the training continues; a wait is reported once."""
    monkeypatch.setattr("distdl.checkpoint.saving.PATIENCE", 0.0)
    writing: list[bool] = []
    fit(3, at_start(lambda _: writing.append(bool(writers()))), background=background)
    assert writing == [False, background, background]
    assert caplog.text.count("save less often (checkpoint.every_n_steps") == background
    files = saved(tmp_path)
    assert list(files) == [1, 2, 3]
    for step, path in files.items():
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["global_step"] == step
        assert all(
            torch.allclose(w, torch.tensor(step / 10)) for w in checkpoint["state_dict"].values()
        )


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_was_begun_is_published_whatever_ends_the_training(fit: Fit, tmp_path, kind) -> None:
    def end(trainer: Trainer) -> None:
        if trainer.global_step == 3:
            raise kind("in the middle")

    with pytest.raises((kind, SystemExit)):
        fit(6, at_start(end), every=3)
    assert list(saved(tmp_path)) == [3]


@pytest.mark.parametrize("steps", [1000, 40])
def test_a_failed_write_ends_the_training(fit: Fit, tmp_path, caplog, steps) -> None:
    """At the latest when the next one is due (step 60), or the training ends. From step 35 on no
    file may be larger than 1 MB, as on a full disk."""
    reached = [0]

    def fill(trainer: Trainer) -> None:
        reached.append(trainer.global_step)
        if trainer.global_step == 35:
            for thread in writers():
                thread.join()
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))

    with pytest.raises(SaveError, match=r"step_00000040.ckpt could not be saved: OSError: .*large"):
        fit(steps, at_start(fill), every=20)
    assert 39 <= reached[-1] <= 60
    assert "earlier checkpoints are unchanged" in caplog.text
    assert list(saved(tmp_path)) == [20]


class Stubborn:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("only by pickle")


def test_what_cannot_be_copied_is_written_at_once(fit: Fit, tmp_path: Path, caplog) -> None:
    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": Stubborn()}

    with torch.serialization.safe_globals([Stubborn]):
        fit(2, Keeps())
    assert list(saved(tmp_path)) == [1, 2]
    assert caplog.text.count("no copy could be made: TypeError: only by pickle") == 1


def test_a_users_own_checkpoint_is_there_at_once(fit: Fit, tmp_path: Path) -> None:
    def read(trainer: Trainer) -> None:
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        step = torch.load(tmp_path / "own.ckpt", weights_only=False)["global_step"]
        assert step == trainer.global_step

    fit(2, at_start(read))
    assert list(saved(tmp_path)) == [1, 2]
