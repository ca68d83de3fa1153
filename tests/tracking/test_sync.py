"""`track sync`, and senders in processes of their own: their imports, forks and kills."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from distdl.cli import track
from distdl.util.errors import UserError
from tests.tracking.tracked import Tracked, database, logger, runs_of

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


def in_processes(code: str, outputs: Path, *run_ids: str, exit_code: int = 0) -> str:
    """Runs senders at the same time; returns their stderr."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", IN_A_PROCESS + code, str(outputs)]
    started = [subprocess.Popen([*command, name], stderr=pipe, text=True) for name in run_ids]
    errors = "".join(process.communicate()[1] for process in started)
    assert {process.returncode for process in started} == {exit_code}, errors
    return errors


def test_two_runs_may_start_at_the_same_time_in_a_new_project(tmp_path) -> None:
    code = "journal.write_bytes(encode(1.0, 1, 1, {'x': 1.0}))\ncomponent.finish('SUCCEEDED')"
    out = tmp_path / "outputs"
    assert "fails" not in in_processes(code, out, "race/0", "race/1")
    runs = runs_of(database(out), "race")
    assert sorted((r.info.run_name, r.data.metrics["x"]) for r in runs) == [("0", 1.0), ("1", 1.0)]


def test_a_step_does_not_wait_for_an_import(tmp_path) -> None:
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
    in_processes(code, tmp_path / "outputs", "late/r")
    (run,) = runs_of(database(tmp_path / "outputs"), "late")
    assert run.data.metrics == {"x": 1.0}


def test_a_data_loader_may_fork_while_mlflow_is_being_imported(tmp_path) -> None:
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
    in_processes(code, tmp_path / "outputs", "fork/r")


def test_reading_and_syncing_need_no_torch() -> None:
    code = (
        "import sys; import distdl.cli.track, distdl.cli.report, distdl.runs.records;"
        "import distdl.tracking.delivery, distdl.tracking.mlflow;"
        "sys.exit(str({'torch', 'lightning', 'mlflow', 'matplotlib'} & sys.modules.keys() or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""


def test_refusals_of_sync(tmp_path) -> None:
    Tracked(tmp_path, "e/untracked", components={}).finish()
    away = logger(tracking_uri="http://me:pw@127.0.0.1:9", flush_timeout=0)
    Tracked(tmp_path, "e/secret", components={"mlflow": away}).tracking.finish("FAILED")
    for folder, path, fragment in (
        ("nothing", "", "there is no such folder"),
        ("", "", r"is not a run(.|\n)*e/untracked"),
        ("e/untracked", "", "was not tracked in MLflow"),
        ("e/secret", "/tracking/mlflow.json", "set MLFLOW_TRACKING_URI"),
    ):
        with pytest.raises(UserError, match=fragment) as error:
            track.main(["sync", str(tmp_path / folder)])
        assert error.value.problems[0].path == f"{tmp_path / folder}{path}"


def test_sync_of_a_running_run_leaves_it_alone(outputs, capsys) -> None:
    tracked = Tracked(outputs, "active/r")
    tracked.connected()  # under the lock, which another process respects
    code = "import sys; from distdl.cli.track import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "sync", str(tracked.folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "still active" in done.stdout) == (0, True), done
    tracked.finish()
    assert tracked.sync() == 0
    assert "the run is complete" in capsys.readouterr().out


def test_sync_ends_a_run_that_was_killed(outputs) -> None:
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
    in_processes(code, outputs, "killed/r", exit_code=-signal.SIGKILL)
    (run,) = runs_of(database(outputs), "killed")
    assert run.info.status == "RUNNING"
    assert track.main(["sync", str(outputs / "killed/r")]) == 0
    (run,) = runs_of(database(outputs), "killed")
    assert run.info.status == "KILLED" and run.data.metrics == {"x": 1.0}
    stored = outputs / "mlflow-artifacts" / run.info.run_id / "artifacts/notes"
    assert [f.read_text() for f in stored.iterdir()] == ["new"] and run.data.params["lr"] == "0.1"


def test_sync_of_a_foreign_run_sends_no_file_from_elsewhere(outputs) -> None:
    tracked = Tracked(outputs, "foreign/r")
    tracked.finish()
    mine, kept = outputs / "mine", tracked.folder / "tracking/artifacts"
    mine.mkdir()
    (mine / "private.txt").write_text("a private file")
    (kept / "own.txt").write_text("of the run")
    (kept / "link.txt").symlink_to(mine / "private.txt")
    (kept / "folder").symlink_to(mine)
    for _ in range(2):
        assert tracked.sync() == 0
        assert tracked.artifacts() == ["config.yaml", "own.txt", "packages.txt"]
        assert (mine / "private.txt").exists()  # what is sent from there is deleted
        shutil.rmtree(kept, ignore_errors=True)
        kept.unlink(missing_ok=True)
        kept.symlink_to(mine)
