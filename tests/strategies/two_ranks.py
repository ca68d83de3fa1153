"""Runs all cases of a file on two real gloo ranks, in one process group.

    python -m tests.strategies.two_ranks MODULE RANK PORT FOLDER

calls MODULE.cases(folder), a generator of (name, what it found), on each rank.
"""

from __future__ import annotations

import functools
import importlib
import json
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.conftest import ROOT, environment
from tests.warm import Popen


@functools.cache
def results(module: str, timeout: float = 240) -> dict[str, list[Any]]:
    """case -> what rank 0 and rank 1 found; run once in a test process."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ranks = [
            Popen(
                [sys.executable, "-m", __name__, module, str(rank), str(port), folder],
                cwd=ROOT,
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=timeout)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        assert all(rank.returncode == 0 for rank in ranks), "\n\n".join(said)
        found = [json.loads((Path(folder) / f"found-{rank}.json").read_text()) for rank in (0, 1)]
    return {name: [each[name] for each in found] for name in found[0]}


def main(module: str, rank: int, port: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found = dict(importlib.import_module(module).cases(folder))
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    except BaseException:  # the other rank would wait for this one
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        import os

        os._exit(1)
