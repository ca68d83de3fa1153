"""nvJPEG on a real GPU, against the CPU's pixels."""

from __future__ import annotations

import random

import pytest
import torch

from distdl.data.decoding import works
from distdl.data.nvjpeg import EncodedBatch
from distdl.data.synthetic_jpeg import jpegs
from distdl.data.views import EvalView, TrainView

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not works("torchcodec"), reason="no torchcodec"),
]


@pytest.mark.parametrize("kind", [EvalView, TrainView])
def test_the_gpu_sees_what_the_cpu_sees(kind):
    files = jpegs(16, 4, 500, 375, 60_000, seed=0)
    random.seed(0)
    expected = torch.stack([kind(224)(file)["image"] for file in files])
    random.seed(0)
    batch = EncodedBatch([kind(224, decoder="nvjpeg")(file) for file in files])
    found = batch.decoded(torch.device("cuda"))
    assert found.device.type == "cuda" and found.dtype == torch.uint8
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert (found.cpu().float() - expected.float()).abs().mean() < 1.0


def test_a_batch_is_decoded_faster_than_a_core_does():
    files = jpegs(64, 4, 500, 375, 110_000, seed=0)
    batch = EncodedBatch([TrainView(224, decoder="nvjpeg")(file) for file in files * 4])
    batch.decoded(torch.device("cuda"))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    batch.decoded(torch.device("cuda"))
    end.record()
    torch.cuda.synchronize()
    speed = len(batch) / start.elapsed_time(end) * 1000
    print(f"nvjpeg: {speed:,.0f} img/s")
    assert speed > 1000
