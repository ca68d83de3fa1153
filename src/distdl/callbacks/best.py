"""Decides which checkpoint is the best by the metric `checkpoint.monitor`."""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer

from distdl.distributed import process_group
from distdl.domains.classification.domain import Classification
from distdl.domains.domain import Domain
from distdl.util.errors import Problem, Unfinished
from distdl.util.suggest import closest

log = logging.getLogger(__name__)

# As in conf/distdl.yaml. Unless it was typed, the user did not choose this metric: a module of
# another domain is judged by its own main metric, and one that does not log it trains without a
# best.ckpt, with a warning.
UNCHOSEN = Classification.main_metric


class Best:
    """The best value so far. Rank 0 decides, as other ranks may log another value or none.

    Args:
        monitor: The metric's name; None for no best checkpoint.
        mode: "min" or "max". NaN is never the best.
        typed: Whether the user has typed the metric's name.
    """

    def __init__(self, monitor: str | None, mode: str, *, typed: bool = False) -> None:
        self.monitor = monitor
        self.mode = mode
        self.chosen = typed or monitor != UNCHOSEN
        self.score: float | None = None
        self.validated = False  # whether a validation other than a sanity check has ended
        self._logged = self._warned = False

    def judge(self, domain: Domain) -> None:
        """Takes the main metric of a module's domain, if the user has chosen none."""
        if not self.chosen and domain.main_metric is not None:
            self.monitor = domain.main_metric
            self.mode = domain.mode

    def improved(self, trainer: Trainer) -> bool:
        """Whether the metric's current value is the best so far. Collective."""
        if self.monitor is None:
            return False
        value = trainer.callback_metrics.get(self.monitor)
        score = process_group.broadcast(None if value is None else float(value))
        self._logged = self._logged or score is not None
        if score is None or math.isnan(score):
            return False
        better = operator.gt if self.mode == "max" else operator.lt
        if self.score is not None and not better(score, self.score):
            return False
        self.score = score
        return True

    def state(self) -> dict[str, Any]:
        return {"best": self.score, "monitor": self.monitor}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores the score, unless it is NaN or of another metric."""
        score = state["best"]
        same = state.get("monitor", self.monitor) == self.monitor
        self.score = score if same and score is not None and not math.isnan(score) else None

    def missing(self, trainer: Trainer, *, early: bool = False) -> bool:
        """Whether a validation has ended and the metric is not logged. Collective. For a metric
        that was not chosen, and in a sanity check, this only warns and returns False.

        Args:
            early: Called inside an epoch. Training metrics may be logged at the end of the epoch,
                so only a metric of the validation is known to be missing.
        """
        if self.monitor is None or self._logged or not (self.validated or trainer.sanity_checking):
            return False
        logged = sorted(trainer.callback_metrics)
        validations = [name for name in logged if name.startswith("val")]
        is_missing = self.monitor not in logged
        if early:
            is_missing = is_missing and bool(validations) and self.monitor.startswith("val")
        missing = process_group.broadcast(is_missing)
        if not missing or (self.chosen and not trainer.sanity_checking):
            return missing
        if not self._warned and validations and trainer.is_global_zero:
            self._warned = True
            log.warning("%s", self._problem(trainer, logged))
        return False

    def refuse(self, trainer: Trainer) -> None:
        """Ends a training whose metric is missing, by raising Unfinished. Save the state first."""
        raise Unfinished(self._problem(trainer, sorted(trainer.callback_metrics)))

    def warn_if_never_validated(self, trainer: Trainer) -> None:
        seen = self.validated or self._logged
        if self.monitor is not None and self.chosen and not seen:
            text = "checkpoint.monitor=%s: this attempt has no best.ckpt, as no validation has run"
            log.warning(text, self.monitor)

    def _problem(self, trainer: Trainer, logged: list[str]) -> Problem:
        near = closest(str(self.monitor), logged)
        names = ", ".join(logged) or "nothing"
        guess = f"did you mean {near}? " if near else ""
        value = near or "NAME, or null for no best.ckpt"
        resume = f"python -m distdl resume {trainer.default_root_dir} checkpoint.monitor={value}"
        return Problem(
            "checkpoint.monitor",
            what=f"{self.monitor} is not logged, so there is no best.ckpt; logged: {names}",
            remedy=guess + resume,
            code="incomplete",
        )
