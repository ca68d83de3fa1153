"""A run that is a trial of a search: after each validation it asks whether to go on."""

from __future__ import annotations

from lightning.pytorch import Trainer

from distdl.job import JobState
from distdl.ranks.stopping import StopRequest
from distdl.runs.verdicts import DONE, Verdicts
from distdl.tracking import journal


class JudgedRun:
    """Raises the flag to stop, if the search says so. The other ranks see the flag as they see that
    of a signal.

    Args:
        stop: The flag of this process.

    Attributes:
        verdicts: What the search says; None in a run that no search judges, and on all ranks but 0.
    """

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop
        self.verdicts: Verdicts | None = None
        # The step that the journal has for a validation of which the search was not asked yet.
        self._unjudged: int | None = None

    def validated(self, trainer: Trainer) -> None:
        """A validation has ended. The search sees what it has logged."""
        if self.verdicts is not None:
            self._unjudged = journal.write_all(trainer.loggers)

    def ask(self) -> None:
        """Asks of the validation that has just ended, if there was one since the last call."""
        if self.verdicts is None or self._unjudged is None:
            return
        word = self.verdicts.after(self._unjudged)
        self._unjudged = None
        if word in DONE and not self.stop:
            self.stop.ask(JobState.PRUNED, DONE[word])
