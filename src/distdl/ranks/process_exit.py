"""How a process exits, so that its launcher and its platform react correctly. The exit code must
not contradict the outcome that the run records in status.json and errors/."""

from __future__ import annotations

import functools
import io
import logging
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING, NoReturn

from distdl.util.exit_codes import EXIT_PREEMPTED, EXIT_SUCCESS, GRACEFUL

if TYPE_CHECKING:
    from typing_extensions import Buffer

# mpirun and `srun --kill-on-bad-exit` kill the other ranks at the first non-zero exit code, even
# ranks that are still writing.
KILL_OTHER_RANKS = ("mpi", "slurm")
LINGER = "DISTDL_LINGER_SECONDS"

log = logging.getLogger(__name__)


class SurvivingPipe(io.FileIO):
    """A pipe whose reader may exit (`distdl ... | head -3`) without ending the training."""

    def write(self, data: Buffer) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # C code that writes to it directly must not fail
            os.close(null)
            if self.fileno() == 1:
                log.warning("the reader of this output has exited; the run continues, see its log")
            return memoryview(data).nbytes


def survive_closed_pipes() -> None:
    """Keeps this process alive if the reader of its stdout or stderr exits."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
        except (AttributeError, OSError):  # the stream is None, or not a file
            continue
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(raw, SurvivingPipe) or not stat.S_ISFIFO(os.fstat(number).st_mode):
            continue
        stream.flush()
        options = ("encoding", "errors", "line_buffering", "write_through")
        kept = {option: getattr(stream, option) for option in options}
        buffer = io.BufferedWriter(SurvivingPipe(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(buffer, **kept))


@functools.cache
def report_waiting_threads(seconds: float = 5) -> None:
    """Prints the non-daemon threads that Python still waits for some seconds after the run."""
    main_ended = threading.Event()

    def after_main() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C then ends it without a traceback
        main_ended.set()

    def report() -> None:
        main_ended.wait()
        time.sleep(seconds)
        alive = [t.name for t in threading.enumerate() if not t.daemon and t.is_alive()]
        names = ", ".join(name for name in alive if name != threading.main_thread().name)
        print(
            f"the run has ended, but the process waits for threads of your code: {names} "
            "(Ctrl-C ends it now; Python does not wait for Thread(daemon=True))",
            file=sys.stderr,
            flush=True,
        )

    # Unlike atexit, this runs before Python waits for the threads. Python 3.12 and later start no
    # thread from then on, so the one that reports is started now.
    threading.Thread(target=report, daemon=True).start()
    threading._register_atexit(after_main)  # type: ignore[attr-defined]


def of_rank(code: int, launcher: str) -> int:
    """The exit code that a rank gives to what has started it; `status.json` has the run's own."""
    return EXIT_SUCCESS if code in GRACEFUL and launcher in KILL_OTHER_RANKS else code


def exit_process(code: int, launcher: str) -> NoReturn:
    """Ends this process. `launcher` is the value of DISTDL_LAUNCHER, `code` a shell's exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code == EXIT_PREEMPTED:
        # Azure ML restarts a job whose node is taken away, but not a job that exits by itself.
        time.sleep(float(os.environ.get(LINGER, 0)))
    # Python would end them, but its exit may take long: it waits for threads and other processes.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
    # Library threads must not delay the exit of a rank: the other ranks wait for it.
    os._exit(of_rank(code, launcher))
