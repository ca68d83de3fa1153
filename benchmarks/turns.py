"""Trainings that take turns, a block of steps each.

Two equal runs, one after the other, differ by 5 to 10 % on a shared machine, which is slower for
seconds at a time. So all arms are started first, each rank in a process of its own. An arm waits in
a read of a pipe, which costs nothing, until its turn to train some steps. Neighbouring blocks are
compared, a second or two apart.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import pair
from benchmarks.table import turned

PIPES = "DISTDL_BENCH_TURNS"  # the file numbers that a rank reads from and writes to


def stop_before(step: int, first: int, steps: int) -> None:
    """Called by a rank before each step: signals the end of a block, and waits for the next turn.

    Args:
        step: From 0.
        first: Steps before the first block, the warm-up.
        steps: Steps of a block.
    """
    if step >= first and (step - first) % steps == 0:
        read, write = map(int, os.environ[PIPES].split(","))
        os.write(write, b".")
        os.read(read, 1)


@dataclass(frozen=True)
class Arm:
    """A training that takes turns with others.

    Args:
        main: A function of a module, called in each of `ranks` processes (1 or 2). It trains, and
            calls `stop_before`.
        arguments: Of `main`.
        every: 2: the arm takes part in every second round.
    """

    main: Callable[..., None]
    arguments: Sequence[str]
    ranks: int = 1
    every: int = 1

    @property
    def command(self) -> list[str]:
        module, name = self.main.__module__, self.main.__name__
        code = f"import sys; from {module} import {name}; {name}(*sys.argv[1:])"
        return [sys.executable, "-c", code, *self.arguments]


@dataclass
class _Started:
    """An arm's processes, waiting for their turn."""

    ranks: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    go: list[int] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)

    def await_stop(self) -> None:
        for signal, log in zip(self.signals, self.logs, strict=True):
            if os.read(signal, 1) != b".":
                raise RuntimeError(f"a rank ended too early: {log.read_text()[-3000:]}")

    def proceed(self) -> None:
        for go in self.go:
            os.write(go, b".")

    def block(self) -> float:
        """Seconds of a block, of its slowest rank."""
        started = time.perf_counter()
        self.proceed()
        self.await_stop()
        return time.perf_counter() - started

    def end(self) -> float:
        """Seconds from the last stop to the end of its last process."""
        started = time.perf_counter()
        self.proceed()
        for process, log in zip(self.ranks, self.logs, strict=True):
            if process.wait():
                raise RuntimeError(f"ended with {process.returncode}: {log.read_text()[-3000:]}")
        return time.perf_counter() - started


def _start(arm: Arm, folder: Path, stack: ExitStack) -> _Started:
    started = _Started()
    port = pair.free_ports(1)[0]
    for rank in range(arm.ranks):
        read, signal = os.pipe()
        waits, go = os.pipe()
        started.logs.append(folder / f"{len(list(folder.iterdir()))}.log")
        with open(started.logs[-1], "wb") as log:
            process = subprocess.Popen(
                arm.command,
                env={
                    **os.environ,
                    **(pair.variables(rank, port) if arm.ranks == pair.RANKS else {}),
                    "OMP_NUM_THREADS": "1",
                    PIPES: f"{waits},{signal}",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(signal, waits),
            )
        for number in (signal, waits):  # the child's ends, so that reading sees when it dies
            os.close(number)
        for number in (read, go):
            stack.callback(os.close, number)
        stack.callback(process.wait)
        stack.callback(process.kill)
        started.ranks.append(process)
        started.signals.append(read)
        started.go.append(go)
    return started


def take(
    arms: Mapping[str, Arm],
    rounds: int,
    folder: Path,
    settled: Callable[[], None] = lambda: None,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Starts the arms, one after the other, and lets them take turns.

    Args:
        arms: By name; each trains `steps_in_all` steps.
        rounds: In each round, every arm trains a block.
        folder: An empty folder for the output of the arms.
        settled: Called once, after the first block of each arm, which does not count.

    Returns:
        Seconds of each block; and seconds from the last block to the end of the process.

    Raises:
        RuntimeError: An arm ended too early; the message has the end of its output.
    """
    with ExitStack() as stack:
        started = {}
        for name, arm in arms.items():
            started[name] = _start(arm, folder, stack)
            started[name].await_stop()  # some arms measure at their start and need an idle machine
        for each in started.values():
            each.block()
        settled()
        blocks: dict[str, list[float]] = defaultdict(list)
        for number in range(rounds):
            for name in turned(list(arms), number):
                if number % arms[name].every == 0:
                    blocks[name].append(started[name].block())
        return blocks, {name: each.end() for name, each in started.items()}


def steps_in_all(first: int, steps: int, rounds: int, every: int = 1) -> int:
    """The steps that an arm trains, with a block that does not count, and one step at the end."""
    return first + steps * (1 + math.ceil(rounds / every)) + 1
