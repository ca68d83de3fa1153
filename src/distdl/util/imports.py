"""Importing torch and Lightning: seconds of every start, and half a million objects that stay."""

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

FOR_AUTHORS = (DeprecationWarning, FutureWarning)  # of libraries
# What was logged by imports before the run had a log.
_early: list[logging.LogRecord] = []


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports of Lightning: no garbage collections meanwhile, and quick ones afterwards.

    What imports make lives as long as the process. Looking through it again and again takes a sixth
    of their time; later on, a full collection would hold up some training step for half a second.
    So it is put aside (https://docs.python.org/3/library/gc.html#gc.freeze) until the process ends.
    """
    if "lightning" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries count at the end what has not been collected


@contextmanager
def no_exit() -> Iterator[None]:
    """For imports of the user's code: `os._exit` fails as `sys.exit` does. It would end the command
    without a word, with the code 0 where that is what it was given."""
    real, process = os._exit, os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process:  # a child that was forked
            real(status)
        raise SystemExit(f"os._exit({status}) would end Python")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = real


@contextmanager
def logged_later() -> Iterator[None]:
    """For imports before the run has a log: `log_early` logs there what they say and warn of."""
    root = logging.getLogger()
    handler, level = logging.Handler(), root.level
    handler.emit = _early.append  # type: ignore[assignment]
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        with warnings.catch_warnings():
            for category in FOR_AUTHORS:
                warnings.filterwarnings("ignore", category=category)
            yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        root.removeHandler(handler)


def log_early() -> None:
    """Logs it."""
    for record in _early:
        logging.getLogger(record.name).handle(record)
    _early.clear()
