"""The journal and the sampler. A disk that is full for it is in test_mlflow.py."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distdl.runs.records import journal_path, read
from distdl.tracking.journal import Journal
from distdl.tracking.system import SystemMetrics
from tests.tracking.conftest import Tracked, until


@pytest.fixture
def path(tmp_path) -> Path:
    return journal_path(tmp_path)


def test_every_value_is_kept_with_its_step_and_attempt(tmp_path, path) -> None:
    journal = Journal(path, tmp_path, attempt=3)
    before, tensor = time.time(), torch.tensor(0.1)
    journal.log_metrics({"train/loss": tensor, "größe": 2}, 7)
    tensor += 1  # it is read when it is logged
    journal.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf}, 8)
    until(lambda: path.is_file() and len([*read(path)]) == 2, 5)  # within a second
    journal.log_metrics({"text": "no number"}, 9)
    journal.log_metrics({("odd", "key"): 1.0}, np.int64(10))  # a user's module may do so
    journal.close()
    first, second, odd = read(path)
    assert (odd.step, odd.metrics) == (10, {"('odd', 'key')": 1.0})
    assert (first.step, first.attempt) == (7, 3) and before - 0.001 <= first.time <= time.time()
    assert first.metrics == {"train/loss": pytest.approx(0.1), "größe": 2.0}
    assert second.metrics == pytest.approx(
        {"a": math.nan, "b": math.inf, "c": -math.inf}, nan_ok=True
    )
    for line in path.read_text().splitlines():  # valid JSON for other readers, too
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_each_record_is_read_once_whatever_a_kill_left(tmp_path, path) -> None:
    torn = (lambda f: f.write(b'{"t": 1.0, "step": 99, "att'), lambda f: f.truncate(f.tell() - 1))
    steps, offset = [], 0
    for attempt in range(1, 5):
        journal = Journal(path, tmp_path, attempt)
        for step in range(5):
            journal.log_metrics({"x": 1.0}, 10 * attempt + step)
        journal.close()
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            torn[attempt % 2](file)  # the newline itself may be what a kill takes
        for record in read(path, offset):
            steps.append(record.step)
            offset = record.end
    assert steps == [10 * a + s for a in range(1, 5) for s in range(5)]
    assert [record.step for record in read(path)] == steps


@pytest.mark.parametrize("blocked", ["disk", "server"])
def test_a_step_does_not_wait(outputs, monkeypatch, blocked: str) -> None:
    from mlflow.tracking import MlflowClient

    owner, name = (os, "write") if blocked == "disk" else (MlflowClient, "log_batch")
    real, asked, answers = getattr(owner, name), threading.Event(), threading.Event()

    def waits(*args: Any, **kw: Any) -> Any:
        asked.set()
        answers.wait()
        return real(*args, **kw)

    monkeypatch.setattr(owner, name, waits)
    tracked = Tracked(outputs, f"{blocked}/r", components={} if blocked == "disk" else None)
    tracked.log({"x": 0.0}, 0)
    assert asked.wait(240)
    for step in range(1, 1500):  # what these cost is benchmarks/overhead.py's
        tracked.log({"x": float(step)}, step)
    answers.set()
    tracked.finish()
    assert sum("x" in record.metrics for record in tracked.records()) == 1500
    assert blocked == "disk" or tracked.delivered == tracked.owed


def test_only_rank_0_writes_but_every_rank_has_the_same_loggers(tmp_path) -> None:
    for rank in range(4):
        node, local = divmod(rank, 2)
        position = {"rank": rank, "local_rank": local, "node_rank": node, "world_size": 4}
        tracked = Tracked(tmp_path, components={}, **position)
        assert len(tracked.loggers) == 1
        tracked.loggers[0].log_metrics({"train/loss": float(rank)}, 1)
        tracked.finish()
    first, second = ([r.metrics for r in tracked.records(node)] for node in (0, 1))
    assert [m["train/loss"] for m in first if "train/loss" in m] == [0.0]
    assert any("system/cpu_percent" in metrics for metrics in first)
    assert second and all(k.startswith("system/node1/") for metrics in second for k in metrics)
    assert len([*(tracked.folder / "logs").iterdir()]) == 2


def test_the_sampler_survives_a_source_that_fails(tmp_path, path) -> None:
    journal, calls = Journal(path, tmp_path), []
    sampler = SystemMetrics(journal, 0.01, 0, tmp_path)

    def broken() -> dict[str, float]:
        calls.append(1)
        raise RuntimeError("driver is gone")

    sampler.sources.insert(0, broken)
    sampler.start()
    until(lambda: len(calls) > 5, 10)
    sampler.stop()
    journal.close()
    samples = [record.metrics for record in read(path)]
    assert len(samples) >= 4
    assert all(0 <= sample["system/cpu_percent"] <= 100 for sample in samples)
    assert all(0 < sample["system/memory_gib"] < 1e5 for sample in samples)
