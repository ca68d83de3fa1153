"""A training that ends on the clock: the steps it expects, the rate that follows them, and what a
resume goes on with."""

from __future__ import annotations

import math
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from distdl.distributed import agreement
from distdl.optim.budget import Pace, Reading, TimeBudget
from distdl.optim.optimizers import build_schedule
from distdl.optim.schedules import warmup_cosine
from distdl.runs.checkpoints import CheckpointStore, manifest_at
from tests.prepared import refusal
from tests.unit import checkpointing
from tests.unit.checkpointing import numbers

WARMUP = 10
EPOCH = 50


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def simulated(seconds, step, validation, *, lag=0, total=math.inf):
    """The rate of each step, and the time that was used; `lag`: steps after which ranks agree."""
    now = SimpleNamespace(seconds=0.0)
    budget = TimeBudget(seconds, clock=lambda: now.seconds)
    ours = optimizer()
    length = {"total_steps": total, "budget": budget}
    schedule = warmup_cosine(ours, EPOCH, 1, WARMUP / EPOCH, **length)
    rates = []
    sent = deque([Reading()] * lag)
    budget.begin()
    while len(rates) < total:
        done = len(rates)
        budget.begin_step(done)
        rates.append(ours.param_groups[0]["lr"])
        now.seconds += step(done)
        ours.step()
        schedule.step()
        is_over = budget.is_over
        sent.append(budget.look(done + 1))
        budget.agreed(sent.popleft())
        if is_over:
            break
        if (done + 1) % EPOCH == 0:
            now.seconds += validation
            budget.pause()
            sent = deque([Reading()] * lag)  # ranks agree at once here
            budget.agreed(budget.look(done + 1))
            if budget.is_over:
                break
    return rates, now.seconds


def uneven(step):
    return random.Random(step).uniform(0.7, 1.3)


PACES = {
    "even": (lambda step: 1.0, 0.0, 0),
    "validations": (lambda step: 1.0, 30.0, 0),
    "a validation is as long as an epoch": (lambda step: 1.0, 50.0, 1),
    "ranks that agree a step later": (uneven, 20.0, 1),
    "slower on the way": (lambda step: 1.0 if step < 150 else 2.0, 20.0, 1),
    "faster on the way": (lambda step: 2.0 if step < 100 else 0.6, 20.0, 1),
    "the first step compiles": (lambda step: 1.0 if step else 90.0, 20.0, 0),
    "a resume waits": (lambda step: 40.0 if step == 120 else 1.0, 20.0, 0),
}


@pytest.mark.parametrize("pace", PACES)
def test_the_rate_ends_with_the_time_and_has_no_cliff(pace):
    step, validation, lag = PACES[pace]
    rates, used = simulated(700.0, step, validation, lag=lag)
    falls = [one - other for one, other in zip(rates[WARMUP:], rates[WARMUP + 1 :], strict=False)]
    assert rates[:WARMUP] == pytest.approx([(k + 1) / WARMUP for k in range(WARMUP)])
    assert rates[-1] < 1e-3, "the curve has ended"
    assert 697.5 < used < 702.5 + validation, "a validation that has begun is not cut short"
    assert min(falls) >= 0, "the rate never rises again"
    assert max(falls) < 2.2 * (math.pi / 2) / len(falls), "the steepest step of a cosine, doubled"


def test_a_step_that_waited_says_nothing_of_the_others():
    pace = Pace()
    for seconds in (1.0,) * 50 + (300.0,) + (1.0,) * 5:
        pace.learn(seconds, 1)
    assert pace.step == pytest.approx(1.0, abs=0.1)


def test_after_a_pause_the_next_one_is_an_epoch_away():
    """Also before a step has shown how long the pause was."""
    now = SimpleNamespace(seconds=0.0)
    budget = TimeBudget(1000.0, clock=lambda: now.seconds)
    budget.begin()
    for done in range(100):
        budget.begin_step(done)
        now.seconds += 1
        budget.agreed(budget.look(done + 1))
        if done + 1 in (EPOCH, 2 * EPOCH):
            now.seconds += 20
            budget.pause()
            budget.agreed(budget.look(done + 1))
    budget.begin_step(100)
    # 859 s: 49 steps, a pause, eleven epochs of 50 steps and a pause, and 20 steps.
    assert budget.steps_left == pytest.approx(49 + 11 * 50 + 20)


def test_of_two_ends_the_nearer_one_counts():
    known, used = simulated(1e6, lambda step: 1.0, 10.0, total=200)
    ours = optimizer()
    plain = warmup_cosine(ours, EPOCH, 4, WARMUP / EPOCH, total_steps=200)
    expected = []
    for _ in range(200):
        expected.append(ours.param_groups[0]["lr"])
        ours.step()
        plain.step()
    assert known == pytest.approx(expected, abs=1e-12)
    assert used < 250
    timed, used = simulated(120.0, lambda step: 1.0, 0.0, total=200)
    assert len(timed) == 120
    assert timed[-1] < 1e-3


def test_a_warm_up_for_which_there_is_no_time_is_said(caplog):
    simulated(9.0, lambda step: 1.0, 0.0)
    assert "the warm-up of 10 optimizer steps is longer than the training" in caplog.text
    assert "some 9:" in caplog.text
    caplog.clear()
    simulated(30.0, lambda step: 1.0, 0.0)
    assert not caplog.text


def test_more_time_and_another_end_give_another_place_on_the_curve():
    """As a cosine of more epochs does; without it the rate would stay where it had ended."""
    left = SimpleNamespace(seconds=60.0, steps_left=0.0)
    ours = optimizer()
    first = warmup_cosine(ours, EPOCH, 1, 0, total_steps=math.inf, budget=left)
    for step in range(60):
        left.steps_left = 59.0 - step
        ours.step()
        first.step()
    assert ours.param_groups[0]["lr"] == pytest.approx(0)
    assert {"place", "meant_for"} <= first.state_dict().keys()
    assert not {"_parts", "_warned"} & first.state_dict().keys()
    more = SimpleNamespace(seconds=120.0, steps_left=59.0)
    second = warmup_cosine(ours, EPOCH, 1, 0, total_steps=math.inf, budget=more)
    second.load_state_dict(first.state_dict())
    ours.step()
    second.step()
    assert ours.param_groups[0]["lr"] == pytest.approx(0.5, abs=0.02)


def test_schedules_and_a_clock():
    """Those without an end are as ever, those with a length of their own as well; of the others,
    those that look at the clock get it."""
    left = SimpleNamespace(seconds=60.0, steps_left=30.0)
    length = {"steps_per_epoch": 10, "max_epochs": 2, "budget": left}

    def built(name, **arguments):
        target = name if "." in name else f"torch.optim.lr_scheduler.{name}"
        return build_schedule(optimizer(), {"_target_": target, **arguments}, **length)["scheduler"]

    for name, arguments in (
        ("distdl.optim.constant", {}),
        ("distdl.optim.warmup_step", {}),
        ("distdl.optim.warmup_cosine", {"total_steps": 20}),
        ("StepLR", {"step_size": 3}),
        ("OneCycleLR", {"max_lr": 1.0, "total_steps": 20}),
    ):
        assert "place" not in built(name, **arguments).state_dict(), name
    for name in ("warmup_cosine", "warmup_linear"):
        assert "place" in built(f"distdl.optim.{name}").state_dict()
    problem = refusal(built, "OneCycleLR", max_lr=1.0)
    assert problem.path == "schedule"
    assert "OneCycleLR takes the length of the training (total_steps)" in problem.what
    assert "schedule.total_steps=STEPS" in problem.remedy


# What follows trains, by a clock that stands still but in steps and validations.
BATCHES = 12
VALIDATION = 4.0


class Killed(Exception):
    pass


class Timed(checkpointing.OneWeight):
    """Its weight becomes lower by the rate of each step."""

    def __init__(self, budget: TimeBudget) -> None:
        super().__init__()
        self.budget = budget
        self.validated_at: list[int] = []

    def validation_step(self, batch, batch_idx):
        self.validated_at.append(self.trainer.global_step)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        length = {"total_steps": math.inf, "budget": self.budget}
        schedule = warmup_cosine(optimizer, BATCHES, 1, 0.25, **length)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Clock(Callback):
    """Stands still but in steps, each of which takes its own time, and in validations."""

    def __init__(self, now: float, killed_at: int = 0) -> None:
        self.now = now
        self.killed_at = killed_at

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        # In parts that are whole microseconds: the two clocks must not round differently.
        self.now += random.Random(trainer.global_step).randint(32, 96) / 64
        if trainer.global_step == self.killed_at:
            raise Killed

    def on_validation_start(self, trainer: Any, *args: Any) -> None:
        self.now += VALIDATION


def train(folder: Path, seconds: float, *, now=0.0, killed_at=0, resume=False, **more: Any):
    clock = Clock(now, killed_at)
    budget = TimeBudget(seconds, clock=lambda: clock.now)
    module = Timed(budget)
    ours = checkpointing.checkpointer(folder / "checkpoints", every_n_steps=5, budget=budget)
    options = {"max_epochs": -1, "num_sanity_val_steps": 0, "default_root_dir": folder, **more}
    path = newest(folder) if resume else None
    checkpointing.fit(
        module,
        [clock, ours],
        numbers(BATCHES),
        numbers(1),
        resume=path,
        limit_val_batches=1,
        **options,
    )
    return module, budget


def newest(folder: Path) -> Path:
    path = CheckpointStore(folder / "checkpoints").newest()
    assert path is not None
    return path


def state(folder: Path) -> dict[str, Any]:
    loaded = torch.load(newest(folder), weights_only=True)
    kept = ("state_dict", "lr_schedulers", "optimizer_states", "global_step")
    return {key: loaded[key] for key in kept} | {"budget": loaded["distdl"]["budget"]}


@pytest.fixture(params=[1, 2])
def ranks(request, monkeypatch):
    """One rank, or two that agree a step later; the other one says nothing."""
    if request.param == 2:
        both = SimpleNamespace(world_size=lambda: 2, gather=lambda value: [value])
        sent = SimpleNamespace(wait=lambda: None)
        monkeypatch.setattr(agreement, "process_group", both)
        monkeypatch.setattr(agreement.dist, "all_reduce", lambda *_, **__: sent)


@pytest.mark.parametrize("killed_at", [11, 13, 27, 33])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path, ranks, killed_at):
    """It has used the time that its last checkpoint knew, and goes on by another clock. At 13 that
    is one of an epoch's end, at 27 and 33 of inside an epoch."""
    whole, budget = train(tmp_path / "whole", 60.0)
    steps = state(tmp_path / "whole")["global_step"]
    assert 30 < steps < 60
    with pytest.raises(Killed):
        train(tmp_path / "killed", 60.0, killed_at=killed_at)
    module, _ = train(tmp_path / "killed", 60.0, now=5000.25, resume=True)
    assert state(tmp_path / "killed") == state(tmp_path / "whole")
    assert float(module.weight) == float(whole.weight)
    assert budget.used / 1e6 == pytest.approx(60, abs=VALIDATION + 2)


def test_the_last_checkpoint_and_the_last_validation_are_there(tmp_path):
    module, _ = train(tmp_path, 40.0)
    steps = module.trainer.global_step
    assert steps % BATCHES
    assert module.validated_at == [BATCHES, 2 * BATCHES, steps]
    manifest = manifest_at(newest(tmp_path))
    assert (manifest["step"], manifest["reason"]) == (steps, "cut")
    rate = module.trainer.optimizers[0].param_groups[0]["lr"]
    assert rate < 0.02, "the curve has ended"
    # Nothing is left for a second attempt, and more time goes on where the first one ended.
    again, _ = train(tmp_path, 40.0, resume=True)
    assert again.trainer.global_step == steps
    assert again.validated_at == []
    more, _ = train(tmp_path, 70.0, resume=True)
    assert more.trainer.global_step > steps + 15
    assert more.trainer.optimizers[0].param_groups[0]["lr"] < 0.02


def test_time_that_ends_in_a_validation_ends_the_epoch(tmp_path):
    """Not one more step, which another validation would follow."""
    module, _ = train(tmp_path, 14.5)
    assert module.trainer.global_step == BATCHES
    assert module.validated_at == [BATCHES]
    assert manifest_at(newest(tmp_path))["reason"] == "epoch"
    inside, _ = train(tmp_path / "inside", 8.5, val_check_interval=6)
    assert inside.trainer.global_step == 6
    assert inside.validated_at == [6]


def test_the_time_of_lightnings_timer_counts(tmp_path):
    """In a checkpoint of before, which has the state of a Timer."""
    train(tmp_path, 20.0, max_steps=6)
    path = newest(tmp_path)
    loaded = torch.load(path, weights_only=True)
    loaded["distdl"]["budget"] = None
    loaded["callbacks"]["Timer"] = {"time_elapsed": {"train": 19.0}}
    torch.save(loaded, path)
    clock = Clock(0.0)
    budget = TimeBudget(20.0, clock=lambda: clock.now)
    ours = checkpointing.checkpointer(tmp_path / "checkpoints", budget=budget)
    data = numbers(BATCHES), numbers(1)
    options = {"max_epochs": -1, "default_root_dir": tmp_path}
    checkpointing.fit(Timed(budget), [clock, ours], *data, resume=str(path), **options)
    assert budget.used > 19e6
    assert manifest_at(newest(tmp_path))["step"] <= 9


def test_the_time_of_an_attempt_without_a_limit_counts_once_there_was_one(tmp_path):
    """It is in the checkpoint, so that a limit that is set again counts all since the first."""

    def attempt(budget: TimeBudget | None, clock: Clock, **more: Any) -> Any:
        ours = checkpointing.checkpointer(tmp_path / "checkpoints", budget=budget)
        ours.clock._clock = lambda: clock.now
        callbacks = [clock, ours]
        options = {"default_root_dir": tmp_path, **more}
        fitted = checkpointing.fit(
            checkpointing.OneWeight(), callbacks, numbers(BATCHES), **options
        )
        return fitted, torch.load(newest(tmp_path), weights_only=True)["distdl"]["budget"]

    _, kept = attempt(None, Clock(0.0), max_steps=3)
    assert kept is None, "the checkpoints of equal trainings are equal"
    first = Clock(0.0)
    _, kept = attempt(TimeBudget(1000.0), first, max_steps=6, resume=newest(tmp_path))
    assert kept["used"] == round(first.now * 1e6)
    second = Clock(70.0)
    _, kept = attempt(None, second, max_steps=9, resume=newest(tmp_path))
    before = first.now + second.now - 70
    assert kept == {"used": pytest.approx(before * 1e6, abs=1)}
    budget = TimeBudget(before + 9.0)
    again = Clock(5000.0)
    limited, _ = attempt(budget, again, max_epochs=-1, resume=newest(tmp_path))
    assert again.now - 5000 == pytest.approx(9, abs=1.5)
    assert limited.global_step > 9
