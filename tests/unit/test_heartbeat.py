"""What a rank is doing, as its watchdog and its monitor see it, by a real Trainer."""

from __future__ import annotations

import functools
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distdl.health import heartbeat
from distdl.health.heartbeat import PHASES, RankHeartbeat
from distdl.worker.build import Unprofiled

ROWS, BATCHES = 2, 3
# Where a user's code is called -> the phase, and whether it belongs to a batch.
HOOKS = {
    "prepare_data": {("prepare_data", False)},
    "setup": {("outside", False)},
    "configure_optimizers": {("outside", False)},
    "train_dataloader": {("set-up", False)},
    "dataset": {("data", True), ("validation", True)},
    "transfer_batch_to_device": {("copy", True), ("validation", True)},
    "on_train_start": {("set-up", False)},
    "on_train_epoch_start": {("callbacks", False)},
    "on_train_batch_start": {("callbacks", True)},
    "training_step": {("forward", True)},
    "on_before_backward": {("backward", True)},
    "on_before_optimizer_step": {("optimizer", True)},
    "on_train_batch_end": {("callbacks", True)},
    "on_train_epoch_end": {("callbacks", False)},
    "on_validation_epoch_start": {("validation", False)},
    "validation_step": {("validation", True)},
    "on_validation_epoch_end": {("validation", False)},
    "on_save_checkpoint": {("checkpoint", False)},
    "on_fit_end": {("outside", False)},
    "test_step": {("validation", True)},
    "predict_step": {("validation", True)},
}


class Rows(Dataset[torch.Tensor]):
    def __init__(self, note: Any) -> None:
        self.note = note

    def __len__(self) -> int:
        return ROWS * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.note("dataset")
        return torch.ones(2)


class Plain(LightningModule):
    def __init__(self, rank: RankHeartbeat) -> None:
        super().__init__()
        self.layer, self.rank = nn.Linear(2, 1), rank
        self.seen: dict[str, set[Any]] = {}
        self.steps = list[Any]()

    def note(self, name: str) -> None:
        frame, stack = sys._getframe(1), list[heartbeat.Frame]()
        while frame := frame.f_back:  # type: ignore[assignment]
            stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        phase, action, in_batch = heartbeat.seen_in(stack)
        seen = ("outside" if phase is None else PHASES[phase], in_batch)
        self.seen.setdefault(name, set()).add(seen)
        self.seen.setdefault(f"action of {name}", set()).add(action)
        if name == "training_step":
            self.rank.look(stack)
            self.steps.append((heartbeat.read(self.rank.file.fileno()), self.rank.facts()))

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(Rows(self.note), batch_size=ROWS)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _noting(name: str) -> Any:
    method = getattr(Plain, name)

    @functools.wraps(method)
    def noting(self: Plain, *args: Any, **kwargs: Any) -> Any:
        self.note(name)
        return method(self, *args, **kwargs)

    del noting.__wrapped__  # type: ignore[attr-defined] # Lightning takes it for the base's own
    return noting


Net = type("Net", (Plain,), {name: _noting(name) for name in HOOKS if name != "dataset"})


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> SimpleNamespace:
    """A training of two epochs, a test and a prediction."""
    rank = RankHeartbeat()
    net = Net(rank)
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    folder = tmp_path_factory.mktemp("trainer")
    trainer = Trainer(max_epochs=2, accelerator="cpu", default_root_dir=folder, **options)
    rank.watch(trainer)
    rank.time_steps(True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(net)
        steps = [*rank.steps]
        trainer.test(net, verbose=False)
        trainer.predict(net)
    return SimpleNamespace(rank=rank, net=net, steps=steps)


def test_each_hook_is_in_its_phase(followed) -> None:
    assert {name: followed.net.seen[name] for name in HOOKS} == HOOKS
    (action,) = followed.net.seen["action of on_train_epoch_end"]
    assert action.startswith(heartbeat.BETWEEN_EPOCHS)


def test_the_phases_of_a_step_with_their_times(followed) -> None:
    order = ["data", "copy", "callbacks", "forward", "backward", "optimizer", "callbacks", "data"]
    # The last step of an epoch has the validation in it.
    inside = [step for number, step in enumerate(followed.steps) if number % BATCHES != BATCHES - 1]
    assert [[PHASES[phase] for phase, _ in step] for step in inside] == [order] * len(inside)
    assert len(inside) >= 2 * (BATCHES - 1) and followed.rank.count == 2 * BATCHES
    for step in followed.steps:
        times = [time for _, time in step]
        assert times == sorted(times)


def test_the_monitor_reads_how_far_the_rank_is(followed) -> None:
    expected = [(number, *divmod(number, BATCHES)) for number in range(2 * BATCHES)]
    assert len(followed.net.steps) == len(expected)
    for (read, facts), (step, epoch, batch) in zip(followed.net.steps, expected, strict=True):
        assert read == {"step": step, "epoch": epoch, "batch": batch + 1}
        assert facts == read | {"phase": "forward", "action": facts["action"]}


def test_steps_are_timed_only_while_they_are_compared() -> None:
    rank, profiler = RankHeartbeat(), Unprofiled()
    strategy = SimpleNamespace(training_step=lambda: "loss")
    fit = SimpleNamespace(advance=None)
    rank.watch(SimpleNamespace(profiler=profiler, strategy=strategy, fit_loop=fit))
    for wanted in (False, True, True, False, True, True):
        rank.time_steps(wanted)
        with profiler.profile("train_dataloader_next"):
            assert strategy.training_step() == "loss"
        profiler.start("on_train_batch_end")
    assert (rank.count, len(rank.steps)) == (6, 2)
    rank.time_steps(False)
    assert not vars(profiler).keys() & {"profile", "start"}, (
        "a step that is not timed costs nothing"
    )


def test_progress_is_any_step_batch_or_other_phase() -> None:
    counts = [
        SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(ready=0)))
        for _ in range(5)
    ]
    train, val, validate, test, predict = counts
    train.global_step, train.val_loop = 0, val
    trainer = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=train, advance=None),
        validate_loop=validate,
        test_loop=test,
        predict_loop=predict,
        strategy=SimpleNamespace(training_step=None),
    )
    rank = RankHeartbeat()
    rank.watch(trainer)
    before = rank.progress
    assert rank.progress == before
    train.global_step = 1
    assert rank.progress != before
    before = rank.progress
    for each in counts:
        each.batch_progress.total.ready += 1
        assert rank.progress != before
        before = rank.progress
    rank.look([("/lightning/pytorch/loops/fetchers.py", 1, "__next__")])
    assert rank.progress != before and rank.in_step


def test_before_a_trainer_there_is_only_the_phase() -> None:
    rank = RankHeartbeat()
    assert heartbeat.read(rank.file.fileno()) == {}
    assert rank.facts() == {"phase": "set-up", "action": "start"}
