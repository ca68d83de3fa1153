"""Importing torch and Lightning, which takes seconds and leaves half a million objects."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

# Records that imports logged before the run had a log.
_early: list[logging.LogRecord] = []


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports of Lightning. Garbage collection is off during them, because it would take a
    sixth of the time. Afterwards it ignores their objects, because a look at all of them would
    delay a training step by half a second (https://docs.python.org/3/library/gc.html#gc.freeze)."""
    if "lightning" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # some libraries look for uncollected objects at exit


def ignore_warnings_for_authors() -> None:
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category)


@contextmanager
def no_exit() -> Iterator[None]:
    """For imports of the user's code: `os._exit` raises SystemExit, as `sys.exit` does. Otherwise
    the call would end the command without a message, possibly with exit code 0."""
    real = os._exit
    process = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a forked child
            real(status)
        raise SystemExit(f"os._exit({status}) would end Python")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = real


@contextmanager
def logged_later() -> Iterator[None]:
    """For imports before the run has a log: keeps their messages and warnings for `log_early`."""
    root = logging.getLogger()
    handler = logging.Handler()
    level = root.level
    handler.emit = _early.append  # type: ignore[assignment]
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            ignore_warnings_for_authors()
            yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        root.removeHandler(handler)


def log_early() -> None:
    """Logs the records that `logged_later` kept."""
    for record in _early:
        logging.getLogger(record.name).handle(record)
    _early.clear()
