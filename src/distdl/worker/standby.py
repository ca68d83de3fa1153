"""`python -m distdl.worker.standby FD STATUS`: has imported torch and Lightning, and forks ranks.

A restarted attempt's ranks then start without the seconds of these imports, which are paid once, not
again for each rank and attempt. `distdl.worker.standby_ranks` starts this process and asks it over
the socket FD. Only the forks, which are the ranks, touch a device or start threads.
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

# The imports must not slow down the start of the first attempt: they begin when it trains, when a
# rank is asked for, or after this time in seconds.
POLL_S, PATIENCE_S = 0.5, 60
SIZE = 1 << 20  # bytes of the longest message: the variables of a rank
TRAINS = '"parameters"'  # rank 0 writes this into status.json when it begins to train


def main() -> None:
    die_with_parent()
    connection = socket.socket(fileno=int(sys.argv[1]))
    for _ in range(int(PATIENCE_S / POLL_S)):
        if select.select([connection], [], [], POLL_S)[0]:  # a request, or the agent has ended
            break
        if TRAINS in (Path(sys.argv[2]).read_text() if Path(sys.argv[2]).exists() else ""):
            break
    # This Lightning asks NVML for devices: asking CUDA would keep it from working in a fork.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    from distdl.worker.main import import_torch

    import_torch()
    if len(os.listdir("/proc/self/task")) > 1:  # a fork would lack the other threads
        return
    serve(connection)


def serve(connection: socket.socket) -> None:
    """Forks a rank for each request, and reports how ranks end, until the agent has ended."""
    ranks: dict[int, int] = {}  # pidfd -> process number
    while True:
        for ready in select.select([connection, *ranks], [], [])[0]:
            if ready is not connection:
                _, status = os.waitpid(pid := ranks.pop(ready), 0)
                os.close(ready)
                report(connection, pid=pid, code=os.waitstatus_to_exitcode(status))
                continue
            message, files, _, _ = socket.recv_fds(connection, SIZE, 2)
            if not message:
                return
            standby = os.getpid()
            if not (pid := os.fork()):
                for number in (connection.fileno(), *ranks):
                    os.close(number)
                become(json.loads(message), files, standby)
            for number in files:
                os.close(number)
            ranks[os.pidfd_open(pid)] = pid
            report(connection, pid=pid, started=True)


def report(connection: socket.socket, **fields: Any) -> None:
    connection.send(json.dumps(fields).encode())


def become(request: dict[str, Any], files: list[int], parent: int) -> NoReturn:
    """Runs the worker as `python -m distdl.worker` would."""
    from torch.cuda import _is_in_bad_fork

    try:
        os.setsid()
        for number, file in enumerate(files, 1):  # stdout and stderr
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(request["env"], **{PARENT: str(parent)})
        os.chdir(request["cwd"])
        sys.argv[1:] = request["arguments"]
        if _is_in_bad_fork():  # an import has asked the driver for GPUs: begin anew
            os.execv(sys.executable, [sys.executable, "-m", "distdl.worker", *sys.argv[1:]])
        runpy.run_module("distdl.worker", run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
    finally:  # never back into `serve`
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
