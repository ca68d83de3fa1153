"""The metrics of a training as events for a program that has started it (`util/answers.py`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distdl.runs import records
from distdl.runs.directory import RunDirectory
from distdl.util import answers

INTERVAL_S = 0.5


@contextmanager
def told(run: RunDirectory) -> Iterator[None]:
    """Within it, each new line of the run's journal is an event `metrics`. A run whose folder is
    elsewhere has none."""
    path = records.journal_path(run.path)
    if not answers.listened():
        yield
        return
    begin = path.stat().st_size if path.is_file() else 0
    stop = threading.Event()
    thread = threading.Thread(target=_follow, args=(path, begin, stop), name="events", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _follow(path: Path, offset: int, stop: threading.Event) -> None:
    ended = False
    while not ended:
        ended = stop.wait(INTERVAL_S)  # before the last look
        if not path.is_file() or path.is_symlink():
            continue
        for record in records.read(path, offset):
            offset = record.end
            answers.emit(
                "metrics",
                time=record.time,
                attempt=record.attempt,
                step=record.step,
                metrics=record.metrics,
            )
