"""What MLflow receives of a run, in real databases, live or by `track sync`."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from distdl.cli import track
from distdl.tracking import schema
from distdl.tracking.client import set_aside
from distdl.tracking.mlflow import MLflowLogger, how_to_open
from distdl.tracking.outbox import Outbox, redact
from distdl.util.errors import UserError
from tests.tracking.conftest import Tracked, database, delivered, logger, runs_of
from tests.waiting import until

# Names that MLflow would refuse.
ODD = ("acc@1", "a//b", "/c", "../d", "a/../e", "x" * 300, "loss[0]", "@")


def test_one_mlflow_run_across_attempts(outputs, caplog):
    tags = {"team": "vision", "git.commit": "abc123"}
    ends = ({}, "PREEMPTED", "KILLED"), ({"optimizer.lr": 0.2}, "SUCCEEDED", "FINISHED")
    for attempt, (changed, ended, shown) in enumerate(ends, 1):
        params = {"lr": 0.1 * attempt, "model": "x" * 600, f"new{attempt}": 1}
        tracked = Tracked(outputs, "a/r", attempt, params=params, changed=changed, tags=tags)
        for step in range(3):
            tracked.log({"train/loss": 1.0 / (step + 1)}, step + 2 * attempt)
        tracked.log(dict.fromkeys(ODD, 1.0), 9)
        tracked.connected()
        run = tracked.finish(ended).run
        assert run.info.status == shown
        (tracked.folder / "tracking/mlflow.json").unlink()  # it is found again
    assert run.info.run_name == "r"
    assert run.data.params == {"lr": "0.1", "model": "x" * 500, "new1": "1", "new2": "1"}
    assert "refuses" not in caplog.text
    assert json.loads(run.data.tags["distdl.runs.attempt.2.changed"]) == {"optimizer.lr": 0.2}
    expected = {"team": "vision", "mlflow.source.git.commit": "abc123", "distdl.attempts": "2"}
    for attempt, state in (("1", "PREEMPTED"), ("2", "SUCCEEDED")):
        expected[f"distdl.runs.attempt.{attempt}.state"] = state
    assert run.data.tags.items() >= (expected | {"distdl.run_id": "a/r"}).items()
    assert tracked.delivered == tracked.owed
    assert tracked.artifacts() == ["attempts", "config.yaml", "packages.txt"]
    sent, own = (folder / "config.yaml" for folder in (tracked.stored, tracked.folder))
    assert sent.read_bytes() == own.read_bytes()
    assert "torch==" in (tracked.stored / "packages.txt").read_text()
    assert not any(Path.cwd().iterdir()), "MLflow wrote into the current folder"
    Tracked(outputs, "a/r", key="b" * 32).finish()
    assert len(runs_of(database(outputs), "a")) == 2, "a new run of the same name is another one"


def test_trials_are_children_of_their_study(outputs):
    """Of trials that are tracked at once, too: the study has one run."""
    study = {"distdl.study": "st/s", "distdl.study_key": "a" * 32}
    trials = [Tracked(outputs, f"st/s/{name}", tags=study) for name in ("one", "two")]
    ids = {each.finish("PRUNED").component.delivery.run_id for each in trials}
    runs = {run.info.run_id: run for run in runs_of(database(outputs), "st")}
    assert len(runs) == 3
    (parent,) = runs.keys() - ids
    assert runs[parent].info.run_name == "s"
    for number in ids:
        assert runs[number].data.tags["mlflow.parentRunId"] == parent
        assert runs[number].info.status == "FINISHED", "pruned is no failure"


def test_names_stay_apart_across_attempts(outputs, caplog):
    """Of metrics, parameters, tags and files; and of the runs of one name in two folders."""
    values = {
        "IoU<0.5": 0.2,
        "IoU>0.5": 0.8,
        "IoU_0.5": 0.5,
        f"{'x' * 300}1": 1,
        f"{'x' * 300}2": 2,
    }
    folder = Path("folder")
    folder.mkdir()
    (folder / "config.yaml").write_text("mine")
    for attempt in (1, 2):
        tracked = Tracked(outputs, "apart/r", attempt, params={"a<b": 1, "a>b": 2, "seed": 3})
        ours = tracked.loggers[0]
        tracked.log(values, attempt)
        ours.log_hyperparams({"seed": 4})
        for name in ("t<1", "t>1"):
            ours.experiment.set_tag(None, name, name)
        ours.experiment.log_artifacts(None, folder)
        tracked.connected()
        run = tracked.finish().run
    assert sorted(run.data.metrics.values()) == sorted(values.values())
    assert run.data.metrics["IoU_0.5"] == 0.5
    steps = {(name, step) for name, _, step in tracked.delivered}
    assert len(steps) == 2 * len(values), "each curve goes on in the second attempt"
    assert sorted(run.data.params.values()) == ["1", "2", "3", "4"]
    assert run.data.params["seed"] == "3"
    assert {"t<1", "t>1"} <= {*run.data.tags.values()}
    (mine,) = (name for name in tracked.artifacts() if name.startswith("config-"))
    assert (tracked.stored / mine).read_text() == "mine"
    assert (tracked.stored / "config.yaml").read_text() != "mine"
    for line in (
        "'IoU<0.5' is IoU_0.5-663209e0",
        "config.yaml describes the run",
        "parameter seed",
    ):
        assert line in caplog.text
    shared = {"mlflow": logger(tracking_uri=database(outputs))}
    other = Tracked(outputs / "other", "apart/r", 2, shared, key="b" * 32)
    other.connected()
    other.finish()
    assert len(runs_of(database(outputs), "apart")) == 2


def test_a_server_that_refuses_some_data_gets_the_rest(outputs, monkeypatch, caplog):
    """Azure ML refuses a request that would make too many parameters of a run."""
    log_batch = MlflowClient.log_batch
    asked = []

    def limited(self, run_id, metrics=(), params=(), tags=()):
        known = len(self.get_run(run_id).data.params) if params else 0
        asked.extend(params and [len(params)])
        if known + len(params) > 130 or any(point.key == "bad" for point in metrics):
            raise MlflowException("FieldName=Parameters, Limit=130", error_code=1000)
        return log_batch(self, run_id, metrics=metrics, params=params, tags=tags)

    monkeypatch.setattr(MlflowClient, "log_batch", limited)
    params = {f"p.{i}": i for i in range(300)}
    tracked = Tracked(outputs, "many/r", name="lr=0.1", params=params)
    tracked.connected()
    tracked.tracking.describe({"parameters.total": 5, "api_token": "canary"})
    for step in range(20):
        tracked.log({"good": 1.0, **({"bad": 1.0} if step in (7, 8) else {})}, step)
    run = tracked.finish().run
    assert {f"p.{i}" for i in range(130)} == {*run.data.params}
    assert (run.info.run_name, run.info.status) == ("lr=0.1", "FINISHED")
    assert [step for _, _, step in tracked.delivered] == [*range(20)]
    assert len(asked) < 60
    refused = [r.message for r in caplog.records if "refuses" in r.message]
    assert sum("the metric bad" in message for message in refused) == 1
    assert sum("(p.130, p.131, p.132, ...)" in message for message in refused) == 1
    assert len(refused) <= 3, "parameters that come later are refused later"
    command, page = tracked.tracking.how_to_open()
    assert command == f"mlflow ui --backend-store-uri {database(outputs)}"
    assert page.endswith(f":5000/#/experiments/{run.info.experiment_id}/runs/{run.info.run_id}")


def test_an_incomplete_database_is_renamed_and_created_again(tmp_path, caplog):
    path = tmp_path / "mlflow.db"
    for runs in (["somebody's"], []):
        path.unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(path)) as made, made:
            made.execute("CREATE TABLE runs (run_uuid TEXT)")
            made.execute("CREATE TABLE alembic_version (version_num TEXT)")
            made.execute("INSERT INTO alembic_version VALUES ('89d4b8295536')")
            made.executemany("INSERT INTO runs VALUES (?)", [(run,) for run in runs])
        os.utime(path, (0, 0))
        if runs:
            assert not set_aside(database(tmp_path), 0)
            assert path.is_file()
    assert Tracked(tmp_path).finish().run.info.status == "FINISHED"
    (kept,) = tmp_path.glob("mlflow.db.incomplete-*")
    assert f"it is renamed to {kept.name}" in caplog.text


def test_an_azure_job_has_its_own_run_and_page(outputs, monkeypatch):
    uri = database(outputs)
    mlflow = MlflowClient(database(outputs))
    experiment = mlflow.create_experiment("other")
    jobs = [mlflow.create_run(experiment).info.run_id for _ in range(2)]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for attempt, job in enumerate(jobs, 1):
        monkeypatch.setenv("MLFLOW_RUN_ID", job)
        component = logger()
        monkeypatch.delenv("MLFLOW_RUN_ID")  # as mlflow.start_run() does
        tracked = Tracked(outputs, "job/r", attempt, {"mlflow": component})
        tracked.log({"x": 1.0}, attempt)
        tracked.finish()
        run = mlflow.get_run(job)
        assert run.data.tags["distdl.run_id"] == "job/r"
        assert len(delivered(uri, job)) == attempt, "a later job shows the complete history"
        assert run.info.status == "RUNNING", "the platform ends it"
    assert run.data.tags["distdl.previous_job"] == jobs[0]
    assert mlflow.get_experiment_by_name("job") is None
    assert how_to_open("azureml://x", Outbox(tracked.folder)) == ["azureml://x"]
    for name in ("SUBSCRIPTION", "RESOURCEGROUP", "WORKSPACE_NAME"):
        monkeypatch.setenv(f"AZUREML_ARM_{name}", name.lower())
    workspace = "/subscriptions/subscription/resourcegroups/resourcegroup/workspaces/workspace_name"
    page = f"https://ml.azure.com/runs/{jobs[1]}?wsid={workspace}"
    assert how_to_open("azureml://x", Outbox(tracked.folder)) == [page]


def test_a_password_in_the_address_is_never_written(tmp_path, caplog):
    canary = "s3cr3t-canary"
    uri = f"http://me:{canary}@127.0.0.1:9/x?token={canary}"
    tracked = Tracked(tmp_path, components={"mlflow": logger(tracking_uri=uri, flush_timeout=0.5)})
    until(lambda: "fails; training" in caplog.text)
    tracked.finish()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or canary not in path.read_text(), path
    assert canary not in "".join(tracked.tracking.how_to_open())
    token = "gh" + "p_" + "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7cF0hJ3kL6"
    assert redact(f"https://{token}@host/x") == "https://***@host/x"
    assert redact("postgresql://me@host/db") == "postgresql://me@host/db"


def test_what_is_logged_again_while_it_is_being_sent_is_sent_again(outputs, monkeypatch):
    real = MlflowClient.log_artifact
    texts = ["newer", "newest"]

    def slow(self, run_id, path, *args):
        real(self, run_id, path, *args)
        if path.endswith("latest.txt") and texts:
            mlflow.log_text(None, texts.pop(0), "latest.txt")

    tracked = Tracked(outputs, "slow/r")
    mlflow = tracked.loggers[0].experiment
    monkeypatch.setattr(MlflowClient, "log_artifact", slow)
    mlflow.log_text(None, "old", "latest.txt")
    until(lambda: not texts, 60)
    tracked.finish()
    assert (tracked.stored / "latest.txt").read_text() == "newest"


def test_the_pictures_of_a_validation_are_sent(outputs):
    folder = Path("pictures")
    folder.mkdir()
    tracked = Tracked(outputs, "drawn/r")
    for content in (b"of epoch 1", b"of epoch 2"):
        (folder / "confusion.png").write_bytes(content)
        tracked.loggers[0].send_folder(folder, "attempts/002/pictures")
    tracked.finish()
    sent = tracked.stored / "attempts/002/pictures/confusion.png"
    assert sent.read_bytes() == b"of epoch 2"


def test_a_full_disk_costs_a_file_but_no_metric_and_not_the_training(outputs, caplog):
    Path("large.bin").write_bytes(os.urandom(10_000))
    tracked = Tracked(outputs, "full/r")
    ours = tracked.loggers[0]
    assert ours.run_id
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # bytes of a file
    try:
        ours.experiment.log_artifact(None, "large.bin")
        ours.log_hyperparams({f"many{i}": "x" * 400 for i in range(20)})  # their file is as large
        for step in range(100):
            tracked.log({"x": float(step)}, step)
            tracked.journal.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ours.experiment.log_artifact(None, "large.bin", "later")
    assert len(tracked.finish().run.data.params) == 20
    assert tracked.artifacts() == ["config.yaml", "later", "packages.txt"]
    not_sent = f"large.bin cannot be copied for MLflow and is not sent: [Errno {errno.EFBIG}]"
    assert not_sent in caplog.text
    assert [record.step for record in tracked.records()] == [*range(100)]
    assert tracked.delivered == tracked.owed
    for fragment in ("metrics.jsonl cannot be written", "metrics.jsonl can be written again"):
        assert caplog.text.count(fragment) == 1


# Senders in processes of their own (their imports, forks and kills), and `track sync`.
SENDER = """
import os, signal, sys, time
from pathlib import Path
from distdl.tracking import RunInfo
from distdl.tracking.mlflow import MLflowLogger
from distdl.runs.records import encode, journal_path
outputs, run_id = Path(sys.argv[1]), sys.argv[2]
run = outputs / run_id
component = MLflowLogger(interval=0.1)
component.start(RunInfo(run, run_id, 1, 0, 0, 0, 1, outputs, run_id.split("/")[0]))
journal = journal_path(run)
journal.parent.mkdir(parents=True, exist_ok=True)
"""


def in_processes(code, outputs, *run_ids, exit_code=0):
    """Runs senders at the same time; returns their stderr."""
    command = [sys.executable, "-c", SENDER + code, str(outputs)]
    pipe = {"stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([*command, name], **pipe) for name in run_ids]
    errors = "".join(process.communicate()[1] for process in started)
    assert {process.returncode for process in started} == {exit_code}, errors
    return errors


def test_two_runs_start_at_the_same_time_and_nothing_waits_for_an_import(tmp_path):
    """In a new project. A data loader may fork meanwhile, whose worker would wait for ever on the
    import lock; and a step would wait for the sender's thread, which holds the interpreter."""
    code = """
import distdl.cli.track, distdl.cli.report
while "mlflow" not in sys.modules:
    time.sleep(0.001)
child = os.fork()
if not child:
    signal.alarm(200)
    import mlflow
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0, "the child hangs"
component.settle()
before = set(sys.modules)
assert "mlflow" in before and not before & {"torch", "lightning"}
journal.write_bytes(encode(1.0, 1, 1, {"x": 1.0}))
component.finish("SUCCEEDED")
late = [name for name in sys.modules if name not in before]
late = [name for name in late if not name.startswith("mlflow.store.db.")]  # scripts of Alembic's
sys.exit(f"imported while steps ran: {late}" if late else 0)
"""
    out = tmp_path / "outputs"
    assert "fails" not in in_processes(code, out, "race/0", "race/1")
    runs = runs_of(database(out), "race")
    assert sorted((r.info.run_name, r.data.metrics["x"]) for r in runs) == [("0", 1.0), ("1", 1.0)]


def test_refusals_of_sync(tmp_path):
    Tracked(tmp_path, "e/untracked", components={}).finish()
    away = logger(tracking_uri="http://me:pw@127.0.0.1:9", flush_timeout=0)
    Tracked(tmp_path, "e/secret", components={"mlflow": away}).finish("FAILED")
    for folder, path, fragment in (
        ("nothing", "", "there is no such folder"),
        ("", "", r"is not a run(.|\n)*e/untracked"),
        ("e/untracked", "", "was not tracked in MLflow"),
        ("e/secret", "/tracking/mlflow.json", "set MLFLOW_TRACKING_URI"),
    ):
        with pytest.raises(UserError, match=fragment) as error:
            track.main(["sync", str(tmp_path / folder)])
        assert error.value.problems[0].path == f"{tmp_path / folder}{path}"


def test_sync_ends_a_run_that_was_killed(outputs):
    code = """
while not component.delivery.run_id:
    time.sleep(0.05)
component.delivery.send = lambda ended: True  # killed before the next delivery
time.sleep(0.5)
journal.write_bytes(encode(1.0, 1, 1, {"x": 1.0}))
os.kill(os.getpid(), 9)
"""
    in_processes(code, outputs, "killed/r", exit_code=-signal.SIGKILL)
    (run,) = runs_of(database(outputs), "killed")
    assert run.info.status == "RUNNING"
    assert track.main(["sync", str(outputs / "killed/r")]).exit_code == 0
    (run,) = runs_of(database(outputs), "killed")
    assert run.info.status == "KILLED"
    assert run.data.metrics == {"x": 1.0}


def test_sync_leaves_a_running_run_alone_and_sends_no_file_from_elsewhere(outputs, capsys):
    tracked = Tracked(outputs, "foreign/r")
    tracked.connected()  # under the lock, which another process respects
    code = "import sys; from distdl.cli.track import main; sys.exit(main(sys.argv[1:]).exit_code)"
    command = [sys.executable, "-c", code, "sync", str(tracked.folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, "still active" in done.stdout) == (0, True), done
    assert tracked.finish().sync() == 0
    assert "Nothing was left to send" in capsys.readouterr().out
    mine = outputs / "mine"
    kept = tracked.folder / "tracking/artifacts"
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


def test_a_deleted_experiment_is_named_with_both_remedies(outputs, caplog, capsys):
    uri = database(outputs)
    mlflow = MlflowClient(uri)
    Tracked(outputs, "bin/first").finish()
    number = mlflow.get_experiment_by_name("bin").experiment_id
    mlflow.delete_experiment(number)
    tracked = Tracked(outputs, "bin/second")
    tracked.log({"x": 1.0}, 1)
    until(lambda: "was deleted" in caplog.text)
    tracked.finish()
    restore = f"mlflow experiments restore --experiment-id {number}"
    for fragment in (restore, "tracking.mlflow.experiment_name=NAME", "once that is done"):
        assert fragment in caplog.text
    assert caplog.text.count("was deleted") == 1
    assert "server is back" not in caplog.text
    assert tracked.sync() == 1
    error = capsys.readouterr().err
    assert restore in error
    assert "--experiment NAME" in error
    assert "is back" not in error
    node = {"config": {"output_dir": str(outputs), "experiment_name": "bin"}, "local": True}
    (problem,) = MLflowLogger.check({}, {**node, "new": True})
    assert problem.path == "experiment_name"
    assert restore in problem.remedy
    assert not [*MLflowLogger.check({}, {**node, "new": False})]
    assert track.main(["sync", str(tracked.folder), "--experiment", "elsewhere"]).exit_code == 0
    (run,) = runs_of(uri, "elsewhere")
    assert run.data.metrics == {"x": 1.0}
    done = subprocess.run(
        [sys.executable, "-m", *restore.split()],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert not [*MLflowLogger.check({}, {**node, "new": True})]


def test_a_run_that_is_gone_is_named(outputs, caplog):
    tracked = Tracked(outputs, "gone/r")
    tracked.connected()
    tracked.finish()
    MlflowClient(database(outputs)).delete_run(tracked.run.info.run_id)
    again = Tracked(outputs, "gone/r", 2)
    again.connected()
    again.finish()
    assert "has no active run" in caplog.text
    assert "gets another" in caplog.text
    assert again.run.info.status == "FINISHED"


def test_an_experiment_that_is_deleted_before_a_resume_is_named_once(outputs, caplog):
    tracked = Tracked(outputs, "emptied/r")
    tracked.connected()
    tracked.finish()
    mlflow = MlflowClient(database(outputs))
    mlflow.delete_experiment(mlflow.get_experiment_by_name("emptied").experiment_id)
    again = Tracked(outputs, "emptied/r", 2)
    until(lambda: "was deleted" in caplog.text)
    again.finish()
    assert caplog.text.count("deleted") == 1
    assert "gets another" not in caplog.text


# What an MLflow of another version leaves, and what the line says.
SCHEMAS = {
    "older": ("UPDATE alembic_version SET version_num = '{before}'", "an older MLflow", "upgrade"),
    "newer": ("UPDATE alembic_version SET version_num = 'f' ", "a newer MLflow", "pip install"),
    "mixed": ("INSERT INTO alembic_version VALUES ('{before}')", "of another version", "restore"),
    "lacks": (
        "ALTER TABLE runs DROP COLUMN name",
        "no such column: runs.name",
        "restore it from a copy",
    ),
}


def test_a_database_of_another_schema_is_no_server_that_comes_back(outputs, tmp_path, caplog):
    Tracked(outputs, "schema/r").finish()
    (newest,) = schema.migrations().keys() - {m.before for m in schema.migrations().values()}
    before = schema.migrations()[newest].before
    node = {"local": True, "new": True, "config": {"output_dir": "outputs"}}
    assert not [*MLflowLogger.check({"tracking_uri": database(outputs)}, node)]
    for name, (change, what, remedy) in SCHEMAS.items():
        file = shutil.copy(outputs / "mlflow.db", tmp_path / f"{name}.db")
        with contextlib.closing(sqlite3.connect(file)) as connection, connection:
            connection.execute(change.format(before=before))
        uri = f"sqlite:///{file}"
        known = [*MLflowLogger.check({"tracking_uri": uri}, node)]
        assert name == "lacks" or what in known[0].what, "known before the start"
        component = logger(tracking_uri=uri, flush_timeout=5)
        tracked = Tracked(tmp_path, f"e/{name}", components={"mlflow": component})
        sender = component._thread
        tracked.finish()
        assert not sender.is_alive(), "the end of the run waits for nobody"
        ours = [r.getMessage() for r in caplog.records if r.name.startswith("distdl")]
        told = next(line for line in ours if what in line)
        assert remedy in told
        assert " ..." not in told
        assert "server is back" not in caplog.text
        assert name != "older" or f"mlflow db upgrade {uri}, after a backup" in told
        caplog.clear()
