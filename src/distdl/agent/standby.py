"""`python -m distdl.agent.standby FD STATUS`: has imported torch and Lightning, and forks ranks.

A restarted attempt's ranks then start without the seconds of these imports, which are paid once,
not for each rank and attempt. `distdl.agent.standby_ranks` starts this process and asks it over
the socket FD. Only the forks, which are the ranks, touch a device or start threads. The agent
starts it with the signals that end a job held back; a rank lets them come once it handles them.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from distdl.util.orphans import PARENT, die_with_parent

# The imports must not slow down the start of the first attempt: they begin when rank 0 has written
# this into status.json (it trains then), or when a rank is asked for.
TRAINS = '"parameters"'
POLL_S = 0.5
SIZE = 1 << 20  # bytes of the longest message, with the variables of a rank


def main() -> None:
    die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    status = Path(sys.argv[2])
    while not select.select([connection], [], [], POLL_S)[0]:
        if status.exists() and TRAINS in status.read_text(encoding="utf-8"):
            break
    # Lightning then asks NVML for devices: in a fork of a process that asked CUDA, CUDA fails.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from distdl.worker.main import import_torch

    import_torch()
    if len(os.listdir("/proc/self/task")) == 1:  # a fork would lack the other threads
        serve(connection)


def serve(connection: socket.socket) -> None:
    """Forks a rank for each request, until the agent has ended. Reports the process number of each
    rank that has started, and again with the exit code of one that has ended."""
    ranks: dict[int, int] = {}  # pidfd -> process number
    while True:
        for ready in select.select([connection.fileno(), *ranks], [], [])[0]:
            if ready in ranks:
                pid = ranks.pop(ready)
                _, status = os.waitpid(pid, 0)
                os.close(ready)
                connection.send(json.dumps((pid, os.waitstatus_to_exitcode(status))).encode())
                continue
            message, files, _, _ = socket.recv_fds(connection, SIZE, 2)
            if not message:
                return
            standby = os.getpid()
            if not (pid := os.fork()):
                for number in (ready, *ranks):
                    os.close(number)
                become(json.loads(message), files, standby)
            for number in files:
                os.close(number)
            ranks[os.pidfd_open(pid)] = pid
            connection.send(json.dumps((pid, None)).encode())


def become(request: dict[str, Any], files: list[int], parent: int) -> NoReturn:
    """Runs the worker as `python -m distdl.worker` would."""
    from torch.cuda import _is_in_bad_fork

    try:
        os.setsid()
        for number, file in enumerate(files, 1):  # stdout and stderr
            os.dup2(file, number)
        os.environ.clear()
        os.environ.update(request["env"], **{PARENT: str(parent)})
        sys.argv[1:] = request["arguments"]
        if _is_in_bad_fork():  # an import has asked CUDA for devices: begin anew
            os.execv(sys.executable, [sys.executable, "-m", "distdl.worker", *sys.argv[1:]])
        runpy.run_module("distdl.worker", run_name="__main__", alter_sys=True)
    except BaseException:  # what the worker did not catch, SystemExit included
        traceback.print_exc()
    finally:  # never back into `serve`
        os._exit(1)


if __name__ == "__main__":
    main()
