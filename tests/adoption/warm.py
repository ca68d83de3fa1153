"""One process that has imported everything, and forks for each command: a start takes no time.

    python -m tests.adoption.warm

reads a JSON line for each request and answers with one: the exit codes, and what was printed.
A fork runs the command line itself, with what validates in a fork of its own. Several ranks are as
torchrun would have started them, and the command line finds that out.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, environment

SECONDS = 240  # a fork that takes longer hangs


@dataclass(frozen=True)
class Ended:
    """How the ranks of a command ended; a code is negative after a signal."""

    codes: list[int]
    output: str

    @property
    def well(self) -> bool:
        return not any(self.codes)


class Warm:
    """The process, from outside."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def command(self, *arguments: str, cwd: Path, ranks: int = 1, **variables: str) -> Ended:
        """Runs `distdl ...` in a folder, on so many ranks."""
        return self._ask(
            do="command", arguments=arguments, cwd=str(cwd), ranks=ranks, variables=variables
        )

    def call(self, function: str, *arguments: Any, cwd: Path, **variables: str) -> Ended:
        """Calls `module:function` with these arguments."""
        return self._ask(
            do=function, arguments=arguments, cwd=str(cwd), ranks=1, variables=variables
        )

    def _ask(self, **request: Any) -> Ended:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the warm process ended:\n{Path(self._log.name).read_text()[-4000:]}"
        return Ended(**json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(20)
        self._log.close()


def main() -> None:
    import importlib

    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warm_up()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "command":
            run: Callable[..., int] = command_line
        else:
            module, _, name = request["do"].partition(":")
            run = getattr(importlib.import_module(module), name)
        ended = run_all(run, request)
        answer.write(json.dumps(vars(ended)) + "\n")
        answer.flush()


def warm_up() -> None:
    import torch

    from distdl import __main__, compose, external, launch, planning, validate, worker  # noqa: F401
    from distdl.commands import resume  # noqa: F401

    torch.set_num_threads(1)
    from distdl import autotune, binding, build, compiling, fetching, tasks, tracking  # noqa: F401
    from distdl.launchers import local  # noqa: F401
    from distdl.strategies import ddp  # noqa: F401

    validate._ask_child = ask_fork


def command_line(*arguments: str) -> int:
    from distdl import __main__

    sys.argv = [__main__.__file__, *arguments]
    return __main__.main(arguments)


def ask_fork(request: str) -> dict[str, Any]:
    """What validates in a process of its own does so in a fork."""
    from distdl import binding

    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as answer:
        asked.write(request.encode())
        asked.seek(0)
        pid = os.fork()
        if not pid:
            os.dup2(asked.fileno(), 0)
            os.dup2(answer.fileno(), 1)
            sys.stdin, sys.argv = os.fdopen(0), ["binding"]
            try:
                binding.main()
            finally:
                traceback.print_exc()
                os._exit(1)
        os.waitpid(pid, 0)
        answer.seek(0)
        return json.loads(answer.read())


def run_all(run: Callable[..., int], request: dict[str, Any]) -> Ended:
    """Forks the ranks and waits for them."""
    ranks, codes = request["ranks"], {}
    variables = dict(request["variables"])
    if ranks > 1:
        port = str(free_ports())
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        variables |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "adoption"}
    with tempfile.TemporaryFile() as output:
        pids = {}
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            pids[fork(run, request, {**variables, **own}, output.fileno())] = rank
        deadline = time.monotonic() + SECONDS
        while len(codes) < ranks:
            for pid, rank in pids.items():
                if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
                elif rank not in codes and time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
            select.select([], [], [], 0.01)
        output.seek(0)
        said = output.read().decode(errors="replace")
    return Ended([codes[rank] for rank in range(ranks)], said)


def fork(
    run: Callable[..., int], request: dict[str, Any], variables: dict[str, str], output: int
) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(variables)
        os.chdir(request["cwd"])
        code = run(*request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_ports() -> int:
    """A port that is free, and so is the next one."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
                return port
            except (OSError, OverflowError):
                continue


if __name__ == "__main__":
    main()
