"""The parent process of one rank, started by mpirun: `python rank.py ERRORS COMMAND...`.

It forwards signals to the rank. If the rank fails, it logs one line on how the rank ended, and ends
the job. Hydra (the process manager of MPICH and Intel MPI) needs PMI's `abort` for this: it lets
the other ranks continue after a plain exit, and with Intel MPI also after a kill. If ssh started
this process, it also ends the rank when the supervisor's host stops answering, because hydra's
proxy would wait. It uses only the standard library, so that it can report a broken environment.
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
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG, linux/prctl.h
READ_SECONDS = 3.0  # for hydra to read the last lines of a rank
# The supervisor's host counts as lost after 20 + 3 x 5 s. The rank then has END_SECONDS to end.
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
END_SECONDS = 15.0


def main(errors: str, command: list[str]) -> int:
    """Runs the rank and returns its exit code, which is 128 + N if signal N ended it."""
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
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)  # mpirun itself never sees them
    # In its own session, so that the rank gets each signal once: mpirun signals the process group.
    child = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_me)
    for each in early:
        child.send_signal(each)
    lost = threading.Event()
    parent = os.getppid()
    threading.Thread(target=watch, args=(child, lost), daemon=True).start()
    code = child.wait()
    if code:
        print(report(errors, code), file=sys.stderr, flush=True)
        code = code if code > 0 else 128 - code
        abort(code)
    if lost.is_set() and os.getppid() == parent:
        # The daemon that started this process would report to the lost host until TCP gives up.
        os.kill(parent, signal.SIGKILL)
    return code


def watch(child: subprocess.Popen[bytes], lost: threading.Event) -> None:
    """Ends the rank when the host that ssh came from stops answering, and sets `lost`. Returns at
    once if ssh did not start this process, or if that host cannot be reached."""
    try:
        address = (os.environ["SSH_CONNECTION"].split()[0], int(os.environ["DISTDL_KEEPER_PORT"]))
        connection = socket.create_connection(address, timeout=END_SECONDS)
    except (OSError, LookupError, ValueError):
        return
    with connection:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        try:
            connection.recv(1)
            return  # the supervisor has ended, and mpirun with it
        except ConnectionError:
            return
        except OSError:  # a timeout, or no route: the host does not answer
            lost.set()
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


def report(errors: str, code: int) -> str:
    """One line on how the rank ended, which the supervisor parses."""
    names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
    rank = next((os.environ[name] for name in names if name in os.environ), "0")
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    try:
        error = json.loads(Path(errors, f"rank_{rank}.json").read_text(encoding="utf-8"))
        why = ": {}: {}".format(error["type"], str(error["message"]).partition("\n")[0])
    except (OSError, ValueError, KeyError):
        why = ""
    return f"distdl: rank {rank} on {socket.gethostname()} ended with {how}{why}"


def abort(code: int) -> None:
    """Asks hydra to end the job with this exit code, in the wire protocol of PMI 1.

    Source: https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html
    """
    if os.environ.get("PMI_FD", "").isdigit():
        await_read()
        with suppress(OSError):  # mpirun has ended, so the other ranks will end too
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())


def await_read() -> None:
    """Waits until hydra has read all output. An abort drops unread output, which may be the line
    that explains the failure."""
    deadline = time.monotonic() + READ_SECONDS
    while any(map(unread, (1, 2))) and time.monotonic() < deadline:
        time.sleep(0.01)


def unread(number: int) -> int:
    """The number of unread bytes in a pipe; 0 if the descriptor is not a pipe."""
    with suppress(OSError):
        if stat.S_ISFIFO(os.fstat(number).st_mode):
            return int.from_bytes(fcntl.ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
