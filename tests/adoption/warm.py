"""Commands in forks of a process that has imported everything (tests/warm.py), on several ranks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import DISTDL, ROOT, environment, free_port
from tests.warm import Popen

SECONDS = 240  # a process that takes longer hangs
CALL = "import sys; sys.path.append({!r}); from {} import {} as run; sys.exit(run(*{!r}))"


@dataclass(frozen=True)
class Ended:
    """How the ranks of a command ended; a code is negative after a signal."""

    codes: list[int]
    output: str

    @property
    def well(self) -> bool:
        return not any(self.codes)


def command(*arguments: str, cwd: Path, ranks: int = 1, **variables: str) -> Ended:
    """Runs `distdl ...` in a folder, on so many ranks, as torchrun starts them."""
    together: dict[str, str] = {}
    if ranks > 1:
        together = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        together |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        together |= {"TORCHELASTIC_RUN_ID": "adoption"}
    names = ("RANK", "LOCAL_RANK") if ranks > 1 else ()
    each = [{**variables, **together, **dict.fromkeys(names, str(n))} for n in range(ranks)]
    return _run([*DISTDL, *arguments], cwd, each)


def call(function: str, *arguments: Any, cwd: Path, **variables: str) -> Ended:
    """Calls `module:function` with these arguments, as a script in this folder would."""
    module, _, name = function.partition(":")
    return _run(["-c", CALL.format(str(ROOT), module, name, arguments)], cwd, [variables])


def _run(words: Sequence[str], cwd: Path, variables: Sequence[dict[str, str]]) -> Ended:
    """One process for each of these sets of variables, to the end of all."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        processes = [
            Popen(
                [sys.executable, *words],
                cwd=cwd,
                env=environment(**each),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for each in variables
        ]
        deadline = time.monotonic() + SECONDS
        for process in processes:
            try:
                process.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                process.kill()
        codes = [process.wait() for process in processes]
        output.seek(0)
        return Ended(codes, output.read())
