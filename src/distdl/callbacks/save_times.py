"""When a checkpoint is due: after so many steps, minutes and epochs."""

from __future__ import annotations

import math
import time

from distdl.config.schema import Checkpoint


class SaveTimes:
    """Knows when the newest checkpoint was saved, and so when the next one is due.

    Args:
        settings: The config's section `checkpoint`.
    """

    def __init__(self, settings: Checkpoint) -> None:
        minutes = settings.every_minutes
        self.every_seconds = minutes * 60 if minutes else math.inf
        self.every_n_steps = settings.every_n_steps or math.inf
        self.every_n_epochs = settings.every_n_epochs
        self._saved_step = -1
        self._saved_at = time.monotonic()

    def saved(self, step: int) -> None:
        """The state after this step needs no checkpoint any more."""
        self._saved_step = step
        self._saved_at = time.monotonic()

    @property
    def is_overdue(self) -> bool:
        """Whether the minutes between two checkpoints are over, by this process's clock."""
        return time.monotonic() - self._saved_at >= self.every_seconds

    def reason(self, step: int, *, overdue: bool) -> str:
        """Why a checkpoint is due after a step: "step" or "time"; "": none is due.

        Args:
            overdue: What the ranks have agreed on. It waits for the next step if that one has a
                checkpoint in any case.
        """
        if step == self._saved_step:
            return ""
        if step % self.every_n_steps == 0:
            return "step"
        soon = (step + 1) % self.every_n_steps == 0
        return "time" if overdue and not soon else ""

    def after_epoch(self, epochs: int) -> bool:
        """Whether a checkpoint is due after so many epochs."""
        return epochs % self.every_n_epochs == 0
