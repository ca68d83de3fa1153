"""Ctrl-C and SIGTERM (kill, docker stop, the end of a batch job) while data are prepared.

Both raise KeyboardInterrupt, which code in C may swallow: its `hasattr` does. So they are
remembered as well, and raised again where the work looks for them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []


def _remember(number: int, frame: FrameType | None) -> None:
    _received.append(number)


def _raise(number: int, frame: FrameType | None) -> None:
    _remember(number, frame)
    raise KeyboardInterrupt


@contextmanager
def raised() -> Iterator[None]:
    """Both signals end the command. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    with _handled_by(_raise):
        yield


@contextmanager
def held_back() -> Iterator[Callable[[], None]]:
    """Yields a function that raises KeyboardInterrupt if a signal has arrived, also before.

    If KeyboardInterrupt were raised anywhere, it could become an error about a lock (CPython 3.11),
    or leak a semaphore while the pool is created. A second signal, which `uv run` and others send
    at once, has no effect.
    """

    def check() -> None:
        if _received:
            raise KeyboardInterrupt

    with _handled_by(_remember):
        yield check


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = [signal.signal(number, handler) for number in NUMBERS]
    try:
        yield
    finally:
        for number, kept in zip(NUMBERS, before, strict=True):
            signal.signal(number, kept)
