"""The process of a program: its start, the signals that it gets, and the end of all it started."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from distdl.incident.words import STOPPED
from distdl.program import guard
from distdl.ranks.stopping import StopRequest
from distdl.util import helpers
from distdl.util.errors import NotRun
from distdl.util.exit_codes import EXIT_NOT_EXECUTABLE, EXIT_NOT_STARTED
from distdl.util.processes import SET_CHILD_SUBREAPER, SET_PARENT_DEATH_SIGNAL, prctl, start_time

TICK_S = 0.1
LEFT_S = 2.0  # for what a program leaves behind, before it is killed
# They wait for a command, and hand on no signal to it.
SHELLS = ("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh", "fish", "busybox")


class NotStarted(NotRun):
    """The system does not start the program. `code` is the one that a shell would end with."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(what)
        self.code = code


def command_of(words: Sequence[str]) -> list[str]:
    """The words to execute: a leading `-m module` or `script.py` is run by this Python."""
    ours = words[0] == "-m" or words[0].endswith(".py")
    return [sys.executable, *words] if ours else [*words]


class End(NamedTuple):
    """How a program ended.

    Args:
        code: Its exit code, -N after signal N.
        why: Why it was ended here; "" if it was not.
        asked: Whether it was asked to end, before it did.
    """

    code: int
    why: str
    asked: bool


class Process:
    """A program in a session of its own, so that it gets each signal once, and from here."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], folder: Path, output: int
    ) -> None:
        """Starts it.

        Raises:
            NotStarted: It does not exist, may not be executed, or is no program.
        """
        # What the program leaves behind becomes a child of this process, which then ends it.
        prctl(SET_CHILD_SUBREAPER, 1)
        name = f"{os.getpid()}:{start_time(os.getpid())}"
        self._guard = _start_guard(name)
        command = command_of(words)
        _allow(command[0], folder)
        try:
            self._popen = subprocess.Popen(
                command,
                env={**env, guard.VARIABLE: name},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                close_fds=False,  # hydra's ranks speak to it by an open file (PMI_FD)
                preexec_fn=_prepare,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._release_guard()
            raise _refusal(error, command[0], folder) from None
        self.pid = self._popen.pid

    def ended(self) -> int | None:
        """The exit code, -N after signal N; None while it runs. Also reaps what it left."""
        code = self._popen.poll()
        self._reap()
        return code

    def stopped(self) -> bool:
        """Whether a signal has stopped it (not ended it); where it is a shell, also what it
        runs."""
        with suppress(psutil.Error):
            return any(each.status() in STOPPED for each in _addressees(psutil.Process(self.pid)))
        return False

    def ask(self, number: signal.Signals) -> None:
        """Sends it a signal; where it is a shell, which hands none on, also to what that runs. What
        is stopped is continued: else it would never get it."""
        with suppress(psutil.Error):
            for each in [*_addressees(psutil.Process(self.pid))]:
                with suppress(psutil.Error):
                    each.send_signal(number)
                    if each.status() == psutil.STATUS_STOPPED:
                        each.send_signal(signal.SIGCONT)

    def lives(self) -> bool:
        """Whether it, or anything that it has started, still runs."""
        return any(self._all())

    def kill(self) -> None:
        """Ends it and all that it has started, at once."""
        for each in self._all():
            with suppress(psutil.Error):
                each.kill()

    def wait(
        self,
        stop: StopRequest,
        grace: float,
        at_tick: Callable[[], str] = lambda: "",
    ) -> End:
        """Waits for the end of the program, and ends what it leaves behind.

        Args:
            stop: If this rank is asked to end, so is the program.
            grace: Seconds from then on until it is killed.
            at_tick: Called about ten times a second; a text ends the program for that reason.
        """
        asked: float | None = None
        why = ""
        while (code := self.ended()) is None or (asked is not None and self.lives()):
            now = time.monotonic()
            if asked is None and not stop:
                why = at_tick()
            if asked is None and (stop or why):
                asked = now
                interrupted = stop.signal == signal.SIGINT.name
                self.ask(signal.SIGINT if interrupted else signal.SIGTERM)
            elif asked is not None and now > asked + grace:
                self.kill()
                asked = now
            time.sleep(TICK_S)
        self._end_rest()
        return End(code, why, asked is not None)

    def _end_rest(self) -> None:
        """Ends what the program has left behind."""
        deadline = time.monotonic() + LEFT_S
        for each in self._all():
            with suppress(psutil.Error):
                each.terminate()
        while self.lives() and time.monotonic() < deadline:
            self._reap()
            time.sleep(TICK_S / 5)
        self.kill()
        self._reap()
        self._release_guard()

    def _all(self) -> Iterator[psutil.Process]:
        """All processes of the program. This process's own, such as a helper, are in its session,
        or were there before."""
        own = os.getsid(0)
        for each in psutil.Process().children(recursive=True):
            with suppress(psutil.Error, ProcessLookupError):
                ours = each.pid == self._guard.pid or os.getsid(each.pid) == own
                if not ours and each.status() != psutil.STATUS_ZOMBIE:
                    yield each

    def _reap(self) -> None:
        """Collects what the program has left and what has ended, as PID 1 must. What is in the
        session of this process is awaited by who has started it."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None or found.si_pid in (self.pid, self._guard.pid):
                return
            with suppress(ChildProcessError, ProcessLookupError):
                if os.getsid(found.si_pid) == os.getsid(0):
                    return
                os.waitpid(found.si_pid, os.WNOHANG)

    def _release_guard(self) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError):
            self._guard.stdin.write(guard.DONE)
            self._guard.stdin.close()
        self._guard.wait()


def _start_guard(name: str) -> subprocess.Popen[bytes]:
    with helpers.held():  # it outlives the signals that end a job
        return subprocess.Popen(
            [sys.executable, "-S", "-E", guard.__file__, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )


def _prepare() -> None:
    """Runs in the new process, before it becomes the program. The program does not outlive its
    rank; and SIGUSR1, by which Slurm and mpirun ask ranks to end, does not end what has no handler
    for it: the rank sends SIGTERM instead."""
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _addressees(process: psutil.Process) -> Iterator[psutil.Process]:
    yield process
    if process.name() in SHELLS:
        for each in process.children():
            yield from _addressees(each)


def _allow(name: str, folder: Path) -> None:
    """Makes a file of the project executable again: a copy by Blob or S3 is not."""
    path = folder / name
    if "/" in name and path.is_file() and not os.access(path, os.X_OK):
        with suppress(OSError):
            path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _refusal(error: Exception, name: str, folder: Path) -> NotStarted:
    number = getattr(error, "errno", None)
    if not folder.is_dir():
        return NotStarted(f"there is no folder {folder} to start it in", EXIT_NOT_STARTED)
    if number == errno.ENOENT:
        there = (folder / name).is_file() if "/" in name else shutil.which(name)
        what = "what its first line names (#!) does not exist" if there else "it does not exist"
        return NotStarted(f"{name} cannot be started: {what}", EXIT_NOT_STARTED)
    reasons = {
        errno.EACCES: "it is not executable",
        errno.ENOEXEC: "it is no program for this machine, and has no #! line",
    }
    why = reasons.get(number or 0) or getattr(error, "strerror", None) or str(error)
    return NotStarted(f"{name} cannot be started: {why}", EXIT_NOT_EXECUTABLE)
