"""What a rank is doing, by the names of a real Trainer's actions; its monitor reads it too."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distdl.health import heartbeat
from distdl.health.heartbeat import PHASES, RankHeartbeat
from distdl.worker.build import Unprofiled

ROWS, BATCHES = 2, 3
STEP = (
    *("train_dataloader_next", "[Strategy]DDP.on_train_batch_start", "training_step"),
    "[LightningModule]Net.on_train_batch_end",
)
EVALUATIONS = ("validation", "test", "predict")
# The last parts of the actions' names, by the phase that they begin.
ACTIONS = {
    "set-up": ("setup", "on_fit_start"),
    "data": ("train_dataloader_next",),
    "copy": ("batch_to_device",),
    "forward": ("training_step",),
    "backward": ("backward",),
    "optimizer": ("on_after_backward",),
    "callbacks": tuple(
        f"on_train_{each}"
        for each in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    ),
    "validation": (
        *("on_sanity_check_start", "on_sanity_check_end", "on_validation_model_zero_grad"),
        *(f"{each}_step" for each in EVALUATIONS),
        *(f"{each}_next" for each in ("val", "test", "predict")),
        *(
            f"on_{each}_{moment}"
            for each in EVALUATIONS
            for moment in (
                *("model_eval", "start", "epoch_start", "batch_start"),
                *("batch_end", "epoch_end", "end"),
            )
        ),
    ),
    "checkpoint": ("save_checkpoint", "on_save_checkpoint"),
    "end": ("on_fit_end", "teardown"),
    "as before": (
        *("configure_callbacks", "configure_optimizers", "run_training_epoch"),
        *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
        *("run_training_batch", "optimizer_step", "on_before_zero_grad", "optimizer_zero_grad"),
        *("configure_gradient_clipping", "lr_scheduler_step"),
        *("on_before_backward", "on_before_optimizer_step"),
    ),
}
BY_NAME = {name: phase for phase, names in ACTIONS.items() for name in names}
OTHERS = {"prepare_data": "prepare_data", "configure_model": "set-up"}


class Net(LightningModule):
    """Notes what a monitor reads in each step."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.layer, self.read, self.notes = nn.Linear(2, 1), read, list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.notes.append(self.read())
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[0])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0])

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> SimpleNamespace:
    """A training of two epochs, a test and a prediction."""
    beats, actions = RankHeartbeat(), list[str]()
    beats.timing = True
    enter = beats.enter
    beats.enter = lambda action: actions.append(action) or enter(action)  # type: ignore[method-assign]
    net = Net(lambda: (heartbeat.read(beats.file.fileno()), beats.facts()))
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    folder = tmp_path_factory.mktemp("trainer")
    trainer = Trainer(max_epochs=2, accelerator="cpu", default_root_dir=folder, **options)
    beats.watch(trainer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = DataLoader(TensorDataset(torch.ones(ROWS * BATCHES, 2)), batch_size=ROWS)
        trainer.fit(net, loader, loader)
        steps = [*beats.steps]
        trainer.test(net, loader, verbose=False)
        trainer.predict(net, loader)
    return SimpleNamespace(beats=beats, actions=actions, steps=steps, notes=net.notes)


def test_each_action_begins_its_phase(followed) -> None:
    names = {action: action.rpartition(".")[2] for action in followed.actions}
    assert {*names.values()} == {*BY_NAME}, "Lightning has other actions"
    expected = {action: BY_NAME[name] for action, name in names.items()}
    numbers = {action: heartbeat.phase_of(action) for action in [*names, *OTHERS]}
    phases = {a: "as before" if number is None else PHASES[number] for a, number in numbers.items()}
    assert phases == expected | OTHERS
    # The report of a failure says where it happened.
    assert heartbeat.phase_of("[Callback]Mine.on_exception") is None


def test_the_phases_of_a_step_with_their_times(followed) -> None:
    beats = followed.beats
    order = ["data", "copy", "callbacks", "forward", "backward", "optimizer", "callbacks", "data"]
    # The last step of an epoch has the validation in it.
    inside = [step for number, step in enumerate(followed.steps) if number % BATCHES != BATCHES - 1]
    assert [[PHASES[phase] for phase, _ in step] for step in inside] == [order] * len(inside)
    assert len(inside) >= 2 * (BATCHES - 1) and beats.count == 2 * BATCHES
    for step in followed.steps:
        times = [time for _, time in step]
        assert times == sorted(times)
    counted = [action for action in followed.actions if heartbeat.phase_of(action) is not None]
    assert beats.beats == len(counted)


def test_the_monitor_reads_what_the_rank_is_doing(followed) -> None:
    expected = [(number, *divmod(number, BATCHES)) for number in range(2 * BATCHES)]
    assert len(followed.notes) == len(expected)
    for (read, facts), (step, epoch, batch) in zip(followed.notes, expected, strict=True):
        assert (read["step"], read["epoch"], read["batch"]) == (step, epoch, batch + 1)
        assert read["phase"] == "forward" and read["action"].endswith(".training_step")
        assert read.items() <= facts.items()


def test_steps_are_timed_only_while_they_are_compared() -> None:
    beats, profiler = RankHeartbeat(), Unprofiled()
    beats.watch(SimpleNamespace(profiler=profiler, state=SimpleNamespace(fn=None)))
    for beats.timing in (False, True, True, False, True, True):
        for name in STEP:
            with profiler.profile(name):
                assert beats.facts()["action"] == name
    assert (beats.count, beats.beats, len(beats.steps)) == (6, 24, 2)


def test_before_a_trainer_there_is_only_the_phase() -> None:
    beats = RankHeartbeat()
    for action in ("prepare_data", "[Callback]Mine.on_exception", "something new"):
        beats.enter(action)
    expected = {"phase": "prepare_data", "action": "prepare_data"}
    assert heartbeat.read(beats.file.fileno()) == beats.facts() == expected


@pytest.mark.parametrize(
    ("actions", "inside"),
    [
        ("setup", False),
        ("train_dataloader_next", True),
        ("training_step configure_gradient_clipping", True),
        ("on_train_batch_end", True),
        ("on_train_epoch_end", False),
        ("on_validation_batch_start val_next", True),
        ("validation_step", True),
        ("validation_step on_validation_epoch_end", False),
        ("on_train_batch_end save_checkpoint", False),
        ("on_fit_end", False),
    ],
)
def test_what_belongs_to_a_step(actions: str, inside: bool) -> None:
    beats = RankHeartbeat()
    for action in actions.split():
        beats.enter(action)
    assert beats.in_step is inside
