"""Writes the parts of a data set in several processes, which Ctrl-C and SIGTERM end in order."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.sharedctypes import SynchronizedArray
from typing import Any

from distdl.tools.prepare import interrupts
from distdl.tools.prepare.shard_plan import Part
from distdl.tools.prepare.writers import Writer
from distdl.util.orphans import end_with_parent

# advance(images, bytes): both since the last call
Advance = Callable[[int, int], None]


def write_in_parallel(parts: list[Part], writer: Writer, workers: int, advance: Advance) -> None:
    """Writes parts in `workers` processes of their own.

    Raises:
        BrokenProcessPool: One of them was killed.
    """
    # Not forked: this process has threads (the bar's), whose locks a child would inherit.
    context = multiprocessing.get_context("spawn")
    seen = [0, 0]

    def report() -> None:
        now = counts[:]
        advance(now[0] - seen[0], now[1] - seen[1])
        seen[:] = now
        check()

    # Entered before the pool exists, since an interrupted pool would leak a semaphore.
    with interrupts.held_back() as check:
        counts = context.Array("q", 2)
        with ProcessPoolExecutor(workers, context, _enter_worker, (writer, counts)) as pool:
            try:
                _keep_busy(pool, parts, 2 * workers, report)
            except BaseException:  # Ctrl-C, too, leaves no process behind
                for process in multiprocessing.active_children():
                    process.terminate()
                # Wait, since a pool that is still alive at Python's exit may raise an error.
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    report()


def _keep_busy(
    pool: ProcessPoolExecutor, parts: list[Part], queued: int, report: Callable[[], None]
) -> None:
    """Submits parts until all are written, or until `report` raises (Ctrl-C or SIGTERM)."""
    waiting = iter(parts)
    running = set[Future[None]]()
    while True:
        # A few more than there are workers, but not all: a queued part carries all its samples.
        while len(running) < queued and (part := next(waiting, None)):
            with _uninterrupted():
                running.add(pool.submit(_write_in_worker, part))
        if not running:
            return
        done, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
        report()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Blocks Ctrl-C and SIGTERM during the block, also in the processes that are started in it.

    Those processes later unblock SIGTERM: on Ctrl-C, this process sends it to them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_WORKER: dict[str, Any] = {}


def _enter_worker(writer: Writer, counts: SynchronizedArray[int]) -> None:
    _WORKER.update(writer=writer, counts=counts)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    end_with_parent()


def _write_in_worker(part: Part) -> None:
    counts = _WORKER["counts"]

    def advance(length: int) -> None:
        with counts.get_lock():
            counts[0] += 1
            counts[1] += length

    _WORKER["writer"].write(part, advance)
