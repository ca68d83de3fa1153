"""Learning rate schedules per optimizer step: warm-up, then a cosine, a line, steps, a constant."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from distdl.optim.budget import StepsLeft
from distdl.util.ranges import AboveZero, NotNegative

log = logging.getLogger(__name__)

EARLY = 10  # before a tenth of a training nobody is told that its time is too short


@dataclass(frozen=True)
class Length:
    """The length of a training in optimizer steps (after accumulation)."""

    steps_per_epoch: int  # data without a length counts as one epoch
    max_epochs: int  # that are started, at least one
    total_steps: float  # infinity: no limit, or the data's length is unknown


def length_of(trainer: Trainer) -> Length:
    """The length that a Trainer's `max_epochs`, `max_steps` and loaders (set up already) give."""
    total = trainer.estimated_stepping_batches
    total = math.inf if total < 0 else total  # -1: no max_steps, and data without a length
    batches = trainer.num_training_batches
    if math.isinf(batches):
        return Length(1 if math.isinf(total) else max(1, int(total)), 1, total)
    per_epoch = max(1, math.ceil(batches / trainer.accumulate_grad_batches))
    epochs = 1 if math.isinf(total) else max(1, math.ceil(total / per_epoch))
    return Length(per_epoch, epochs, total)


def warmup_cosine(
    optimizer: Optimizer,
    steps_per_epoch: int,
    max_epochs: int,
    warmup_epochs: NotNegative = 5,
    min_lr_ratio: NotNegative = 0.0,
    warmup_from: float | str = 0.0,
    total_steps: float | None = None,
    budget: StepsLeft | None = None,
) -> LambdaLR:
    """Linear warm-up, then half a cosine to `min_lr_ratio` of the full rate (Loshchilov 2017).

    Args:
        max_epochs: The cosine ends with the last epoch, or with `total_steps` if given.
        warmup_epochs: May be a fraction; 0: no warm-up.
        min_lr_ratio: From 0 to 1.
        warmup_from: The warm-up's start as a share of the full rate. "reference": the rate before
            scaling by the global batch (Goyal et al. 2017, section 2.2), so a run at the reference
            batch has no warm-up. The k-th of w steps has the share start + (1 - start) * k / w, so
            the first step's rate is above 0 even if the start is 0.
        total_steps: Of the complete training, which may end within an epoch.
        budget: The cosine ends with this time, if it comes first (`OnTheClock`).

    If the warm-up is longer than the training, the training ends within it, with a warning.
    """
    steps = _steps(steps_per_epoch, max_epochs, total_steps, warmup_epochs)

    def cosine(place: float) -> float:
        return min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * place)) / 2

    return _to_the_end(optimizer, steps, warmup_from, cosine, budget)


def warmup_linear(
    optimizer: Optimizer,
    steps_per_epoch: int,
    max_epochs: int,
    warmup_epochs: NotNegative = 5,
    min_lr_ratio: NotNegative = 0.0,
    warmup_from: float | str = 0.0,
    total_steps: float | None = None,
    budget: StepsLeft | None = None,
) -> LambdaLR:
    """Linear warm-up, then a line down to `min_lr_ratio` of the full rate (Li et al. 2020,
    "Budgeted Training", https://arxiv.org/abs/1905.04753). Arguments: see `warmup_cosine`."""
    steps = _steps(steps_per_epoch, max_epochs, total_steps, warmup_epochs)

    def line(place: float) -> float:
        return min_lr_ratio + (1 - min_lr_ratio) * (1 - place)

    return _to_the_end(optimizer, steps, warmup_from, line, budget)


def warmup_step(
    optimizer: Optimizer,
    steps_per_epoch: int,
    max_epochs: int,
    milestones: list[float] | tuple[float, ...] = (30, 60, 80),
    gamma: AboveZero = 0.1,
    warmup_epochs: NotNegative = 5,
    warmup_from: float | str = "reference",
    total_steps: float | None = None,
) -> LambdaLR:
    """Linear warm-up, then a factor of `gamma` at each milestone, in epochs (Goyal et al. 2017).

    The other arguments are those of `warmup_cosine`.
    """
    warmup, _ = _steps(steps_per_epoch, max_epochs, total_steps, warmup_epochs)
    steps = [round(milestone * steps_per_epoch) for milestone in milestones]

    def after(step: int) -> float:
        return gamma ** sum(step >= milestone for milestone in steps)

    return _warmed_up(optimizer, warmup, warmup_from, after)


def constant(
    optimizer: Optimizer,
    steps_per_epoch: int,
    max_epochs: int,
    warmup_epochs: NotNegative = 0,
    warmup_from: float | str = 0.0,
    total_steps: float | None = None,
) -> LambdaLR:
    """Linear warm-up (default: none), then the full rate. Arguments: see `warmup_cosine`."""
    warmup, _ = _steps(steps_per_epoch, max_epochs, total_steps, warmup_epochs)
    return _warmed_up(optimizer, warmup, warmup_from, lambda step: 1.0)


def _steps(
    steps_per_epoch: int, max_epochs: int, total_steps: float | None, warmup_epochs: float
) -> tuple[int, float]:
    """The steps of the warm-up and of the training."""
    total = steps_per_epoch * max_epochs if total_steps is None else total_steps
    warmup = round(warmup_epochs * steps_per_epoch)
    if warmup > total:
        # A short trial of a long recipe is allowed, but its rates are not the recipe's.
        log.warning(
            f"schedule.warmup_epochs={warmup_epochs:g} is {warmup} optimizer steps and training "
            f"lasts {int(total)}: all of it is warm-up (schedule.warmup_epochs=0: none)"
        )
    return warmup, total


def _to_the_end(
    optimizer: Optimizer,
    steps: tuple[int, float],
    warmup_from: float | str,
    curve: Callable[[float], float],
    budget: StepsLeft | None,
) -> LambdaLR:
    """A warm-up, and a curve that ends with the training.

    Args:
        steps: Of the warm-up and of the training.
        curve: See `OnTheClock`.
    """
    warmup, total = steps
    if budget is not None:
        start = _start_of(optimizer, warmup_from)
        return OnTheClock(optimizer, warmup, start, curve, total, budget)
    decay = max(1, total - warmup)

    def after(step: int) -> float:
        return curve(min(1.0, (step - warmup) / decay))

    return _warmed_up(optimizer, warmup, warmup_from, after)


def _warmed_up(
    optimizer: Optimizer, warmup: int, warmup_from: float | str, after: Callable[[int], float]
) -> LambdaLR:
    start = _start_of(optimizer, warmup_from)

    # A plain function: LambdaLR does not save it, so its state holds only numbers.
    def share(step: int) -> float:
        return _rising(start, step, warmup) if step < warmup else after(step)

    return LambdaLR(optimizer, share)


def _start_of(optimizer: Optimizer, warmup_from: float | str) -> float:
    """The share of the full rate with which a warm-up starts."""
    if warmup_from != "reference":
        return float(warmup_from)
    group = optimizer.param_groups[0]
    return min(1.0, float(group.get("reference_lr", group["lr"]) / (group["lr"] or 1.0)))


def _rising(start: float, step: int, warmup: int) -> float:
    return start + (1 - start) * (step + 1) / warmup


class OnTheClock(LambdaLR):
    """A warm-up of a number of steps, then a curve whose end is that of a training's time.

    How many steps are left is an estimate, which changes. So each step goes the same share of what
    is left of the curve, and not to the place that the newest estimate would give it: the rate has
    no jump, never rises again, and reaches the curve's end with the last step.

    Args:
        start: The share of the full rate with which the warm-up starts.
        curve: The share of the full rate at each place, from 0 after the warm-up to 1 at the end.
        total: Steps after which the training ends in any case; infinity: none.

    Attributes:
        place: On the curve; in a checkpoint.
        meant_for: The whole time and `total` that `place` was found for; in a checkpoint. A resumed
            run with others, or without a time before, finds its place anew.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup: int,
        start: float,
        curve: Callable[[float], float],
        total: float,
        budget: StepsLeft,
    ) -> None:
        self.place = 0.0
        self.meant_for: list[float] = []
        self._parts = (warmup, total, budget)  # not in a checkpoint: see `state_dict`
        self._warned = False

        def share(step: int) -> float:
            return _rising(start, step, warmup) if step < warmup else curve(self.place)

        super().__init__(optimizer, share)

    def step(self, epoch: int | None = None) -> None:
        self._go_on(self.last_epoch + 1)
        super().step(epoch)

    def _go_on(self, step: int) -> None:
        """Finds the place on the curve for the rate of a step, of which the first is 0."""
        warmup, total, budget = self._parts
        left = min(total - step, budget.steps_left)
        if math.isinf(left):
            return
        if step + left < warmup and step >= left / EARLY and not self._warned:
            self._warned = True
            log.warning(
                f"the warm-up of {warmup} optimizer steps is longer than the training, which has "
                f"time for some {step + left:.0f}: schedule.warmup_epochs=0, or a longer "
                "trainer.max_time"
            )
        limits = [budget.seconds, float(total)]
        if step > warmup and self.meant_for == limits:
            self.place += (1 - self.place) / (max(0.0, left) + 1)
        elif step > warmup:
            self.place = (step - warmup) / max(1.0, step - warmup + left)
        self.meant_for = limits

    def state_dict(self) -> dict[str, Any]:
        own = ("_parts", "_warned")
        return {key: value for key, value in super().state_dict().items() if key not in own}


def rescale_schedule(
    scheduler: LRScheduler,
    optimizer: Optimizer,
    *,
    old_lr: float,
    new_lr: float,
    step_ratio: float,
) -> None:
    """Adapts a schedule to another global batch, after both states were loaded from a checkpoint.

    Args:
        scheduler: Built for the new run, with the old run's state. A LambdaLR (all of ours)
            follows the new run's curve; for others the current rate is multiplied by
            new_lr / old_lr, the full rates of both runs.
        optimizer: Also of the new run, with the old run's state.
        step_ratio: Old global batch / new global batch; 1 if the schedule steps once per epoch.
    """
    ratio = new_lr / old_lr
    scheduler.base_lrs = [rate * ratio for rate in scheduler.base_lrs]
    scheduler.last_epoch = round(scheduler.last_epoch * step_ratio)
    for index, group in enumerate(optimizer.param_groups):
        for name in ("initial_lr", "lr", "max_lr", "min_lr"):
            if name in group:
                group[name] *= ratio
        if isinstance(scheduler, LambdaLR):
            share = scheduler.lr_lambdas[index](scheduler.last_epoch)
            group["lr"] = scheduler.base_lrs[index] * share
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]
