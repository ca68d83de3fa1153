"""How a rank leaves when its start fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from omegaconf import OmegaConf

from distdl.distributed import rank_table
from distdl.job import JobState, Resources
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.worker import allocator, main
from distdl.worker.rank_context import RankContext


def rank(local, of=4):
    return Environment("slurm", local, of, local, of)


FAILING = [(RuntimeError(), 2, 0), (RuntimeError(), 1, 1), (Stopped(JobState.PREEMPTED, ""), 2, 1)]


@pytest.mark.parametrize(("error", "world", "left"), FAILING)
def test_who_fails_does_not_wait_for_the_others(monkeypatch, error, world, left):
    """With NCCL it would: for collectives that they have not joined. Those who stop agree on it."""

    def fail(*_):
        raise error

    calls = []
    kept = []
    config = OmegaConf.create({"task": {"_target_": "distdl.tasks.train"}})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append(1))
    monkeypatch.setattr(rank_table, "announce", fail)
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: kept.append(1))
    bundle = SimpleNamespace(python_path=lambda _: [])
    record = {"record_error": lambda *_, **__: None}
    attempt = SimpleNamespace(number=1, path=Path("r/attempts/1"), **record)
    size = Resources(accelerator="cpu")
    with pytest.raises(type(error)):
        main.perform(config, bundle, RankContext(attempt, {}, size, rank(0, world), StopRequest()))
    assert len(calls) == left
    assert kept == [1]
