"""What mpirun starts: the parent of one rank, `python rank.py ERRORS COMMAND...`.

It hands signals on, says in one line of the log how the rank ended if it ended badly, and ends in a
way that ends the whole job on every MPI: hydra (MPICH, Intel MPI) lets the others run on after a
plain exit, and Intel's also after a kill, unless it is told by PMI's own `abort`. Standard library
only: it runs before anything is known to be importable.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, linux/prctl.h
READ_SECONDS = 3.0  # that hydra is given to read what a rank said last


def main(errors: str, command: list[str]) -> int:
    """Runs the rank and returns its exit code, 128 + N if signal N ended it."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_me() -> None:
        if libc is not None:
            libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)

    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    for number in FORWARDED:
        signal.signal(number, forward)
    # A session of its own: mpirun signals the group, and the rank is to get each signal once.
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_me)
    for each in early:
        child.send_signal(each)
    code = child.wait()
    if code:
        print(obituary(errors, code), file=sys.stderr, flush=True)
        code = code if code > 0 else 128 - code
        abort(code)
    return code


def obituary(errors: str, code: int) -> str:
    """How the rank ended, in one line; the keeper reads it."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    try:
        said = json.loads(Path(errors, f"rank_{rank}.json").read_text())
        why = ": {}: {}".format(said["type"], str(said["message"]).partition("\n")[0])
    except (OSError, ValueError, KeyError):
        why = ""
    return f"distdl: rank {rank} on {socket.gethostname()} ended with {how}{why}"


def abort(code: int) -> None:
    """Tells hydra to end the job with this exit code; the wire protocol of PMI 1.

    Source: https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html
    """
    if os.environ.get("PMI_FD", "").isdigit():
        await_read()
        try:
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
        except OSError:  # mpirun is gone, and so will be the others
            return


def await_read() -> None:
    """Waits until what was printed has been read: hydra drops what is in its pipes at an abort, and
    with it the line that says why."""
    deadline = time.monotonic() + READ_SECONDS
    while any(map(unread, (1, 2))) and time.monotonic() < deadline:
        time.sleep(0.01)


def unread(number: int) -> int:
    """Bytes in a pipe that nobody has read yet; 0 for anything else."""
    try:
        if not stat.S_ISFIFO(os.fstat(number).st_mode):
            return 0
        return int.from_bytes(fcntl.ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
