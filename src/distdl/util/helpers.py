"""Processes that help a rank outlive the signals that end a job; only the ranks act on these.

Slurm, systemd and a terminal's Ctrl-C signal every process of a job, also the workers of loaders,
pools and managers, without which a rank cannot finish its step and save. Such a process ends when
its rank says so, or when the rank is gone.

- It is born with these signals held back (`held`): a signal during its start is not lost on it.
- It handles them by a function that does nothing (`outlive`). This holds for all its threads,
  unlike a mask, and not in the programs that it starts, unlike an ignored signal.

A forked process also gives a sign of life, or it is forked again (`fork_until_begun`): up to Python
3.11 a fork hangs if another thread, such as one of gloo's, was just making itself known to Python
(PyOS_AfterFork_Child takes the lock of all threads' states before it renews it).
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, popen_fork, util
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, Protocol

log = logging.getLogger(__name__)

BIRTH_S = 10.0  # in which a forked process gives a sign of life; it has run no code of anybody's
MOST_FORKS = 5  # of one process
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# How a rank says so to a process that may have a handler of its own for SIGTERM.
END = getattr(signal, "SIGRTMIN", signal.SIGKILL)


class Sends(Protocol):
    """What is used here of multiprocessing's Popen."""

    pid: int
    returncode: int | None

    def _send_signal(self, sig: int) -> None: ...


_parent = 0  # of this process, if it is such a helper


@contextmanager
def held() -> Iterator[None]:
    """Holds the signals back in this thread, and in the processes that it starts meanwhile, which
    must let them come again. This process gets its own afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_come() -> None:
    """Lets the signals come that were held back when this process was started."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def outlive() -> None:
    """Makes this process outlive the signals as long as its parent lives."""
    global _parent
    _parent = os.getppid()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # SIGHUP under nohup
            signal.signal(number, _stay)
    if END is not signal.SIGKILL:
        signal.signal(END, _end)
    let_come()


def _stay(number: int, frame: FrameType | None) -> None:
    if os.getppid() != _parent:  # nobody is left who would end this process
        _default(number)


def _end(number: int, frame: FrameType | None) -> None:
    """Does what SIGTERM would do in a process that is no helper."""
    if signal.getsignal(signal.SIGTERM) is _stay:
        _default(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


def _default(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _end_by_main_thread(popen: Sends) -> None:
    """Sends END to the main thread of a process, as only this one runs Python's handlers: a signal
    for the whole process may be taken by another thread, that was just woken by a signal before,
    and a main thread that waits in a system call does not hear of it."""
    to_thread = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc from 2.30 on; musl has none
    if to_thread is None:
        popen._send_signal(END)
    elif popen.returncode is None:
        to_thread(popen.pid, popen.pid, END)


class _Inherited:
    """Calls `outlived_by_helpers` in the spawned process that unpickles it."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return outlived_by_helpers, ()


_inherited = _Inherited()


def outlived_by_helpers() -> None:
    """From now on the processes that multiprocessing starts for this one outlive the signals, for
    every start method: loader workers, pools, managers, a user's own.

    `terminate()` still ends them: a daemonic process (a loader's or pool's worker) at once, by
    SIGKILL, as it may hang in C code; in another one SIGTERM's own handler is called, if it has
    one.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if Started.outlives:
        return
    Started.outlives = True
    settings["distdl-helpers"] = _inherited  # every process hands its settings on
    util.register_after_fork(_inherited, _began)
    start = popen_fork.Popen.__init__
    spawn = util.spawnv_passfds

    def held_start(popen: popen_fork.Popen, process: BaseProcess) -> None:
        vars(popen)["ended_by"] = signal.SIGKILL if process.daemon else END
        with held():
            if popen.method == "fork":
                fork_until_begun(popen, lambda: start(popen, process))
            else:
                start(popen, process)

    def held_spawn(path: bytes, arguments: Sequence[Any], files: Sequence[int]) -> int:
        with held():  # also multiprocessing's resource tracker and its server of forks
            return spawn(path, arguments, files)

    def terminate(popen: Sends) -> None:
        number = getattr(popen, "ended_by", signal.SIGTERM)
        if number is END and END is not signal.SIGKILL:
            _end_by_main_thread(popen)
        else:
            popen._send_signal(number)

    replaced: list[tuple[object, str, Any]] = [
        (popen_fork.Popen, "__init__", held_start),  # the other start methods' are subclasses
        (popen_fork.Popen, "terminate", terminate),
        (SpawnProcess, "_after_fork", staticmethod(_began)),  # which does nothing
        (util, "spawnv_passfds", held_spawn),
    ]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    # At its end multiprocessing ends daemons, which torch would report as lost loader workers.
    atexit.register(signal.signal, signal.SIGCHLD, signal.SIG_DFL)


class Started:
    outlives = False  # whether `outlived_by_helpers` was called in this process
    lock = threading.Lock()  # one process begins at a time
    pipe: tuple[int, int] | None = None  # by which it gives its sign of life


def fork_until_begun(popen: popen_fork.Popen, fork: Callable[[], None]) -> None:
    """Forks a process, and again if it does not begin.

    Args:
        fork: Makes `popen` a new process.

    Raises:
        RuntimeError: No process has begun.
    """
    with Started.lock:
        for _ in range(MOST_FORKS):
            reads, writes = os.pipe()
            Started.pipe = reads, writes
            try:
                try:
                    fork()
                finally:
                    os.close(writes)  # if the child ends without a sign, its end is one
                began = connection.wait([reads], BIRTH_S)  # also above file 1023, unlike select
            finally:
                Started.pipe = None
                os.close(reads)
            if began:
                return
            log.warning("process %d did not begin after its fork: it is forked again", popen.pid)
            os.kill(popen.pid, signal.SIGKILL)
            os.waitpid(popen.pid, 0)
    raise RuntimeError(f"{MOST_FORKS} forks of this process did not begin")


def _gives_sign() -> None:
    if Started.pipe is None:
        return
    Started.lock = threading.Lock()  # the parent's is held
    reads, writes = Started.pipe
    Started.pipe = None
    os.write(writes, b".")
    os.close(reads)
    os.close(writes)


def _began(_: object = None) -> None:
    """Runs in a process that multiprocessing has started, before anything else."""
    _gives_sign()
    outlive()
    # A loader's worker installs torch's handlers next, of which that of SIGTERM would end it.
    if torchs := sys.modules.get("torch.utils.data._utils.signal_handling"):
        install: Callable[[], None] = torchs._set_worker_signal_handlers

        def install_and_outlive() -> None:
            with held():
                install()
                outlive()

        vars(torchs)["_set_worker_signal_handlers"] = install_and_outlive
