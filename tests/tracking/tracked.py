"""Runs that are tracked, and what MLflow was told of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from distdl.runs.records import journal_path, read
from distdl.tracking import RunInfo
from distdl.tracking.client import metric_name
from distdl.tracking.mlflow import MLflowLogger


def info_of(outputs: Path, run_id: str, attempt: int = 1, **fields: Any) -> RunInfo:
    run = outputs / run_id
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("optimizer:\n  lr: 0.1\n")
    values: dict[str, Any] = {
        "rank": 0,
        "local_rank": 0,
        "node_rank": 0,
        "world_size": 1,
        "experiment_name": run_id.split("/")[0],
        "artifacts": [run / "config.yaml"],
    }
    values.update(fields)
    return RunInfo(run_dir=run, run_id=run_id, attempt=attempt, output_dir=outputs, **values)


def logger(**options: Any) -> MLflowLogger:
    options = {"interval": 0.1, "system_metrics_interval": 0, **options}
    return MLflowLogger(**options)


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def database(outputs: Path) -> str:
    return f"sqlite:///{outputs}/mlflow.db"


def runs_of(uri: str, experiment: str) -> list[Any]:
    found = client(uri).get_experiment_by_name(experiment)
    return list(client(uri).search_runs([found.experiment_id]))


def wait_until(condition: Any, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def connected(tracking: Any) -> None:
    """Wait for the MLflow run: a preempted run does not wait for a server, nor for an import."""
    wait_until(lambda: tracking.components["mlflow"].delivery.run_id)


def owed(info: RunInfo) -> list[tuple[str, float, int]]:
    """What the journal says: (key, time in ms, step), which MLflow must have exactly once."""
    points = []
    for record in read(journal_path(info.run_dir)):
        points += [(metric_name(k), round(record.time * 1000), record.step) for k in record.metrics]
    return sorted(points)


def delivered(uri: str, run_id: str) -> list[tuple[str, float, int]]:
    mlflow = client(uri)
    keys = mlflow.get_run(run_id).data.metrics
    found = [p for key in keys for p in mlflow.get_metric_history(run_id, key)]
    return sorted((p.key, p.timestamp, p.step) for p in found)


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
