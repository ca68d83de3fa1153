"""resnet50 at 224 px, bf16, channels_last, synthetic: not slower than a loop written by hand.

Needs an NVIDIA GPU; skipped elsewhere. Interleaved A, B, A, B; the ratio of the medians is printed
and must be at least 0.99, or lie inside the spread of the loop against itself.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

REPEATS = 5


def test_as_fast_as_a_hand_written_loop(tmp_path: Path) -> None:
    from benchmarks import gpu

    ours, theirs = [], []
    for _ in range(REPEATS):
        theirs.append(gpu.by_hand(batch_size=256, steps=60))
        ours.append(gpu.by_distdl(tmp_path, batch_size=256, steps=60))
    ratio = statistics.median(ours) / statistics.median(theirs)
    spread = (max(theirs) - min(theirs)) / statistics.median(theirs)
    print(f"distdl {ours} img/s, by hand {theirs} img/s, ratio {ratio:.3f}, spread {spread:.3f}")
    assert ratio >= min(0.99, 1 - spread)
