"""`task=benchmark` on simulated GPUs: it gets to its end; its numbers say nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.conftest import TINY, UNCHECKED, distdl
from tests.gpu_rehearsal.machine import Machine

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif("DISTDL_MATRIX" not in os.environ, reason="make matrix"),
]


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2)])
def test_measures_a_step(strategy: str, size: int, machine: Machine, tmp_path: Path) -> None:
    done = distdl(
        *(o for o in TINY if not o.startswith(("trainer.", "callbacks"))),
        *("task=benchmark", "task.warmup=1", "task.windows=1", "task.steps=2", "name=here"),
        "task.trace=0",  # torch's profiler ends with SIGSEGV here
        *("trainer.accelerator=gpu", f"trainer.devices={size}", f"strategy={strategy}"),
        cwd=tmp_path,
        env=machine.environment(size),
        module=UNCHECKED,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "outputs/default/here/benchmark.json").read_text())
    devices = [rank["device"] for rank in found["ranks"]]
    assert devices == [f"Simulated GPU {card}" for card in range(size)]
    for rank in found["ranks"]:
        assert [window["input"] for window in rank["windows"]] == ["real", "held"]
        assert rank["limits"]["matrix_flops"] and rank["limits"]["copy_bytes"]
