"""The follower and `track sync`, against real databases."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from distdl.cli import track
from distdl.tracking import start_tracking
from distdl.tracking.client import metric_name, put_aside
from distdl.tracking.mlflow import how_to_open
from distdl.tracking.outbox import Outbox, redact
from distdl.util.errors import UserError
from tests.tracking.tracked import (
    client,
    connected,
    database,
    delivered,
    info_of,
    logger,
    owed,
    runs_of,
    wait_until,
)


def test_one_mlflow_run_across_attempts(outputs: Path, caplog: pytest.LogCaptureFixture) -> None:
    for attempt in (1, 2):
        changed = {"optimizer.lr": 0.2} if attempt == 2 else {}
        info = info_of(
            outputs,
            "attempts/r",
            attempt,
            params={"lr": 0.1 * attempt, "model": "x" * 600, f"new{attempt}": 1},
            changed=changed,
            tags={"team": "vision", "git.commit": "abc123"},
        )
        tracking = start_tracking(info, {"mlflow": logger()})
        for step in range(3):
            tracking.journal.log_metrics({"train/loss": 1.0 / (step + 1)}, step + 2 * attempt)
        connected(tracking)
        tracking.finish("PREEMPTED" if attempt == 1 else "SUCCEEDED")
        (run,) = runs_of(database(outputs), "attempts")
        assert run.info.status == ("KILLED" if attempt == 1 else "FINISHED")
    assert run.info.run_name == "r"
    assert run.data.params == {"lr": "0.1", "model": "x" * 500, "new1": "1", "new2": "1"}
    assert "refuses" not in caplog.text
    tags = run.data.tags
    assert tags["distdl.run_id"] == "attempts/r" and tags["distdl.attempts"] == "2"
    assert tags["distdl.runs.attempt.1.state"] == "PREEMPTED"
    assert tags["distdl.runs.attempt.2.state"] == "SUCCEEDED"
    assert json.loads(tags["distdl.runs.attempt.2.changed"]) == {"optimizer.lr": 0.2}
    assert tags["mlflow.source.git.commit"] == "abc123" and tags["team"] == "vision"
    assert delivered(database(outputs), run.info.run_id) == owed(info)
    names = [a.path for a in client(database(outputs)).list_artifacts(run.info.run_id)]
    assert names == ["attempts", "config.yaml", "packages.txt"]
    stored = outputs / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert (stored / "config.yaml").read_bytes() == (info.run_dir / "config.yaml").read_bytes()
    assert "torch==" in (stored / "packages.txt").read_text()
    assert not any(Path.cwd().iterdir()), "MLflow wrote into the current folder"


def test_a_lost_state_file_finds_the_run_again(outputs: Path) -> None:
    for attempt in (1, 2):
        info = info_of(outputs, "lost/r", attempt)
        tracking = start_tracking(info, {"mlflow": logger()})
        tracking.journal.log_metrics({"x": 1.0}, attempt)
        tracking.finish("FAILED")
        (info.run_dir / "tracking/mlflow.json").unlink()
    (run,) = runs_of(database(outputs), "lost")
    assert delivered(database(outputs), run.info.run_id) == owed(info)
    assert run.info.status == "FAILED"
    # But a new run that happens to have the same name is another run.
    tracking = start_tracking(info_of(outputs, "lost/r"), {"mlflow": logger()})
    tracking.finish("SUCCEEDED")
    assert len(runs_of(database(outputs), "lost")) == 2


def test_a_batch_that_is_sent_again_is_not_doubled(outputs: Path) -> None:
    info = info_of(outputs, "again/r")
    tracking = start_tracking(info, {"mlflow": logger()})
    for step in range(500):
        tracking.journal.log_metrics(
            {"a": float(step), "b": math.nan, "c": math.inf, "acc@1": 1.0}, step
        )
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "again")
    assert len(delivered(database(outputs), run.info.run_id)) == 2000
    (info.run_dir / "tracking/mlflow-node0.json").unlink()  # killed before the cursor was written
    assert track.main(["sync", str(info.run_dir)]) == 0
    assert delivered(database(outputs), run.info.run_id) == owed(info)


def test_a_refused_point_does_not_hold_up_the_others(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("distdl.tracking.delivery.metric_name", lambda name: name)
    info = info_of(outputs, "refused/r")
    tracking = start_tracking(info, {"mlflow": logger()})
    for step in range(20):
        tracking.journal.log_metrics({"good": 1.0, **({"bad@": 1.0} if step == 7 else {})}, step)
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "refused")
    assert [p[2] for p in delivered(database(outputs), run.info.run_id)] == list(range(20))
    assert sum("refuses the metric bad@" in r.message for r in caplog.records) == 1


def test_a_server_that_takes_few_parameters_gets_the_first(
    outputs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As Azure ML does: it refuses a request that would make too many of a run."""
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    log_batch, asked = MlflowClient.log_batch, []

    def limited(self: Any, run_id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> Any:
        there = len(self.get_run(run_id).data.params) if params else 0
        asked.extend(params and [len(params)])
        if there + len(params) > 130:
            raise MlflowException("FieldName=Parameters, Limit=130", error_code=1000)
        return log_batch(self, run_id, metrics=metrics, params=params, tags=tags)

    monkeypatch.setattr(MlflowClient, "log_batch", limited)
    info = info_of(outputs, "many/r", name="lr=0.1", params={f"p.{i}": i for i in range(300)})
    tracking = start_tracking(info, {"mlflow": logger()})
    connected(tracking)
    tracking.describe({"parameters.total": 5, "api_token": "canary"})
    tracking.journal.log_metrics({"x": 1.0}, 1)
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "many")
    assert {f"p.{i}" for i in range(130)} == {*run.data.params}
    assert (run.info.run_name, run.info.status) == ("lr=0.1", "FINISHED")
    assert len(delivered(database(outputs), run.info.run_id)) == 1 and len(asked) < 60
    said = [r.message for r in caplog.records if "refuses" in r.message]
    assert "(p.130, p.131, p.132, ...); the artifact config.yaml has" in said[0]
    assert len(said) <= 2  # what is told later is refused later
    command, page = tracking.how_to_open()
    assert command == f"mlflow ui --backend-store-uri {database(outputs)}"
    assert page.endswith(f":5000/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}")


def test_a_database_that_was_half_made_is_kept_and_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import sqlite3

    def broken(run: str = "") -> Path:
        path = tmp_path / "mlflow.db"
        with contextlib.closing(sqlite3.connect(path)) as made, made:
            made.execute("CREATE TABLE runs (run_uuid TEXT)")
            made.execute("CREATE TABLE alembic_version (version_num TEXT)")
            made.execute("INSERT INTO alembic_version VALUES ('89d4b8295536')")
            made.executemany("INSERT INTO runs VALUES (?)", [(run,)] if run else [])
        os.utime(path, (0, 0))
        return path

    kept = broken(run="somebody's")
    assert not put_aside(database(tmp_path), 0) and kept.is_file()
    kept.unlink()
    broken()
    tracking = start_tracking(info_of(tmp_path, "half/r"), {"mlflow": logger()})
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(tmp_path), "half")
    assert run.info.status == "FINISHED"
    assert len([*tmp_path.glob("mlflow.db.half-made-*")]) == 1
    assert "it is kept as mlflow.db.half-made-" in caplog.text


def test_an_azure_job_names_its_page_in_the_studio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox = Outbox(tmp_path)
    outbox.state.run_id, outbox.state.experiment_id = "brave_cup", "1"
    assert how_to_open("azureml://x", outbox) == ["azureml://x"]
    for name in ("SUBSCRIPTION", "RESOURCEGROUP", "WORKSPACE_NAME"):
        monkeypatch.setenv(f"AZUREML_ARM_{name}", name.lower())
    (page,) = how_to_open("azureml://x", outbox)
    assert page == (
        "https://ml.azure.com/runs/brave_cup?wsid=/subscriptions/subscription"
        "/resourcegroups/resourcegroup/workspaces/workspace_name"
    )


@pytest.mark.parametrize(
    "name", ["acc@1", "a//b", "/x", "../x", "a/../b", "x" * 300, "loss[0]", "@"]
)
def test_metric_names_are_made_acceptable(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(metric_name(name))


def test_a_step_does_not_wait_for_the_server(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    real, asked, answers = MlflowClient.log_batch, threading.Event(), threading.Event()

    def waits(self: Any, *args: Any, **kw: Any) -> Any:
        asked.set()
        answers.wait()
        return real(self, *args, **kw)

    monkeypatch.setattr(MlflowClient, "log_batch", waits)
    tracking = start_tracking(info_of(outputs, "slow/r"), {"mlflow": logger()})
    tracking.journal.log_metrics({"x": 0.0}, 0)
    assert asked.wait(120)
    for step in range(1, 1500):  # what these cost is benchmarks/overhead.py's
        tracking.journal.log_metrics({"x": float(step)}, step)
    answers.set()
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "slow")
    assert len(delivered(database(outputs), run.info.run_id)) == 1500


IN_A_PROCESS = """
import os, sys, time
from pathlib import Path
from distdl.tracking import RunInfo
from distdl.tracking.mlflow import MLflowLogger
from distdl.runs.records import encode, journal_path
outputs, run_id = Path(sys.argv[1]), sys.argv[2]
run = outputs / run_id
info = RunInfo(run, run_id, 1, 0, 0, 0, 1, outputs, run_id.split("/")[0])
component = MLflowLogger(interval=0.1)
component.start(info)
journal = journal_path(run)
journal.parent.mkdir(parents=True, exist_ok=True)
"""  # without Lightning, whose import would take most of the time


def in_a_process(code: str, outputs: Path, run_id: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", IN_A_PROCESS + code]
    return subprocess.Popen([*command, str(outputs), run_id], stderr=subprocess.PIPE, text=True)


def test_two_runs_may_start_at_the_same_time_in_a_new_project(tmp_path: Path) -> None:
    code = "journal.write_bytes(encode(1.0, 1, 1, {'x': 1.0}))\ncomponent.finish('SUCCEEDED')"
    out = tmp_path / "outputs"
    started = [in_a_process(code, out, f"race/{i}") for i in range(2)]
    said = [p.communicate()[1] for p in started]
    assert [p.returncode for p in started] == [0, 0], said
    assert "fails" not in "".join(said), said
    found = runs_of(database(out), "race")
    assert sorted((r.info.run_name, r.data.metrics["x"]) for r in found) == [("0", 1.0), ("1", 1.0)]


def test_a_step_does_not_wait_for_an_import(tmp_path: Path) -> None:
    """While it loads a library, the sender's thread holds the interpreter."""
    code = """
component.settle()
before = set(sys.modules)
assert "mlflow" in before
journal.write_bytes(encode(1.0, 1, 1, {"x": 1.0}))
component.finish("SUCCEEDED")
late = [name for name in sys.modules if name not in before]
late = [name for name in late if not name.startswith("mlflow.store.db.")]  # scripts of Alembic's
sys.exit(f"imported while steps ran: {late}" if late else 0)
"""
    sending = in_a_process(code, tmp_path / "outputs", "late/r")
    said = sending.communicate()[1]
    assert sending.returncode == 0, said
    (run,) = runs_of(database(tmp_path / "outputs"), "late")
    assert run.data.metrics == {"x": 1.0}


def test_a_data_loader_may_fork_while_mlflow_is_being_imported(tmp_path: Path) -> None:
    """Else its worker waits for ever on the import lock of what mlflow was importing."""
    code = """
while "mlflow" not in sys.modules:
    time.sleep(0.001)
child = os.fork()
if child == 0:
    import mlflow
    os._exit(0)
end = time.time() + 200
while os.waitpid(child, os.WNOHANG) == (0, 0):
    if time.time() > end:
        os.kill(child, 9)
        sys.exit("the child hangs")
    time.sleep(0.05)
"""
    forking = in_a_process(code, tmp_path / "outputs", "fork/r")
    said = forking.communicate()[1]
    assert forking.returncode == 0, said


def test_the_jobs_own_run_wins(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = database(outputs)
    start_tracking(info_of(outputs, "other/r"), {"mlflow": logger()}).finish("SUCCEEDED")
    mlflow = client(uri)
    experiment = mlflow.get_experiment_by_name("other").experiment_id
    jobs = [mlflow.create_run(experiment).info.run_id for _ in range(2)]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for attempt, job in enumerate(jobs, 1):
        monkeypatch.setenv("MLFLOW_RUN_ID", job)
        component = logger()
        monkeypatch.delenv("MLFLOW_RUN_ID")  # as mlflow.start_run() does
        tracking = start_tracking(info_of(outputs, "job/r", attempt), {"mlflow": component})
        tracking.journal.log_metrics({"x": 1.0}, attempt)
        tracking.finish("SUCCEEDED")
        run = mlflow.get_run(job)
        assert run.data.tags["distdl.run_id"] == "job/r"
        assert len(delivered(uri, job)) == attempt  # a later job shows the whole history
        assert run.info.status == "RUNNING"  # the platform ends it
    assert run.data.tags["distdl.previous_job"] == jobs[0]
    assert mlflow.get_experiment_by_name("job") is None


def test_a_password_in_the_address_is_never_written(tmp_path: Path) -> None:
    canary = "s3cr3t-canary"
    uri = f"http://me:{canary}@127.0.0.1:9/x?token={canary}"
    component = logger(tracking_uri=uri, flush_timeout=0.5)
    info = info_of(tmp_path, "e/r")
    tracking = start_tracking(info, {"mlflow": component})
    wait_until(lambda: component._failures > 0)
    tracking.finish("SUCCEEDED")
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or canary not in path.read_text(), path
    assert canary not in "".join(tracking.how_to_open())
    with pytest.raises(UserError, match="set MLFLOW_TRACKING_URI"):
        track.main(["sync", str(info.run_dir)])
    assert redact(database(tmp_path)) == database(tmp_path)
    token = "gh" + "p_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7cF0hJ3kL6"
    assert redact(f"https://{token}@host/x") == "https://***@host/x"
    assert redact("postgresql://me@host/db") == "postgresql://me@host/db"


# --- `track sync` ---


def test_sync_says_what_is_wrong_with_the_run(tmp_path: Path, outputs: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        track.main(["sync", str(tmp_path / "nothing")])
    info = info_of(tmp_path, "e/untracked")
    with pytest.raises(UserError, match=r"is not a run(.|\n)*e/untracked"):
        track.main(["sync", str(tmp_path)])
    with pytest.raises(UserError, match=r"was not tracked in MLflow(.|\n)*distdl report"):
        track.main(["sync", str(info.run_dir)])


def test_sync_of_a_running_run_leaves_it_alone(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = info_of(outputs, "active/r")
    tracking = start_tracking(info, {"mlflow": logger()})
    wait_until((info.run_dir / "tracking/mlflow-node0.lock").is_file)
    time.sleep(0.2)
    code = "import sys; from distdl.cli.track import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "sync", str(info.run_dir)], capture_output=True, text=True
    )
    assert (done.returncode, "still active" in done.stdout) == (0, True), done
    tracking.finish("SUCCEEDED")
    assert track.main(["sync", str(info.run_dir)]) == 0
    assert "the run is complete" in capsys.readouterr().out


def test_sync_ends_a_run_that_was_killed(outputs: Path) -> None:
    code = """
while not component.delivery.run_id:
    time.sleep(0.05)
component.delivery.send = lambda ended: True  # killed before the next delivery
time.sleep(0.5)
outbox = component.delivery.outbox
outbox.owe("params", {"lr": 0.1})
for text in ("old", "new"):
    (run / "note.txt").write_text(text)
    outbox.keep(run / "note.txt", "notes/note.txt")
(run / "note.txt").unlink()
journal.write_bytes(encode(1.0, 1, 1, {"x": 1.0}))
os.kill(os.getpid(), 9)
"""
    killed = in_a_process(code, outputs, "killed/r")
    said = killed.communicate()[1]
    assert killed.returncode == -signal.SIGKILL, said
    (run,) = runs_of(database(outputs), "killed")
    assert run.info.status == "RUNNING"
    assert track.main(["sync", str(outputs / "killed/r")]) == 0
    (run,) = runs_of(database(outputs), "killed")
    assert run.info.status == "KILLED" and run.data.metrics == {"x": 1.0}
    stored = outputs / "mlflow-artifacts" / run.info.run_id / "artifacts/notes"
    assert [f.read_text() for f in stored.iterdir()] == ["new"] and run.data.params["lr"] == "0.1"


def test_sync_of_a_foreign_run_sends_no_file_from_elsewhere(outputs: Path) -> None:
    info = info_of(outputs, "foreign/r")
    start_tracking(info, {"mlflow": logger()}).finish("SUCCEEDED")
    mine = outputs / "mine"
    mine.mkdir()
    (mine / "private.txt").write_text("a private file")
    kept = info.run_dir / "tracking/artifacts"
    (kept / "own.txt").write_text("of the run")
    (kept / "link.txt").symlink_to(mine / "private.txt")
    (kept / "folder").symlink_to(mine)
    for _ in range(2):
        assert track.main(["sync", str(info.run_dir)]) == 0
        (run,) = runs_of(database(outputs), "foreign")
        sent = client(database(outputs)).list_artifacts(run.info.run_id)
        assert [file.path for file in sent] == ["config.yaml", "own.txt", "packages.txt"]
        assert (mine / "private.txt").exists()  # what is sent from there is deleted
        shutil.rmtree(kept, ignore_errors=True)
        kept.unlink(missing_ok=True)
        kept.symlink_to(mine)


def test_reading_and_syncing_need_no_torch() -> None:
    code = (
        "import sys; import distdl.cli.track, distdl.cli.report, distdl.runs.records;"
        "import distdl.tracking.delivery, distdl.tracking.mlflow;"
        "print([m for m in ('torch', 'lightning', 'mlflow', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done
