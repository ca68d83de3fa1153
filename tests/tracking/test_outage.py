"""What a module logs through `self.logger` while MLflow cannot be reached."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Metric

from tests.tracking.tracked import Tracked, wait_until


def test_what_was_logged_arrives_as_it_was_then_in_order_and_once(outputs: Path) -> None:
    with FileLock(outputs / "mlflow.db.lock"):  # nobody reaches the database
        tracked = Tracked(outputs, "away/r")
        mlflow, state = tracked.loggers[0].experiment, tracked.folder / "tracking/mlflow.json"
        changing = Path("changing.txt")
        changing.write_text("then")
        mlflow.log_artifact(None, changing)
        changing.write_text("now")
        for text in ("old", "new"):
            mlflow.log_text(None, text, "twice.txt")
            mlflow.set_tag(None, "twice", text)
            mlflow.log_param(None, "twice", text)  # the first value of a parameter stays
        noted = state.stat().st_mtime_ns
        for i in range(100):
            mlflow.log_text(None, str(i), f"many/{i}.txt")
        mlflow.log_batch(None, metrics=[Metric("m", 1.0, 1, 1)])
        assert state.stat().st_mtime_ns == noted, "each writes down all those before it"
        assert not (outputs / "mlflow.db").exists()
    data, stored = tracked.finish().data, tracked.stored
    assert (stored / "changing.txt").read_text() == "then"
    assert (stored / "twice.txt").read_text() == "new"
    assert (data.tags["twice"], data.params["twice"]) == ("new", "old")
    many = [stored / f"many/{i}.txt" for i in range(100)]
    assert [path.read_text() for path in many] == [*map(str, range(100))]
    arrived = [path.stat().st_ctime_ns for path in many[::7]]
    assert arrived == sorted(arrived)
    assert not [*(tracked.folder / "tracking/artifacts").rglob("*.*")]


def test_what_is_logged_again_while_it_is_being_sent_is_sent_again(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, texts = MlflowClient.log_artifact, ["newer", "newest"]

    def slow(self: MlflowClient, run_id: str, path: str, *args: Any) -> None:
        real(self, run_id, path, *args)
        if path.endswith("latest.txt") and texts:
            mlflow.log_text(None, texts.pop(0), "latest.txt")

    tracked = Tracked(outputs, "slow/r")
    mlflow = tracked.loggers[0].experiment
    monkeypatch.setattr(MlflowClient, "log_artifact", slow)
    mlflow.log_text(None, "old", "latest.txt")
    wait_until(lambda: not texts, 60)
    tracked.finish()
    assert (tracked.stored / "latest.txt").read_text() == "newest"


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """It takes no file above 4 KiB."""
    before, answer = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, answer)


def test_a_full_disk_costs_a_file_but_no_metric_and_not_the_training(
    outputs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("large.bin").write_bytes(os.urandom(10_000))
    tracked = Tracked(outputs, "full/r")
    ours = tracked.loggers[0]
    assert ours.run_id
    with full_disk():
        ours.experiment.log_artifact(None, "large.bin")
        ours.log_hyperparams({f"many{i}": "x" * 400 for i in range(20)})  # their file is as large
        for step in range(100):
            tracked.log({"x": float(step)}, step)
            tracked.journal.flush()
    ours.experiment.log_artifact(None, "large.bin", "later")
    run = tracked.finish()
    assert tracked.artifacts() == ["config.yaml", "later", "packages.txt"]
    assert f"large.bin is not kept for MLflow: [Errno {errno.EFBIG}]" in caplog.text
    assert len(run.data.params) == 20
    assert [record.step for record in tracked.records()] == [*range(100)]
    assert tracked.delivered == tracked.owed
    for fragment in ("metrics.jsonl cannot be written", "metrics.jsonl can be written again"):
        assert caplog.text.count(fragment) == 1
