"""The journal, and who may write to it. A disk that is full for it is in test_mlflow.py."""

import json
import math
import os
import threading
import time
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from mlflow.tracking import MlflowClient

from distdl.runs.records import journal_path, read
from distdl.tracking.journal import Journal
from tests.tracking.conftest import Tracked, logger
from tests.waiting import until


def test_every_value_is_kept_with_its_step_and_attempt(tmp_path):
    path = journal_path(tmp_path)
    journal = Journal(path, tmp_path, attempt=3)
    before = time.time()
    tensor = torch.tensor(0.1)
    journal.log_metrics({"train/loss": tensor, "größe": 2}, 7)
    tensor += 1  # it is read when it is logged
    odd = {"a": math.nan, "b": math.inf, "c": -math.inf}
    journal.log_metrics(odd, 8)
    until(lambda: path.is_file() and len([*read(path)]) == 2, 5)  # within a second
    journal.log_metrics({"text": "no number"}, 9)
    journal.log_metrics({("odd", "key"): 1.0}, np.int64(10))  # a user's module may do so
    journal.close()
    first, second, third = read(path)
    assert (first.step, first.attempt) == (7, 3)
    assert before - 0.001 <= first.time <= time.time()
    assert first.metrics == {"train/loss": pytest.approx(0.1), "größe": 2.0}
    assert second.metrics == pytest.approx(odd, nan_ok=True)
    assert (third.step, third.metrics) == (10, {"('odd', 'key')": 1.0})
    for line in path.read_text().splitlines():  # valid JSON for other readers, too
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_each_record_is_read_once_whatever_a_kill_left(tmp_path):
    torn = (lambda f: f.write(b'{"t": 1.0, "step": 99, "att'), lambda f: f.truncate(f.tell() - 1))
    path = journal_path(tmp_path)
    steps = []
    offset = 0
    for attempt in (1, 2, 3):
        journal = Journal(path, tmp_path, attempt)
        for step in (0, 1):
            journal.log_metrics({"x": 1.0}, 10 * attempt + step)
        journal.close()
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            torn[attempt % 2](file)  # the newline itself may be what a kill takes
        for record in read(path, offset):
            steps.append(record.step)
            offset = record.end
    assert steps == [record.step for record in read(path)] == [10, 11, 20, 21, 30, 31]


@pytest.mark.parametrize("blocked", ["disk", "server"])
def test_a_step_does_not_wait(outputs, monkeypatch, blocked):
    owner, name = (os, "write") if blocked == "disk" else (MlflowClient, "log_batch")
    real = getattr(owner, name)
    asked = threading.Event()
    answers = threading.Event()

    def waits(*args, **kw):
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


def test_every_rank_may_write_to_every_logger_and_rank_0_records(tmp_path, monkeypatch):
    """Four ranks on two nodes, while MLflow's server is away and a source of the sampler fails."""
    monkeypatch.setattr("psutil.net_io_counters", Mock(side_effect=RuntimeError))
    for rank in range(4):
        node, local = divmod(rank, 2)
        position = {"rank": rank, "local_rank": local, "node_rank": node, "world_size": 4}
        options = {"flush_timeout": 0, "system_metrics_interval": 15}
        away = logger(tracking_uri="http://127.0.0.1:9", **options)
        tracked = Tracked(tmp_path, components={"mlflow": away}, **position)
        ours, journal = tracked.loggers
        for each in (ours, journal) if rank else [journal]:
            each.experiment.add_image("x", 1)
            each.experiment.log_text(each.run_id, "x", os.path.join(each.experiment_id or "", "x"))
        journal.log_image(key="x", images=[])
        journal.watch(None)
        assert journal.log_dir == journal.root_dir == str(tracked.folder)
        for each in tracked.loggers:
            each.log_hyperparams({"x": 1})
            each.log_metrics({"train/loss": float(rank)}, 1)
        assert rank == 0 or (ours.run_id, ours.name) == (None, None)
        tracked.finish()
    first, second = ([r.metrics for r in tracked.records(node)] for node in (0, 1))
    assert [m["train/loss"] for m in first if "train/loss" in m] == [0.0]
    sampled = [metrics for metrics in first if "system/cpu_percent" in metrics]
    assert sampled
    assert all(0 <= metrics["system/cpu_percent"] <= 100 for metrics in sampled)
    assert all(0 < metrics["system/memory_gib"] < 1e5 for metrics in sampled)
    assert second
    assert all(k.startswith("system/node1/") for metrics in second for k in metrics)
    assert len([*(tracked.folder / "logs").iterdir()]) == 2
