"""Two ranks on this machine, started once for many runs: imports take longer than small runs do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

RANKS = 2


def start(code: str, plan: dict[str, Any]) -> None:
    """Runs `code` on both ranks, with the variables of `launcher=local`, and waits for their end.

    Args:
        code: Python; `sys.argv[1]` is a file with the plan.
        plan: For the ranks, as JSON.

    Raises:
        RuntimeError: A rank failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        path = Path(name) / "plan.json"
        path.write_text(json.dumps(plan))
        logs = [
            stack.enter_context(open(Path(name) / f"{r}.log", "w+", encoding="utf-8"))
            for r in range(RANKS)
        ]
        ranks = []
        for rank, log in enumerate(logs):
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(path)],
                env={**os.environ, **variables(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        _await(ranks, logs)


def variables(rank: int, port: int = 0) -> dict[str, str]:
    """The variables that `launcher=local` sets for a rank."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": RANKS}
    values = {
        **ranks,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "DISTDL_LAUNCHER": "local",
        "OMP_NUM_THREADS": 1,
    }
    return {name: str(value) for name, value in values.items()}


def _await(ranks: Sequence[subprocess.Popen[bytes]], logs: Sequence[IO[str]]) -> None:
    """Waits until all ranks have ended, or one has failed: the other would wait for it forever."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            break
        time.sleep(0.1)
    for process, log in zip(ranks, logs, strict=True):
        if process.poll():
            log.seek(0)
            raise RuntimeError(f"a rank ended with {process.returncode}: {log.read()[-3000:]}")


def free_ports(count: int) -> list[int]:
    """One port for each process group, because a port stays in use for a while after its group."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def work(paths: Sequence[Path]) -> None:
    """Both ranks execute these runs, one after the other."""
    code = "import sys; from benchmarks import pair; pair.rank_main(sys.argv[1])"
    start(code, {"runs": list(map(str, paths)), "ports": free_ports(len(paths))})


def rank_main(plan: str) -> None:
    """One rank of `work`."""
    from benchmarks import runs
    from distdl.runs.directory import RunDirectory

    jobs = json.loads(Path(plan).read_text(encoding="utf-8"))
    for path, port in zip(jobs["runs"], jobs["ports"], strict=True):
        os.environ["MASTER_PORT"] = str(port)
        runs.work(RunDirectory(Path(path)))
