"""Runs that are tracked in this process, and what MLflow holds of them. Every test has its own
environment; the tests of a file share a database."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from distdl.cli import track
from distdl.runs.records import Record, journal_path, read
from distdl.tracking import RunInfo, start_tracking
from distdl.tracking.client import metric_name
from distdl.tracking.delivery import Delivery
from distdl.tracking.mlflow import MLflowLogger
from distdl.tracking.outbox import Outbox

Point = tuple[str, float, int]  # key, time in ms, step


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "AZUREML_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> Path:
    """One project's output folder: creating its database takes seconds."""
    return tmp_path_factory.mktemp("outputs")


def logger(**options: Any) -> MLflowLogger:
    return MLflowLogger(**{"interval": 0.1, "system_metrics_interval": 0, **options})


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def database(outputs: Path) -> str:
    return f"sqlite:///{outputs}/mlflow.db"


def runs_of(uri: str, experiment: str) -> list[Any]:
    experiment_id = client(uri).get_experiment_by_name(experiment).experiment_id
    return list(client(uri).search_runs([experiment_id]))


def delivered(uri: str, run_id: str) -> list[Point]:
    keys = client(uri).get_run(run_id).data.metrics
    points = [p for key in keys for p in client(uri).get_metric_history(run_id, key)]
    return sorted((p.key, p.timestamp, p.step) for p in points)


def until(condition: Any, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


class Tracked:
    """A run under way; by default MLflow follows it into the database of `outputs`."""

    def __init__(
        self,
        outputs: Path,
        run_id: str = "e/r",
        attempt: int = 1,
        components: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        self.folder = outputs / run_id
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.yaml"
        config.write_text("optimizer:\n  lr: 0.1\n")
        ranks = {"rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1}
        defaults = {**ranks, "experiment_name": run_id.split("/")[0], "artifacts": [config]}
        info = RunInfo(self.folder, run_id, attempt, output_dir=outputs, **{**defaults, **fields})
        self.experiment = info.experiment_name
        self.tracking = start_tracking(
            info, {"mlflow": logger()} if components is None else components
        )
        self.loggers, self.journal = self.tracking.loggers, self.tracking.journal
        self.component = self.tracking.components.get("mlflow")
        self.uri = self.component.uri if self.component else ""

    def log(self, metrics: Mapping[Any, Any], step: int) -> None:
        self.journal.log_metrics(metrics, step)

    def connected(self) -> None:
        """Waits for the MLflow run: a preempted run waits neither for a server nor an import."""
        until(lambda: self.component.delivery.run_id)

    def finish(self, status: str = "SUCCEEDED") -> Any:
        """Ends it; returns its MLflow run, the only one of the experiment."""
        self.tracking.finish(status)
        return self.run if self.uri else None

    @property
    def run(self) -> Any:
        (run,) = runs_of(self.uri, self.experiment)
        return run

    @property
    def delivered(self) -> list[Point]:
        """The points that MLflow has."""
        return delivered(self.uri, self.run.info.run_id)

    @property
    def owed(self) -> list[Point]:
        """The points of the journal, which MLflow must have exactly once."""
        return sorted(
            (metric_name(key), round(record.time * 1000), record.step)
            for record in self.records()
            for key in record.metrics
        )

    def records(self, node: int = 0) -> list[Record]:
        return [*read(journal_path(self.folder, node))]

    @property
    def stored(self) -> Path:
        """Where a database keeps the artifacts."""
        return self.folder.parents[1] / "mlflow-artifacts" / self.run.info.run_id / "artifacts"

    def artifacts(self) -> list[str]:
        """The files and folders at the top of the MLflow run."""
        return [file.path for file in client(self.uri).list_artifacts(self.run.info.run_id)]

    def is_behind(self) -> bool:
        return Delivery(Outbox(self.folder), "").is_behind()

    def sync(self) -> int:
        return track.main(["sync", str(self.folder)])


def figure() -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(1, 1))
    drawn.subplots().plot([0, 1])
    return drawn


def draw(logger: Any, picture: Any, epoch: int) -> None:
    """What a user of MLflow writes, with the run's id or without."""
    mlflow, run = logger.experiment, logger.run_id
    mlflow.log_text(run, f"epoch {epoch}", "notes/latest.txt")
    mlflow.log_text(run, f"epoch {epoch}", f"notes/{epoch}.txt")
    mlflow.log_image(None, picture, f"samples/{epoch}.png")
    mlflow.log_image(run, picture, key="each/sample", step=epoch, synchronous=False)
    mlflow.log_figure(run, figure(), f"figures/{epoch}.png")
    mlflow.log_dict(run, {"epoch": epoch}, f"{epoch}.json")
    mlflow.log_metric(run, "mine", epoch, step=epoch)
    mlflow.log_metric(run, "mine@2", epoch, 1700000000123, epoch, synchronous=False).wait()
    assert mlflow.log_param(run, f"p{epoch}", epoch) == epoch
    mlflow.set_tag(run, "seen", epoch)
