"""resnet50 at 224 px, bf16, channels_last, synthetic: the goals of benchmarks/gpu.py.

Needs an NVIDIA GPU; skipped elsewhere. `python -m benchmarks.run gpu` prints the same as a table.
What is asserted is less than the goals, which are for a machine that does nothing else: not slower
than a loop by hand, and DDP costs next to nothing.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def test_faster_than_a_hand_written_loop() -> None:
    from benchmarks import gpu

    result = gpu.main(repeats=3)
    print(result.markdown())
    ratios = {goal.what: goal.measured or 0.0 for goal in result.goals}
    assert ratios[gpu.AGAINST_LOOP] >= 0.99
    assert ratios[gpu.DDP_ALONE] >= 0.95
    assert 0 < ratios[gpu.OF_MEMORY] < 1, "faster than memory: the bytes of an image are wrong"
