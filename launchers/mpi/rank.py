"""What mpirun starts: the parent of one rank, `python rank.py ERRORS COMMAND...`.

It hands signals on, says in one line of the log how the rank ended if it ended badly, and ends in a
way that ends the whole job on every MPI: hydra (MPICH, Intel MPI) lets the others run on after a
plain exit, and Intel's also after a kill, unless it is told by PMI's own `abort`. Standard library
only: it runs before anything is known to be importable.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, linux/prctl.h


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
        try:
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
        except OSError:  # mpirun is gone, and so will be the others
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
