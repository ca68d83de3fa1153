"""The journal, the tracking options beside it, and the sampler: what needs no tracker."""

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

from distdl.runs.records import journal_path, read
from distdl.tracking import start_tracking
from distdl.tracking.journal import Journal
from distdl.tracking.mlflow import MLflowLogger
from distdl.tracking.system import SystemMetrics
from tests.tracking.tracked import (
    info_of,
    wait_until,
)


def test_journal_keeps_every_value_with_its_step_and_attempt(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    journal = Journal(path, tmp_path, attempt=3)
    before = time.time()
    journal.log_metrics({"train/loss": 0.1, "größe": 2}, 7)
    journal.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf}, 8)
    journal.log_metrics({"text": "no number"}, 9)
    journal.log_metrics({("odd", "key"): 1.0}, np.int64(10))  # a user's module may do so
    journal.close()
    first, second, odd = read(path)
    assert (odd.step, odd.metrics) == (10, {"('odd', 'key')": 1.0})
    assert (first.step, first.attempt, first.metrics) == (7, 3, {"train/loss": 0.1, "größe": 2.0})
    assert before - 0.001 <= first.time <= time.time()
    assert math.isnan(second.metrics["a"])
    assert (second.metrics["b"], second.metrics["c"]) == (math.inf, -math.inf)
    for line in path.read_text().splitlines():  # valid JSON for other readers, too
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_journal_appends_within_a_second_and_without_a_close(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    journal = Journal(path, tmp_path)
    journal.log_metrics({"x": 1.0}, 1)
    wait_until(lambda: path.is_file() and len(list(read(path))) == 1, 5)
    journal.close()


def test_a_torn_line_is_passed_over_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    for attempt in (1, 2):
        journal = Journal(path, tmp_path, attempt)
        journal.log_metrics({"x": float(attempt)}, attempt)
        journal.close()
        if attempt == 1:
            with path.open("ab") as file:
                file.write(b'{"t": 1.0, "step": 99, "att')
            assert [r.step for r in read(path)] == [1]
    assert [r.step for r in read(path)] == [1, 2]


def test_following_by_offset_reads_each_record_once(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    steps, offset = [], 0
    for attempt in range(1, 4):
        journal = Journal(path, tmp_path, attempt)
        for step in range(5):
            journal.log_metrics({"x": 1.0}, 10 * attempt + step)
        journal.close()
        with path.open("r+b") as file:  # the newline itself may be what a kill takes
            file.truncate(path.stat().st_size - 1)
        for record in read(path, offset):
            steps.append(record.step)
            offset = record.end
    assert steps == [10 * a + s for a in range(1, 4) for s in range(5)]


def test_a_full_disk_is_said_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(journal_path(tmp_path), tmp_path)
    real, full = os.write, [True]

    def write(fd: int, data: bytes) -> int:
        if full[0] and fd == journal._file:
            if len(data) > 20:
                return real(fd, data[:20])  # a disk fills up in the middle of a line
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    for step in range(4):
        journal.log_metrics({"x": float(step)}, step)
        journal.flush()
    full[0] = False
    journal.close()
    assert [r.step for r in read(journal_path(tmp_path))] == [0, 1, 2, 3]
    said = [r.message for r in caplog.records]
    assert sum("No space left" in m for m in said) == 1
    assert sum("can be written again" in m for m in said) == 1


def test_a_step_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answers, write = threading.Event(), threading.Event(), os.write

    def waits(file: int, data: bytes) -> int:
        asked.set()
        answers.wait()
        return write(file, data)

    journal = Journal(journal_path(tmp_path), tmp_path)
    monkeypatch.setattr(os, "write", waits)
    metrics = {f"m{i}": float(i) for i in range(6)}
    journal.log_metrics(metrics, 0)
    assert asked.wait(240)
    for step in range(1, 5000):  # what these cost is benchmarks/overhead.py's
        journal.log_metrics(metrics, step)
    answers.set()
    journal.close()
    assert len(list(read(journal_path(tmp_path)))) == 5000


def test_a_tensor_is_read_when_it_is_logged(tmp_path: Path) -> None:
    import torch

    journal = Journal(journal_path(tmp_path), tmp_path)
    value = torch.tensor(1.0)
    journal.log_metrics({"x": value}, 0)
    value += 1
    journal.close()
    assert [r.metrics for r in read(journal_path(tmp_path))] == [{"x": 1.0}]


def test_only_rank_0_writes_but_every_rank_has_the_same_loggers(tmp_path: Path) -> None:
    for rank, local_rank, node_rank in ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)):
        info = info_of(
            tmp_path, "e/r", rank=rank, local_rank=local_rank, node_rank=node_rank, world_size=4
        )
        tracking = start_tracking(info, {})
        assert len(tracking.loggers) == 1
        tracking.loggers[0].log_metrics({"train/loss": float(rank)}, 1)
        tracking.finish("SUCCEEDED")
    records = {node: list(read(journal_path(tmp_path / "e/r", node))) for node in (0, 1)}
    keys = {node: {k for r in records[node] for k in r.metrics} for node in (0, 1)}
    assert "train/loss" in keys[0] and "system/cpu_percent" in keys[0]
    assert keys[1] and all(k.startswith("system/node1/") for k in keys[1])
    losses = [r.metrics["train/loss"] for r in records[0] if "train/loss" in r.metrics]
    assert losses == [0.0]
    assert len(list((tmp_path / "e/r/logs").iterdir())) == 2


def test_the_sampler_survives_a_source_that_fails(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path), tmp_path)
    sampler = SystemMetrics(journal, 0.01, 0, tmp_path)
    calls = []

    def broken() -> dict[str, float]:
        calls.append(1)
        raise RuntimeError("driver is gone")

    sampler.sources.insert(0, broken)
    sampler.start()
    wait_until(lambda: len(calls) > 5, 10)
    sampler.stop()
    journal.close()
    samples = [r.metrics for r in read(journal_path(tmp_path))]
    assert len(samples) >= 4
    assert all(0 <= s["system/cpu_percent"] <= 100 for s in samples)
    assert all(0 < s["system/memory_gib"] < 1e5 for s in samples)


def test_a_real_trainer_reaches_the_journal_csv_and_tensorboard(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().training_step(batch, batch_idx)
            self.log("train/loss", out["loss"])
            self.log("my_own", torch.tensor(float(batch_idx)))
            return out

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().validation_step(batch, batch_idx)
            self.log("val/loss", out["x"])
            return out

    tracking = start_tracking(info_of(tmp_path, "e/r"), built(["csv", "tensorboard"]))
    trainer = pl.Trainer(
        max_steps=6,
        limit_val_batches=2,
        val_check_interval=3,
        log_every_n_steps=2,
        accelerator="cpu",
        devices=1,
        logger=tracking.loggers,
        callbacks=[LearningRateMonitor(), ModelCheckpoint()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path / "elsewhere",
    )
    trainer.fit(Model())
    tracking.finish("SUCCEEDED")
    run = tmp_path / "e/r"
    steps = {r.step: r.metrics["my_own"] for r in read(journal_path(run)) if "my_own" in r.metrics}
    assert steps == {1: 1.0, 3: 3.0, 5: 5.0}
    names = {k for r in read(journal_path(run)) for k in r.metrics}
    assert {"train/loss", "val/loss", "lr-SGD", "epoch", "system/cpu_percent"} <= names
    assert "my_own" in (run / "logs/csv/version_0/metrics.csv").read_text()
    assert list((run / "logs/tensorboard").glob("events*"))
    assert not (tmp_path / "elsewhere").exists()
    assert any(line.startswith("tensorboard --logdir") for line in tracking.how_to_open())


def built(options: list[str]) -> dict[str, Any]:
    """The `tracking` part of a config with these options, composed and built by Hydra."""
    from hydra import compose, initialize_config_module
    from hydra.utils import instantiate

    with initialize_config_module("distdl.conf", version_base="1.3"):
        config = compose(overrides=[f"+tracking=[{','.join(options)}]"])
    return dict(instantiate(config).get("tracking") or {})


def test_the_options_can_be_chosen_together_and_none_is_nothing() -> None:
    assert built(["none"]) == {}
    both = built(["mlflow", "csv"])
    assert list(both) == ["mlflow", "csv"] and isinstance(both["mlflow"], MLflowLogger)
