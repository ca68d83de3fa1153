"""What a search says of a run that it has started: go on, stop here for good, or pause here.

The command that searches writes `verdict.json` into the run's folder, and nobody else. Rank 0 of
the run reads it after each validation, for an attempt whose launch.yaml says `search.judged`. So no
rank talks to the engine of the search, and a search that is gone stops no run.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from distdl.runs import files

FILE = "verdict.json"
PATIENCE_S = 2.0  # that a validation may wait for its verdict
LOOK_S = 0.02  # between two looks


class Word(StrEnum):
    GO_ON = "go on"
    PRUNE = "prune"
    PAUSE = "pause"


# How the end of an attempt is said: "pruned by its search at step 120".
DONE = {Word.PRUNE: "pruned by its search", Word.PAUSE: "paused by its search"}


@dataclass(frozen=True)
class SearchVerdict:
    """What holds from a step on.

    Args:
        step: The optimizer step of the newest validation that the search has seen.
    """

    word: Word
    step: int


def write(run: Path, verdict: SearchVerdict) -> None:
    """Raises an OSError if the store fails."""
    files.write_json(run / FILE, asdict(verdict))


def read(run: Path) -> SearchVerdict | None:
    """The newest verdict; None if there is none that can be read."""
    found = files.read_json(run / FILE)
    try:
        return SearchVerdict(Word(found["word"]), int(found["step"]))
    except (KeyError, TypeError, ValueError):
        return None


class Verdicts:
    """Waits for the verdicts of one run, on rank 0.

    A search that has not answered to the last validation when the next one ends is not waited for:
    it is gone, and the run trains on.
    """

    def __init__(self, run: Path, patience: float = PATIENCE_S) -> None:
        self.run = run
        self.patience = patience
        self._asked: int | None = None  # the step of the last validation
        self._thread: threading.Thread | None = None
        self._found: SearchVerdict | None = None

    def after(self, step: int) -> Word:
        """What the search says of the validation at a step; GO_ON without an answer. Takes no
        longer than the patience, even if the store does not answer."""
        until = time.monotonic() + self.patience
        verdict = self._look(self.patience)
        if self._asked is not None and (verdict is None or verdict.step < self._asked):
            until = 0.0
        self._asked = step
        while verdict is None or (verdict.word is Word.GO_ON and verdict.step < step):
            if time.monotonic() >= until:
                return Word.GO_ON
            time.sleep(LOOK_S)
            verdict = self._look(max(until - time.monotonic(), LOOK_S))
        return verdict.word

    def _look(self, seconds: float) -> SearchVerdict | None:
        """The newest verdict, if the store gives it in so many seconds."""
        if self._thread is None:

            def read_it() -> None:
                self._found = read(self.run)

            self._found = None
            self._thread = threading.Thread(target=read_it, name="verdict", daemon=True)
            self._thread.start()
        self._thread.join(seconds)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._found
