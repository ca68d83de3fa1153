"""The follower and `track sync`, against a real MLflow server."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from mlflow.entities import Metric
from mlflow.tracking import MlflowClient

from tests.conftest import free_port, matrix_only
from tests.tracking.conftest import Tracked, draw, logger
from tests.waiting import until


class Server:
    """`mlflow server` on one port and one database, which can be killed and started again."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.process = None
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self, wait=True):
        command = f"-m mlflow server --host 127.0.0.1 --workers 1 --port {self.port}".split()
        database = f"sqlite:///{self.folder}/s.db"
        artifacts = self.folder / "artifacts"
        command += ["--backend-store-uri", database, "--artifacts-destination", str(artifacts)]
        env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        options = {"cwd": self.folder, "env": env, "start_new_session": True}
        options |= dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        self.process = subprocess.Popen([sys.executable, *command], **options)
        if wait:
            until(self.answers)

    def answers(self):
        with contextlib.suppress(OSError):
            return urllib.request.urlopen(self.uri + "/health", timeout=2).status == 200

    def kill(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@matrix_only
def test_a_server_that_is_down_comes_up_fails_and_comes_back(server, tmp_path, caplog):
    """One story, because a server takes long to start: a run that outlives two outages."""
    missed = run_without_its_server(server, tmp_path, caplog)
    caplog.clear()
    component = logger(tracking_uri=server.uri, flush_timeout=60)
    options = {"params": {"lr": 0.1}, "world_size": 2}
    tracked = Tracked(tmp_path, "server/r", components={"mlflow": component}, **options)

    def log(first):
        for step in range(first, first + 600):
            tracked.log({"a": math.inf, "b": math.nan}, step)
        tracked.journal.flush()

    def messages(fragment):  # those of the first run's follower may come after its end
        others = [r.message for r in caplog.records if "experiment_name=later" not in r.message]
        return sum(fragment in message for message in others)

    ours = tracked.loggers[0]
    picture = np.zeros((4, 4, 3))
    log(0)
    until(lambda: messages("fails; training") == 1)
    draw(ours, picture, 0)
    log_changing_values(ours.experiment)
    assert (ours.run_id, ours.experiment_id) == (None, None)
    assert "self.logger.run_id is None for now" in caplog.text
    server.start()
    sync_what_was_missed(missed)
    until(lambda: component.delivery.delivered >= 1200 and messages("is back: sending") == 1)
    params = {"lr": "0.1", "twice": "old", "p0": "0"}
    assert ours.experiment.get_run(None).data.params == params
    server.kill()
    log(600)
    until(lambda: messages("fails; training") == 2)
    draw(ours, picture, 1)
    server.start(wait=False)  # the run ends before it is up
    log(1200)
    run = tracked.finish().run
    assert len(tracked.owed) == 3605
    assert tracked.delivered == tracked.owed
    assert (run.info.status, run.data.params) == ("FINISHED", params | {"p1": "1"})
    assert (run.data.tags["seen"], run.data.tags["twice"]) == ("1", "new")
    drawn = {"0.json", "1.json", "figures", "images", "notes", "samples"}
    assert {*tracked.artifacts()} == {"config.yaml", "packages.txt", "changing.txt", *drawn}
    sent = server.folder / "artifacts" / run.info.experiment_id / run.info.run_id / "artifacts"
    texts = {note.name: note.read_text() for note in (sent / "notes").iterdir()}
    assert texts == {"0.txt": "epoch 0", "1.txt": "epoch 1", "latest.txt": "epoch 1"}
    assert (sent / "changing.txt").read_text() == "then"
    assert messages("fails; training") == messages("is back: sending") == 2
    page = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert component.how_to_open() == [f"{server.uri}/{page}"]


def log_changing_values(mlflow):
    """Files are sent as they are now; of a parameter the first value stays, of a tag the last."""
    changing = Path("changing.txt")
    changing.write_text("then", encoding="utf-8")
    mlflow.log_artifact(None, changing)
    changing.write_text("now", encoding="utf-8")
    for text in ("old", "new"):
        mlflow.set_tag(None, "twice", text)
        mlflow.log_param(None, "twice", text)
    mlflow.log_batch(None, metrics=[Metric("m", 1.0, 1, 1)])


def run_without_its_server(server, tmp_path, caplog):
    """A complete run while the server is down: it ends soon, and prints what to type."""
    component = logger(tracking_uri=server.uri, flush_timeout=1)
    tracked = Tracked(tmp_path, "later/r", components={"mlflow": component}, params={"lr": 0.1})
    for step in range(700):
        tracked.log({"a": float(step), "b": 1.0}, step)
    tracked.loggers[0].experiment.log_text(None, "lost?", "note.txt")
    until((tracked.folder / "tracking/artifacts/packages.txt").is_file)
    tracked.finish("FAILED")
    assert f"distdl track sync {tracked.folder}" in caplog.text
    assert "1400 points and 3 files left" in caplog.text
    return tracked


def sync_what_was_missed(tracked):
    """`track sync`, twice: again as after a kill between the delivery and its note."""
    for _ in range(2):
        assert tracked.sync() == 0
        assert tracked.delivered == tracked.owed
        run = tracked.run
        assert run.info.status == "FAILED"
        assert run.data.params == {"lr": "0.1"}
        assert tracked.artifacts() == ["config.yaml", "note.txt", "packages.txt"]
        assert run.info.end_time < time.time() * 1000 - 500  # when it ended, not when it was sent
        (tracked.folder / "tracking/mlflow-node0.json").unlink()


def test_another_node_finds_the_run_and_sends_its_system_metrics(server, tmp_path):
    if server.process is None:
        server.start()
    MlflowClient(server.uri).create_experiment("nodes")

    def node(rank):
        component = logger(tracking_uri=server.uri, system_metrics_interval=0.2)
        position = {"rank": rank, "node_rank": rank, "world_size": 2}
        own_disk = tmp_path / str(rank)
        return Tracked(own_disk, "nodes/r", components={"mlflow": component}, **position)

    second = node(1)
    until(lambda: len(second.component.delivery.names) > 2)  # it has looked for it
    first = node(0)
    for tracked in (first, second):
        until(lambda t=tracked: t.component.delivery.delivered > 20)
        tracked.finish()
    assert {"system/cpu_percent", "system/node1/cpu_percent"} <= {*first.run.data.metrics}
