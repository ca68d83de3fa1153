"""Answers that never change, over HTTP from a server that is none, and from damaged databases."""

import contextlib
import http.server
import sqlite3
import threading

import pytest

from distdl.cli import track
from distdl.tracking.mlflow import MLflowLogger
from distdl.tracking.outbox import Outbox
from tests.tracking.conftest import Tracked, logger
from tests.waiting import until

QUOTA = b'{"error_code": "RESOURCE_EXHAUSTED", "message": "10000 runs"}'
NAME = b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "must be an absolute path"}'


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        status, body = self.server.answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.uri = f"http://127.0.0.1:{server.server_port}"
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "what", "remedy"),
    [
        (401, b"You are not authenticated", "accept the credentials", "MLFLOW_TRACKING_TOKEN"),
        (403, b"Permission denied", "does not permit this", "ask its administrator"),
        (400, QUOTA, "its quota is used up", "ask its administrator"),
        (507, b"full", "its quota is used up", "ask its administrator"),
        (404, b"<html>not here</html>", "answer like an MLflow server", "MLFLOW_TRACKING_URI"),
        (200, b"<html>log in</html>", "answer like an MLflow server", "MLFLOW_TRACKING_URI"),
        (200, b"{}", "answer like an MLflow server", "MLFLOW_TRACKING_URI"),
        (400, NAME, "absolute path", "tracking.mlflow.experiment_name=NAME"),
        (503, b"busy", None, None),
        (429, QUOTA, None, None),
        (500, b"oops", None, None),
    ],
)
def test_answers_of_a_server(
    server, tmp_path, caplog, capsys, monkeypatch, status, body, what, remedy
):
    monkeypatch.setattr("distdl.tracking.sync.WAITS", ())
    server.answer = status, body
    component = logger(tracking_uri=server.uri, flush_timeout=0 if what is None else 60)
    tracked = Tracked(tmp_path, components={"mlflow": component})
    tracked.log({"x": 1.0}, 1)
    until(lambda: component._failures)
    sender = component._thread
    tracked.finish()
    component._wake.set()
    sender.join()
    assert tracked.sync() == 1
    for text in (caplog.text, capsys.readouterr().err):
        assert ("is back" in text) == (what is None)
        assert what is None or (what in text and remedy in text)
        assert ("or a quota is used up" in text) == (status == 429)
    assert what is None or caplog.text.count(what) == 1
    assert [record.step for record in tracked.records()] == [1]
    assert Outbox(tracked.folder).state.status is not None, "it is still to be sent"


def test_databases_that_cannot_be_used(tmp_path, caplog):
    for name, make, told in (
        ("text", lambda path: path.write_text("no database" * 100), "is damaged"),
        ("newer", newer, "was written by a newer MLflow"),
    ):
        make(tmp_path / f"{name}.db")
        component = logger(tracking_uri=f"sqlite:///{tmp_path}/{name}.db")
        Tracked(tmp_path, f"e/{name}", components={"mlflow": component}).finish()
        assert told in caplog.text
        assert "is back" not in caplog.text
        caplog.clear()


def newer(path):
    with contextlib.closing(sqlite3.connect(path)) as made, made:
        made.execute("CREATE TABLE runs (run_uuid TEXT)")
        made.execute("INSERT INTO runs VALUES ('somebody')")
        made.execute("CREATE TABLE experiments (experiment_id INTEGER)")
        made.execute("CREATE TABLE alembic_version (version_num TEXT)")
        made.execute("INSERT INTO alembic_version VALUES ('ffffffffffff')")


def test_names_of_experiments_are_checked_before_the_start():
    for name in (True, [1], " ", "x" * 501):
        (problem,) = MLflowLogger.check({"experiment_name": name})
        assert problem.path == "experiment_name"
    assert not [*MLflowLogger.check({"experiment_name": 2024})]
    assert logger(experiment_name=2024).experiment_name == "2024"
    with pytest.raises(SystemExit):
        track.main(["sync", "--help"])
