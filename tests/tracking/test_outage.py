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

from distdl.tracking import start_tracking
from tests.tracking.tracked import client, database, info_of, logger, runs_of, wait_until


def test_what_was_logged_arrives_as_it_was_then_in_order_and_once(outputs: Path) -> None:
    info = info_of(outputs, "away/r")
    with FileLock(outputs / "mlflow.db.lock"):  # nobody comes to the database
        tracking = start_tracking(info, {"mlflow": logger()})
        mlflow = tracking.loggers[0].experiment
        changing = Path("changing.txt")
        changing.write_text("then")
        mlflow.log_artifact(None, changing)
        changing.write_text("now")
        for text in ("old", "new"):
            mlflow.log_text(None, text, "twice.txt")
            mlflow.set_tag(None, "twice", text)
            mlflow.log_param(None, "twice", text)  # the first value of a parameter stays
        noted = (info.run_dir / "tracking/mlflow.json").stat().st_mtime_ns
        for i in range(300):
            mlflow.log_text(None, str(i), f"many/{i}.txt")
        mlflow.log_batch(None, metrics=[Metric("m", 1.0, 1, 1)])
        # Each costs as much as the first: none of them writes down all those before it.
        assert (info.run_dir / "tracking/mlflow.json").stat().st_mtime_ns == noted
        assert not (outputs / "mlflow.db").exists()
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "away")
    stored = outputs / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert (stored / "changing.txt").read_text() == "then"
    assert (stored / "twice.txt").read_text() == "new"
    assert (run.data.tags["twice"], run.data.params["twice"]) == ("new", "old")
    assert all((stored / f"many/{i}.txt").read_text() == str(i) for i in range(300))
    arrived = [(stored / f"many/{i}.txt").stat().st_ctime_ns for i in range(0, 300, 20)]
    assert arrived == sorted(arrived)
    assert not list((info.run_dir / "tracking/artifacts").rglob("*.*"))


def test_what_is_logged_again_while_it_is_being_sent_is_sent_again(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, texts = MlflowClient.log_artifact, ["newer", "newest"]

    def slow(self: MlflowClient, run_id: str, path: str, *args: Any) -> None:
        real(self, run_id, path, *args)
        if path.endswith("latest.txt") and texts:
            mlflow.log_text(None, texts.pop(0), "latest.txt")

    tracking = start_tracking(info_of(outputs, "slow/r"), {"mlflow": logger()})
    mlflow = tracking.loggers[0].experiment
    monkeypatch.setattr(MlflowClient, "log_artifact", slow)
    mlflow.log_text(None, "old", "latest.txt")
    wait_until(lambda: not texts, 60)
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "slow")
    stored = outputs / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert (stored / "latest.txt").read_text() == "newest"


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


def test_a_full_disk_costs_the_file_and_not_the_training(
    outputs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = info_of(outputs, "full/r")
    Path("large.bin").write_bytes(os.urandom(10_000))
    tracking = start_tracking(info, {"mlflow": logger()})
    ours = tracking.loggers[0]
    assert ours.run_id
    with full_disk():
        ours.experiment.log_artifact(None, "large.bin")
        ours.log_hyperparams({f"many{i}": "x" * 400 for i in range(20)})  # their file is as large
    ours.experiment.log_artifact(None, "large.bin", "later")
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "full")
    there = client(database(outputs)).list_artifacts(run.info.run_id)
    assert [file.path for file in there] == ["config.yaml", "later", "packages.txt"]
    assert f"large.bin is not kept for MLflow: [Errno {errno.EFBIG}]" in caplog.text
    assert len(run.data.params) == 20
