"""What a search says of a run that it has started: go on, stop here for good, or pause here.

The command that searches writes `verdict.json` into the run's folder, and nobody else. If the
platform keeps the run's files elsewhere, it also leaves the file where $DISTDL_VERDICTS of the
ranks says. Rank 0 reads it after each validation, for an attempt whose launch.yaml says
`search.judged`. So no rank talks to the engine of the search, and a search that is gone stops no
run.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from distdl.job import VERDICTS
from distdl.runs import files
from distdl.stores import Absent, StoreError, open_store
from distdl.util import strict_json
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

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


def encoded(verdict: SearchVerdict) -> bytes:
    return strict_json.dumps(asdict(verdict)).encode()


def write(run: Path, verdict: SearchVerdict) -> None:
    """Raises an OSError if the store fails."""
    files.write_text(run / FILE, encoded(verdict).decode())


def read(content: bytes) -> SearchVerdict | None:
    """None if it is no verdict."""
    try:
        found = json.loads(content)
        return SearchVerdict(Word(found["word"]), int(found["step"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


class Verdicts:
    """Waits for the verdicts of one run, on rank 0.

    A search that has not answered to the last validation when the next one ends is not waited for:
    it is gone, or far away, and the run trains on. What it says later still counts.

    Args:
        place: Where it leaves its verdicts: the run's folder, or the address of a store. That is
            looked at once for each validation: the search has not yet seen the newest one.
    """

    def __init__(self, place: Path | str, patience: float = PATIENCE_S) -> None:
        self.patience = patience
        self.waits = isinstance(place, Path)
        self._content = _in_folder(place) if isinstance(place, Path) else _in_store(place)
        self._asked: int | None = None  # the step of the last validation
        self._thread: threading.Thread | None = None
        self._found: SearchVerdict | None = None

    @classmethod
    def of(cls, run: Path) -> Verdicts:
        """Those of a run whose folder is this one for its ranks."""
        return cls(os.environ.get(VERDICTS) or run)

    def after(self, step: int) -> Word:
        """What the search says of the validation at a step; GO_ON without an answer. Takes no
        longer than the patience, even if the store does not answer."""
        until = time.monotonic() + self.patience
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None  # it has found what was said of an earlier validation
        verdict = self._look(self.patience)
        if not self.waits or (
            self._asked is not None and (verdict is None or verdict.step < self._asked)
        ):
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
                self._found = read(self._content())

            self._found = None
            self._thread = threading.Thread(target=read_it, name="verdict", daemon=True)
            self._thread.start()
        self._thread.join(seconds)
        if self._thread.is_alive():
            return None
        self._thread = None
        return self._found


def _in_folder(run: Path) -> Callable[[], bytes]:
    def content() -> bytes:
        try:
            return (run / FILE).read_bytes()
        except OSError:
            return b""

    return content


def _in_store(address: str) -> Callable[[], bytes]:
    said = False
    opened = functools.cache(lambda: open_store(address, patience=0.0))

    def content() -> bytes:
        nonlocal said
        try:
            return opened().read(FILE)
        except Absent:
            return b""  # nothing was said so far
        except (StoreError, UserError) as error:
            if not said:
                log.warning("what the search says is not heard, and the run trains on: %s", error)
            said = True
            return b""

    return content
