"""A copy of a GPU's values for a checkpoint: of its moment, pinned, and without a wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from distdl.checkpoint import host_copy
from distdl.checkpoint.host_copy import HostCopy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

WEIGHTS = 50_000_000  # 200 MB


def test_it_is_of_its_moment_and_keeps_sharing(tmp_path: Path, monkeypatch) -> None:
    weights, made, new = torch.zeros(WEIGHTS, device="cuda"), {}, host_copy.host_memory

    def spy(size: int, *, pinned: bool) -> torch.UntypedStorage:
        made[size] = new(size, pinned=pinned)
        return made[size]

    monkeypatch.setattr(host_copy, "host_memory", spy)
    copy = HostCopy()
    for step in range(3):
        copy.take({"weights": weights, "half": weights[: WEIGHTS // 2], "on host": torch.ones(3)})
        weights.add_(1)  # the next step, queued at once
        copy.write(tmp_path / "copy")
        kept = torch.load(tmp_path / "copy", weights_only=True)
        assert kept["weights"].unique().tolist() == [step]
        assert kept["half"].data_ptr() == kept["weights"].data_ptr()
    assert len(made) == 2 and made[4 * WEIGHTS].is_pinned()


def test_the_training_thread_does_not_wait_for_the_copy() -> None:
    state, copy, seconds = {"weights": torch.zeros(WEIGHTS, device="cuda")}, HostCopy(), []
    for _ in range(6):  # the first one makes and pins the memory
        started = time.perf_counter()
        copy.take(state)
        seconds.append(time.perf_counter() - started)
        torch.cuda.synchronize()
    assert sorted(seconds)[2] < 0.004  # at 25 GB/s the copy itself takes 8 ms
