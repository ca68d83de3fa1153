"""The follower and `track sync`, against a real MLflow server."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from distdl.cli import track
from distdl.tracking import RunInfo, start_tracking
from tests.tracking.tracked import (
    client,
    delivered,
    draw,
    info_of,
    logger,
    owed,
    runs_of,
    wait_until,
)


class Server:
    """`mlflow server` on one port and one database, which can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--workers",
            "1",
        ]
        command += [
            "--port",
            str(self.port),
            "--backend-store-uri",
            f"sqlite:///{self.folder}/s.db",
        ]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        self.process = subprocess.Popen(
            command,
            env=environment,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def wait(self) -> None:
        def up() -> bool:
            try:
                return urllib.request.urlopen(self.uri + "/health", timeout=2).status == 200
            except OSError:
                return False

        wait_until(up, 120)

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


def test_a_server_that_is_down_comes_up_goes_away_and_comes_back(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One story, because a server takes long to start: a run that outlives two absences."""
    missed = run_without_its_server(server, tmp_path, caplog)
    caplog.clear()

    info = info_of(tmp_path, "server/r", params={"lr": 0.1}, world_size=2)
    component = logger(tracking_uri=server.uri, flush_timeout=60)
    tracking = start_tracking(info, {"mlflow": component})  # waits for nothing: it is not there yet

    def log(first: int) -> None:
        for step in range(first, first + 600):
            tracking.journal.log_metrics({"a": float(step), "b": math.nan}, step)
        tracking.journal.flush()

    ours, picture = tracking.loggers[0], np.zeros((4, 4, 3))
    log(0)
    wait_until(lambda: component._failures > 0)
    draw(ours, picture, 0)
    assert (ours.run_id, ours.experiment_id) == (None, None)
    assert "self.logger.run_id is None for now" in caplog.text
    server.start()
    server.wait()
    sync_what_was_missed(server, missed)
    wait_until(lambda: component.delivery.delivered >= 1200 and component._failures == 0, 60)
    assert ours.experiment.get_run(None).data.params == {"lr": "0.1", "p0": "0"}
    server.kill()
    log(600)
    wait_until(lambda: component._failures > 0)
    draw(ours, picture, 1)
    server.start()  # on the same port and database, and the run ends before it is up
    log(1200)
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(server.uri, "server")
    points = owed(info)
    assert len(points) == 3604
    assert delivered(server.uri, run.info.run_id) == points
    assert run.info.status == "FINISHED"
    assert (run.data.params, run.data.tags["seen"]) == ({"lr": "0.1", "p0": "0", "p1": "1"}, "1")
    names = [a.path for a in client(server.uri).list_artifacts(run.info.run_id)]
    drawn = {"0.json", "1.json", "figures", "images", "notes", "samples"}
    assert set(names) == {"config.yaml", "packages.txt", *drawn}
    notes = Path(client(server.uri).download_artifacts(run.info.run_id, "notes", str(tmp_path)))
    texts = {note.name: note.read_text() for note in notes.iterdir()}
    assert texts == {"0.txt": "epoch 0", "1.txt": "epoch 1", "latest.txt": "epoch 1"}
    # What the first run's follower says may come after its end.
    said = [r.message for r in caplog.records if "experiment_name=later" not in r.message]
    assert sum("fails; training goes on" in m for m in said) == 2
    assert sum("is back: sending on" in m for m in said) == 2
    page = f"#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}"
    assert component.how_to_open() == [f"{server.uri}/{page}"]


def run_without_its_server(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> RunInfo:
    """A whole run while the server is down: it ends soon, and says what to type."""
    info = info_of(tmp_path, "later/r", params={"lr": 0.1})
    tracking = start_tracking(info, {"mlflow": logger(tracking_uri=server.uri, flush_timeout=1)})
    for step in range(700):
        tracking.journal.log_metrics({"a": float(step), "b": 1.0}, step)
    tracking.loggers[0].experiment.log_text(None, "lost?", "note.txt")
    wait_until((info.run_dir / "tracking/artifacts/packages.txt").is_file)
    tracking.finish("FAILED")
    assert f"distdl track sync {info.run_dir}" in caplog.text
    assert "1400 points, 3 files left" in caplog.text
    return info


def sync_what_was_missed(server: Server, info: RunInfo) -> None:
    """`track sync`, twice: again as after a kill between the delivery and its note."""
    for _ in range(2):
        assert track.main(["sync", str(info.run_dir)]) == 0
        (run,) = runs_of(server.uri, "later")
        assert delivered(server.uri, run.info.run_id) == owed(info)
        assert run.info.status == "FAILED" and run.data.params == {"lr": "0.1"}
        names = [a.path for a in client(server.uri).list_artifacts(run.info.run_id)]
        assert names == ["config.yaml", "note.txt", "packages.txt"]
        assert run.info.end_time < time.time() * 1000 - 500  # when it ended, not when it was sent
        (info.run_dir / "tracking/mlflow-node0.json").unlink()


def test_another_node_finds_the_run_and_sends_its_system_metrics(
    server: Server, tmp_path: Path
) -> None:
    if server.process is None:
        server.start()
        server.wait()
    node1 = info_of(tmp_path / "b", "nodes/r", rank=1, node_rank=1, world_size=2)
    options = {"tracking_uri": server.uri, "system_metrics_interval": 0.2}
    client(server.uri).create_experiment("nodes")
    second = start_tracking(node1, {"mlflow": logger(**options)})
    wait_until(lambda: len(second.components["mlflow"].delivery.names) > 2)  # it has looked for it
    first = start_tracking(info_of(tmp_path / "a", "nodes/r"), {"mlflow": logger(**options)})
    for tracking in (first, second):
        component = tracking.components["mlflow"]
        wait_until(lambda c=component: c.delivery.delivered > 20, 60)
        tracking.finish("SUCCEEDED")
    (run,) = runs_of(server.uri, "nodes")
    assert {"system/cpu_percent", "system/node1/cpu_percent"} <= set(run.data.metrics)
