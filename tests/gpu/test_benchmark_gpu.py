"""`task=benchmark` on a GPU: its own clock, its trace, its limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import distdl

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


def test_the_devices_clock_and_the_wall_agree(tmp_path: Path) -> None:
    done = distdl(
        *("model=resnet50", "data=synthetic", "data.batch_size=64", "trainer.devices=1"),
        *("trainer.precision=bf16-mixed", "task=benchmark", "task.steps=20", "task.windows=3"),
        *("name=b", "tracking=none"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    found = json.loads((tmp_path / "outputs/default/b/benchmark.json").read_text())
    for side in (found["real"], found["held"]):
        # Events on the device, and the clock of the host around the whole window.
        wall = 64 / side["images_per_second"]
        assert side["step_seconds"]["mean"] == pytest.approx(wall, rel=0.05)
        assert sum(side["split"].values()) == pytest.approx(wall, rel=0.05)
    # 4.09 G multiply-adds forward (torchvision's page), three times that with the backward.
    assert found["model"]["flops_per_sample"] == pytest.approx(3 * 2 * 4.09e9, rel=0.05)
    assert 0.02 < found["model"]["mfu"] < 1
    assert found["limits"]["dtype"] == "bfloat16"
