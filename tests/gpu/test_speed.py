"""The speed of resnet50 at 224 px in bf16, and how `task=benchmark` measures it.

Needs an NVIDIA GPU; skipped elsewhere. `python -m benchmarks.run gpu` prints the goals as a table.
What is asserted is less than the goals, which are for a machine that does nothing else: not slower
than a loop by hand, and DDP costs next to nothing.
"""

import json

import pytest
import torch

from tests.conftest import distdl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_faster_than_a_hand_written_loop():
    from benchmarks import gpu

    result = gpu.main(repeats=3)
    print(result.markdown())
    ratios = {goal.what: goal.measured or 0.0 for goal in result.goals}
    assert ratios[gpu.AGAINST_LOOP] >= 0.99 and ratios[gpu.DDP_ALONE] >= 0.95
    assert 0 < ratios[gpu.OF_MEMORY] < 1, "faster than memory: the bytes of an image are wrong"


def test_the_devices_clock_and_the_wall_agree(tmp_path):
    done = distdl(
        *("model=resnet50", "data=synthetic", "data.batch_size=64", "trainer.devices=1"),
        *("trainer.precision=bf16-mixed", "task=benchmark", "task.steps=20", "task.windows=3"),
        *("name=b", "tracking=none"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    result = json.loads((tmp_path / "outputs/default/b/benchmark.json").read_text())
    for side in (result["real"], result["held"]):
        # Events on the device, and the clock of the host around the whole window.
        wall = pytest.approx(64 / side["images_per_second"], rel=0.05)
        assert side["step_seconds"]["mean"] == wall and sum(side["split"].values()) == wall
    # 4.09 G multiply-adds forward (torchvision's page), three times that with the backward.
    assert result["model"]["flops_per_sample"] == pytest.approx(3 * 2 * 4.09e9, rel=0.05)
    assert 0.02 < result["model"]["mfu"] < 1 and result["limits"]["dtype"] == "bfloat16"
