"""Threads that decode and score. This file goes into every model folder."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads(Executor):
    """A pool like `concurrent.futures.ThreadPoolExecutor`.

    But its threads do not keep a process alive that was told to end, although they cannot be
    interrupted, and it knows whether they get on.

    Args:
        count: How many threads.
        name: Of the threads.
        begin: Called in each thread first.
    """

    def __init__(self, count: int, name: str, begin: Callable[[], None]) -> None:
        self.count = count
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]]
        self._tasks = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._working = 0
        self._moved = time.monotonic()  # when a task was begun or ended last
        for number in range(count):
            thread = threading.Thread(target=self._run, name=f"{name}_{number}", args=(begin,))
            thread.daemon = True
            thread.start()

    def submit(self, function: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> Future[T]:
        """Runs `function(*args, **more)` in a thread, in the order of the calls."""
        future: Future[T] = Future()
        self._tasks.put((future, partial(function, *args, **more)))
        return future

    def stuck(self, seconds: float) -> bool:
        """Whether every thread has been busy with the same task for longer than that."""
        with self._lock:
            busy = self._working == self.count
            return busy and time.monotonic() - self._moved > seconds

    def idle(self) -> bool:
        """Whether no thread has work."""
        with self._lock:
            return not self._working

    def _run(self, begin: Callable[[], None]) -> None:
        begin()
        while True:
            future, task = self._tasks.get()
            if not future.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            self._count(1)
            try:
                result = task()
            except BaseException as error:  # whatever the task raises is its caller's
                self._count(-1)
                future.set_exception(error)
            else:
                self._count(-1)
                future.set_result(result)
            del future, task  # not only with the next one

    def _count(self, change: int) -> None:
        with self._lock:
            self._working += change
            self._moved = time.monotonic()
