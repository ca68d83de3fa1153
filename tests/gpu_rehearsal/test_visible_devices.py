"""Which cards a run starts on: `trainer.devices` among those of $CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.conftest import TINY, UNCHECKED, distdl
from tests.gpu_rehearsal.machine import Machine

pytestmark = pytest.mark.timeout(600)

CARDS = 8
EVERY = {
    "two of four": ("4,5,6,7", "[1,2]", [5, 6]),
    "all that are visible": ("6,2", "2", [6, 2]),
    "by UUID": ("GPU-00000003,GPU-00000007,GPU-00000002", "[1,2]", [6, 1]),
    "none said": (None, "[3,5]", [3, 5]),
}
CASES = EVERY if "DISTDL_MATRIX" in os.environ else {"two of four": EVERY["two of four"]}


@pytest.mark.parametrize(("visible", "devices", "cards"), CASES.values(), ids=CASES.keys())
def test_starts_on_these(
    visible: str | None, devices: str, cards: list[int], machine: Machine, tmp_path: Path
) -> None:
    done = distdl(
        *(o for o in TINY if not o.startswith(("trainer.", "callbacks"))),
        *("trainer.accelerator=gpu", "trainer.max_steps=1", f"trainer.devices={devices}"),
        *("strategy=ddp", "name=here"),
        cwd=tmp_path,
        env=machine.environment(CARDS, **({"CUDA_VISIBLE_DEVICES": visible} if visible else {})),
        module=UNCHECKED,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    log = (tmp_path / "outputs/default/here/attempts/001/logs/rank_0.log").read_text()
    assert [int(card) for card in re.findall(r"cuda:\d+ Simulated GPU (\d+)", log)] == cards
