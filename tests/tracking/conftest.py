"""Runs that are tracked in this process, and what MLflow holds of them. Every test has its own
environment; the tests of a file share a database."""

import hashlib

import pytest
from matplotlib.figure import Figure
from mlflow.tracking import MlflowClient

from distdl.cli import track
from distdl.runs.records import journal_path, read
from distdl.tracking import RunInfo, start_tracking
from distdl.tracking.client import metric_name
from distdl.tracking.mlflow import MLflowLogger
from tests.waiting import until


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "AZUREML_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """One project's output folder: creating its database takes seconds."""
    return tmp_path_factory.mktemp("outputs")


def logger(**options):
    return MLflowLogger(**{"interval": 0.1, "system_metrics_interval": 0, **options})


def database(outputs):
    return f"sqlite:///{outputs}/mlflow.db"


def runs_of(uri, experiment):
    experiment_id = MlflowClient(uri).get_experiment_by_name(experiment).experiment_id
    return [*MlflowClient(uri).search_runs([experiment_id])]


def delivered(uri, run_id):
    """The points that MLflow has: key, time in ms, step."""
    keys = MlflowClient(uri).get_run(run_id).data.metrics
    points = [p for key in keys for p in MlflowClient(uri).get_metric_history(run_id, key)]
    return sorted((p.key, p.timestamp, p.step) for p in points)


class Tracked:
    """A run under way; by default MLflow follows it into the database of `outputs`."""

    def __init__(self, outputs, run_id="e/r", attempt=1, components=None, **fields):
        self.folder = outputs / run_id
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "config.yaml"
        config.write_text("optimizer:\n  lr: 0.1\n")
        self.experiment = run_id.split("/")[0]
        fields = {
            "rank": 0,
            "local_rank": 0,
            "node_rank": 0,
            "world_size": 1,
            **fields,
            "experiment_name": self.experiment,
            "artifacts": [config],
        }
        fields = {"key": hashlib.md5(run_id.encode()).hexdigest(), **fields}
        info = RunInfo(self.folder, run_id, attempt, output_dir=outputs, **fields)
        components = {"mlflow": logger()} if components is None else components
        self.tracking = start_tracking(info, components)
        self.loggers = self.tracking.loggers
        self.journal = self.tracking.journal
        self.log = self.journal.log_metrics
        self.component = self.tracking.components.get("mlflow")

    def connected(self):
        """Waits for the MLflow run: a preempted run waits neither for a server nor an import."""
        until(lambda: self.component.delivery.run_id)

    def finish(self, status="SUCCEEDED"):
        self.tracking.finish(status)
        return self

    @property
    def run(self):
        """Its MLflow run, the only one of the experiment."""
        (run,) = runs_of(self.component.uri, self.experiment)
        return run

    @property
    def delivered(self):
        return delivered(self.component.uri, self.run.info.run_id)

    @property
    def owed(self):
        """The points of the journal, which MLflow must have exactly once."""
        points = ((key, record) for record in self.records() for key in record.metrics)
        return sorted((metric_name(k), round(r.time * 1000), r.step) for k, r in points)

    def records(self, node=0):
        return [*read(journal_path(self.folder, node))]

    @property
    def stored(self):
        """Where a database keeps the artifacts."""
        return self.folder.parents[1] / "mlflow-artifacts" / self.run.info.run_id / "artifacts"

    def artifacts(self):
        """The files and folders at the top of the MLflow run."""
        files = MlflowClient(self.component.uri).list_artifacts(self.run.info.run_id)
        return [file.path for file in files]

    def sync(self):
        return track.main(["sync", str(self.folder)]).exit_code


def draw(logger, picture, epoch):
    """What a user of MLflow writes, with the run's id or without."""
    mlflow, run = logger.experiment, logger.run_id
    mlflow.log_text(run, f"epoch {epoch}", "notes/latest.txt")
    mlflow.log_text(run, f"epoch {epoch}", f"notes/{epoch}.txt")
    mlflow.log_image(None, picture, f"samples/{epoch}.png")
    mlflow.log_image(run, picture, key="each/sample", step=epoch, synchronous=False)
    mlflow.log_figure(run, Figure(figsize=(1, 1)), f"figures/{epoch}.png")
    mlflow.log_dict(run, {"epoch": epoch}, f"{epoch}.json")
    mlflow.log_metric(run, "mine", epoch, step=epoch)
    mlflow.log_metric(run, "mine@2", epoch, 1700000000123, epoch, synchronous=False).wait()
    assert mlflow.log_param(run, f"p{epoch}", epoch) == epoch
    mlflow.set_tag(run, "seen", epoch)
