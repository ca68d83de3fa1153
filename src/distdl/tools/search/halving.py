"""Successive halving that pauses (Jamieson and Talwalkar, AISTATS 2016): no epoch is trained twice.

Trials form brackets. All trials of a bracket train up to its first rung, a number of validations,
and pause with a checkpoint. When the rung is full, the best third is resumed up to the next rung,
and the others are pruned. Optuna's own pruners decide about a trial while it runs and alone, since
its trials cannot pause.

A decision follows from the values that the runs have logged, and from nothing else: a command that
was killed finds the same one again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from distdl.tools.search.objectives import Objective
from distdl.util.errors import Problem

FACTOR = 3  # of the validations of two rungs, and of the trials that reach them
LENGTHS = ("trainer.max_epochs", "trainer.max_steps", "trainer.max_time")
MOST_RUNGS = 3  # before the end of the training, which is the last one


@dataclass(frozen=True)
class Rungs:
    """After how many validations trials pause; the last one is the end of their training."""

    ends: tuple[int, ...]

    @classmethod
    def of(cls, validations: int) -> Rungs:
        """
        Args:
            validations: Of a whole training.
        """
        ends = [validations]
        while len(ends) < MOST_RUNGS and ends[0] > 1:
            ends.insert(0, math.ceil(ends[0] / FACTOR))
        return cls(tuple(ends))

    @property
    def bracket(self) -> int:
        """The trials of a bracket, of which one is trained to the end."""
        return int(FACTOR ** (len(self.ends) - 1))


@dataclass(frozen=True)
class Standing:
    """A trial of a bracket.

    Args:
        values: Of its validations so far, in their order.
        is_out: It has failed, and takes no further part.
    """

    values: Sequence[float]
    is_out: bool = False


def decide(
    bracket: Mapping[int, Standing], rungs: Rungs, objective: Objective, *, complete: bool
) -> dict[int, int]:
    """Up to which validation each trial of a bracket may train: the end of its rung. One that may
    train no further than it has, while a later rung is decided, is pruned: it has 0.

    Args:
        bracket: By the number of the trial.
        complete: Whether no further trial joins the bracket. Before that no rung is full.
    """
    allowed = dict.fromkeys(bracket, rungs.ends[0])
    competing = [*bracket]
    for end, following in zip(rungs.ends, rungs.ends[1:], strict=False):
        values = {n: _value_at(bracket[n], end) for n in competing}
        reached = {n: value for n, value in values.items() if value is not None}
        competing = [n for n in competing if n in reached or not bracket[n].is_out]
        if not complete or len(reached) < len(competing) or not competing:
            break
        order = sorted(competing, key=lambda n: _rank(reached[n], objective, n))
        promoted = order[: math.ceil(len(order) / FACTOR)]
        allowed |= dict.fromkeys(order, 0) | dict.fromkeys(promoted, following)
        competing = promoted
    return allowed


def _value_at(standing: Standing, end: int) -> float | None:
    return standing.values[end - 1] if len(standing.values) >= end else None


def _rank(value: float, objective: Objective, number: int) -> tuple[bool, float, int]:
    """Sorts the best first; NaN last, and of equal values the earlier trial first."""
    sign = -1 if objective.mode == "max" else 1
    return math.isnan(value), 0.0 if math.isnan(value) else sign * value, number


def validations_of(config: DictConfig) -> int | None:
    """How many validations a training has; None: its config does not say."""
    trainer = config.trainer
    epochs = trainer.get("max_epochs")
    interval = trainer.get("val_check_interval")
    every = trainer.get("check_val_every_n_epoch", 1)
    limited = trainer.get("max_steps") not in (None, -1) or trainer.get("max_time")
    if limited or not isinstance(epochs, int) or epochs < 1 or not isinstance(every, int):
        return None
    if interval in (None, 1.0):
        return epochs // every
    if isinstance(interval, float) and 0 < interval < 1 and every == 1:
        return math.floor(1 / interval) * epochs
    return None


def problem_of(config: DictConfig, searched: Sequence[str]) -> Problem | None:
    """Why trials of this config cannot be halved."""
    varied = [key for key in LENGTHS if key in searched]
    if varied:
        return Problem(
            "--pruner halving",
            what=f"needs trainings of one length, and {varied[0]} is searched",
            remedy="--pruner asha",
            code="conflict",
        )
    if validations_of(config) is None:
        return Problem(
            "--pruner halving",
            what=(
                "must know how many validations a training has, "
                "and its length is no number of epochs"
            ),
            remedy="trainer.max_epochs=9, without max_steps and max_time; or --pruner asha",
            code="incomplete",
        )
    return None
