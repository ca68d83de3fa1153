"""Journal, follower, sampler, `track sync`: against real databases and a real MLflow server."""

from __future__ import annotations

import json
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
from typing import Any

import numpy as np
import pytest

from distdl.commands import track
from distdl.errors import UserError
from distdl.tracking import RunInfo, start_tracking
from distdl.tracking.client import metric_name
from distdl.tracking.journal import Journal
from distdl.tracking.mlflow import MLflowLogger
from distdl.tracking.outbox import redact
from distdl.tracking.records import journal_path, read
from distdl.tracking.system import SystemMetrics

NAN = float("nan")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "AZUREML_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One project's output folder: making its database takes seconds, so the tests share it."""
    return tmp_path_factory.mktemp("outputs")


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


def wait_until(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def connected(tracking: Any) -> None:
    """Wait for the MLflow run: a preempted run does not wait for a server, nor for an import."""
    wait_until(lambda: tracking.components["mlflow"].delivery.run_id, 60)


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


# --- the journal ---


def test_journal_keeps_every_value_with_its_step_and_attempt(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    journal = Journal(path, tmp_path, attempt=3)
    before = time.time()
    journal.log_metrics({"train/loss": 0.1, "größe": 2}, 7)
    journal.log_metrics({"a": NAN, "b": math.inf, "c": -math.inf}, 8)
    journal.log_metrics({"text": "no number"}, 9)
    journal.log_metrics({("odd", "key"): 1.0}, np.int64(10))  # a user's module may do so
    journal.close()
    first, second, odd = read(path)
    assert (odd.step, odd.metrics) == (10, {"('odd', 'key')": 1.0})
    assert (first.step, first.attempt, first.metrics) == (7, 3, {"train/loss": 0.1, "größe": 2.0})
    assert before - 0.001 <= first.time <= time.time()
    assert math.isnan(second.metrics["a"])
    assert (second.metrics["b"], second.metrics["c"]) == (math.inf, -math.inf)
    for line in path.read_text().splitlines():  # valid JSON for other readers, too
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_journal_appends_within_a_second_and_without_a_close(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    journal = Journal(path, tmp_path)
    journal.log_metrics({"x": 1.0}, 1)
    wait_until(lambda: path.is_file() and len(list(read(path))) == 1, 5)
    journal.close()


def test_a_torn_line_is_passed_over_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    for attempt in (1, 2):
        journal = Journal(path, tmp_path, attempt)
        journal.log_metrics({"x": float(attempt)}, attempt)
        journal.close()
        if attempt == 1:
            with path.open("ab") as file:
                file.write(b'{"t": 1.0, "step": 99, "att')
            assert [r.step for r in read(path)] == [1]
    assert [r.step for r in read(path)] == [1, 2]


def test_following_by_offset_reads_each_record_once(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    steps, offset = [], 0
    for attempt in range(1, 4):
        journal = Journal(path, tmp_path, attempt)
        for step in range(5):
            journal.log_metrics({"x": 1.0}, 10 * attempt + step)
        journal.close()
        with path.open("r+b") as file:  # the newline itself may be what a kill takes
            file.truncate(path.stat().st_size - 1)
        for record in read(path, offset):
            steps.append(record.step)
            offset = record.end
    assert steps == [10 * a + s for a in range(1, 4) for s in range(5)]


def test_a_full_disk_is_said_once_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal(journal_path(tmp_path), tmp_path)
    real, full = os.write, [True]

    def write(fd: int, data: bytes) -> int:
        if full[0] and fd == journal._file:
            if len(data) > 20:
                return real(fd, data[:20])  # a disk fills up in the middle of a line
            raise OSError(28, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    for step in range(4):
        journal.log_metrics({"x": float(step)}, step)
        journal.flush()
    full[0] = False
    journal.close()
    assert [r.step for r in read(journal_path(tmp_path))] == [0, 1, 2, 3]
    said = [r.message for r in caplog.records]
    assert sum("No space left" in m for m in said) == 1
    assert sum("can be written again" in m for m in said) == 1


def test_log_metrics_costs_microseconds(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path), tmp_path)
    metrics = {f"m{i}": float(i) for i in range(6)}
    times = []
    for step in range(5000):
        start = time.perf_counter()
        journal.log_metrics(metrics, step)
        times.append(time.perf_counter() - start)
    journal.close()
    assert sorted(times)[2500] < 20e-6
    assert len(list(read(journal_path(tmp_path)))) == 5000


def test_a_tensor_is_read_when_it_is_logged(tmp_path: Path) -> None:
    import torch

    journal = Journal(journal_path(tmp_path), tmp_path)
    value = torch.tensor(1.0)
    journal.log_metrics({"x": value}, 0)
    value += 1
    journal.close()
    assert [r.metrics for r in read(journal_path(tmp_path))] == [{"x": 1.0}]


def test_only_rank_0_writes_but_every_rank_has_the_same_loggers(tmp_path: Path) -> None:
    for rank, local_rank, node_rank in ((0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)):
        info = info_of(
            tmp_path, "e/r", rank=rank, local_rank=local_rank, node_rank=node_rank, world_size=4
        )
        tracking = start_tracking(info, {})
        assert len(tracking.loggers) == 1
        tracking.loggers[0].log_metrics({"train/loss": float(rank)}, 1)
        tracking.finish("SUCCEEDED")
    records = {node: list(read(journal_path(tmp_path / "e/r", node))) for node in (0, 1)}
    keys = {node: {k for r in records[node] for k in r.metrics} for node in (0, 1)}
    assert "train/loss" in keys[0] and "system/cpu_percent" in keys[0]
    assert keys[1] and all(k.startswith("system/node1/") for k in keys[1])
    losses = [r.metrics["train/loss"] for r in records[0] if "train/loss" in r.metrics]
    assert losses == [0.0]
    assert len(list((tmp_path / "e/r/logs").iterdir())) == 2


def test_the_sampler_survives_a_source_that_fails(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path), tmp_path)
    sampler = SystemMetrics(journal, 0.01, 0, tmp_path)
    calls = []

    def broken() -> dict[str, float]:
        calls.append(1)
        raise RuntimeError("driver is gone")

    sampler.sources.insert(0, broken)
    sampler.start()
    wait_until(lambda: len(calls) > 5, 10)
    sampler.stop()
    journal.close()
    samples = [r.metrics for r in read(journal_path(tmp_path))]
    assert len(samples) >= 4
    assert all(0 <= s["system/cpu_percent"] <= 100 for s in samples)
    assert all(0 < s["system/memory_gib"] < 1e5 for s in samples)


def test_a_real_trainer_reaches_the_journal_csv_and_tensorboard(tmp_path: Path) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Model(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().training_step(batch, batch_idx)
            self.log("train/loss", out["loss"])
            self.log("my_own", torch.tensor(float(batch_idx)))
            return out

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            out = super().validation_step(batch, batch_idx)
            self.log("val/loss", out["x"])
            return out

    tracking = start_tracking(info_of(tmp_path, "e/r"), built(["csv", "tensorboard"]))
    trainer = pl.Trainer(
        max_steps=6,
        limit_val_batches=2,
        val_check_interval=3,
        log_every_n_steps=2,
        accelerator="cpu",
        devices=1,
        logger=tracking.loggers,
        callbacks=[LearningRateMonitor(), ModelCheckpoint()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path / "elsewhere",
    )
    trainer.fit(Model())
    tracking.finish("SUCCEEDED")
    run = tmp_path / "e/r"
    steps = {r.step: r.metrics["my_own"] for r in read(journal_path(run)) if "my_own" in r.metrics}
    assert steps == {1: 1.0, 3: 3.0, 5: 5.0}
    names = {k for r in read(journal_path(run)) for k in r.metrics}
    assert {"train/loss", "val/loss", "lr-SGD", "epoch", "system/cpu_percent"} <= names
    assert "my_own" in (run / "logs/csv/version_0/metrics.csv").read_text()
    assert list((run / "logs/tensorboard").glob("events*"))
    assert list((run / "checkpoints").glob("*.ckpt"))  # Lightning's default place is the run's
    assert not (tmp_path / "elsewhere").exists()
    assert any(line.startswith("tensorboard --logdir") for line in tracking.how_to_open())


def built(options: list[str]) -> dict[str, Any]:
    """The `tracking` part of a config with these options, composed and built by Hydra."""
    from hydra import compose, initialize_config_module
    from hydra.utils import instantiate

    with initialize_config_module("distdl.conf", version_base="1.3"):
        config = compose(overrides=[f"+tracking=[{','.join(options)}]"])
    return dict(instantiate(config).get("tracking") or {})


def test_the_options_can_be_chosen_together_and_none_is_nothing() -> None:
    assert built(["none"]) == {}
    both = built(["mlflow", "csv"])
    assert list(both) == ["mlflow", "csv"] and isinstance(both["mlflow"], MLflowLogger)


# --- MLflow in a database file ---


def test_one_mlflow_run_across_attempts(outputs: Path, caplog: pytest.LogCaptureFixture) -> None:
    for attempt in (1, 2):
        changed = {"optimizer.lr": 0.2} if attempt == 2 else {}
        info = info_of(
            outputs,
            "attempts/r",
            attempt,
            params={"lr": 0.1 * attempt, "model": "x" * 600, f"new{attempt}": 1},
            changed=changed,
            tags={"team": "vision"},
        )
        (info.run_dir / "provenance.json").write_text('{"git": {"commit": "abc123"}}')
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
    assert tags["distdl.attempt.1.state"] == "PREEMPTED"
    assert tags["distdl.attempt.2.state"] == "SUCCEEDED"
    assert json.loads(tags["distdl.attempt.2.changed"]) == {"optimizer.lr": 0.2}
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
            {"a": float(step), "b": NAN, "c": math.inf, "acc@1": 1.0}, step
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


@pytest.mark.parametrize(
    "name", ["acc@1", "a//b", "/x", "../x", "a/../b", "x" * 300, "loss[0]", "@"]
)
def test_metric_names_are_made_acceptable(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    _validate_metric_name(metric_name(name))


def test_a_slow_backend_does_not_slow_a_step(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    real, calls = MlflowClient.log_batch, []

    def slow(self: Any, *args: Any, **kw: Any) -> Any:
        calls.append(1)
        time.sleep(0.7)
        return real(self, *args, **kw)

    monkeypatch.setattr(MlflowClient, "log_batch", slow)
    tracking = start_tracking(info_of(outputs, "slow/r"), {"mlflow": logger()})
    times = []
    for step in range(1500):
        start = time.perf_counter()
        tracking.journal.log_metrics({"x": float(step)}, step)
        times.append(time.perf_counter() - start)
        time.sleep(0.002)
    assert len(calls) >= 2, "nothing was sent while the steps ran"
    assert sorted(times)[1350] < 2e-3 and sum(times) < 0.7
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "slow")
    assert len(delivered(database(outputs), run.info.run_id)) == 1500


IN_A_PROCESS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from distdl.tracking import RunInfo
from distdl.tracking.mlflow import MLflowLogger
from distdl.tracking.records import encode, journal_path
outputs, run_id = Path(sys.argv[2]), sys.argv[3]
run = outputs / run_id
info = RunInfo(run, run_id, 1, 0, 0, 0, 1, outputs, run_id.split("/")[0])
component = MLflowLogger(interval=0.1)
component.start(info)
journal = journal_path(run)
journal.parent.mkdir(parents=True, exist_ok=True)
"""  # without Lightning, whose import would take most of the time


def in_a_process(code: str, outputs: Path, run_id: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", IN_A_PROCESS + code, str(Path(__file__).parent)]
    return subprocess.Popen([*command, str(outputs), run_id], stderr=subprocess.PIPE, text=True)


def test_two_runs_may_start_at_the_same_time_in_a_new_project(tmp_path: Path) -> None:
    code = "journal.write_bytes(encode(1.0, 1, 1, {'x': 1.0}))\ncomponent.finish('SUCCEEDED')"
    out = tmp_path / "outputs"
    started = [in_a_process(code, out, f"race/{i}") for i in range(2)]
    said = [p.communicate(timeout=120)[1] for p in started]
    assert [p.returncode for p in started] == [0, 0], said
    assert "fails" not in "".join(said), said
    found = runs_of(database(out), "race")
    assert sorted((r.info.run_name, r.data.metrics["x"]) for r in found) == [("0", 1.0), ("1", 1.0)]


def test_a_data_loader_may_fork_while_mlflow_is_being_imported(tmp_path: Path) -> None:
    """Else its worker waits for ever on the import lock of what mlflow was importing."""
    code = """
while "mlflow" not in sys.modules:
    time.sleep(0.001)
child = os.fork()
if child == 0:
    import mlflow
    os._exit(0)
end = time.time() + 10
while os.waitpid(child, os.WNOHANG) == (0, 0):
    if time.time() > end:
        os.kill(child, 9)
        sys.exit("the child hangs")
    time.sleep(0.05)
"""
    forking = in_a_process(code, tmp_path / "outputs", "fork/r")
    said = forking.communicate(timeout=60)[1]
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
    code = "import sys; from distdl.commands.track import main; sys.exit(main(sys.argv[1:]))"
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
component._send = lambda finishing: True  # killed before the next delivery
time.sleep(0.5)
journal.write_bytes(encode(1.0, 1, 1, {"x": 1.0}))
os.kill(os.getpid(), 9)
"""
    killed = in_a_process(code, outputs, "killed/r")
    said = killed.communicate(timeout=120)[1]
    assert killed.returncode == -signal.SIGKILL, said
    (run,) = runs_of(database(outputs), "killed")
    assert run.info.status == "RUNNING"
    assert track.main(["sync", str(outputs / "killed/r")]) == 0
    (run,) = runs_of(database(outputs), "killed")
    assert run.info.status == "KILLED" and run.data.metrics == {"x": 1.0}


def test_reading_and_syncing_need_no_torch() -> None:
    code = (
        "import sys; import distdl.commands.track, distdl.commands.report, distdl.tracking.records;"
        "import distdl.tracking.delivery, distdl.tracking.mlflow;"
        "print([m for m in ('torch', 'lightning', 'mlflow', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done


# --- a real server ---


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
    start = time.perf_counter()
    tracking = start_tracking(info, {"mlflow": component})  # nothing is there yet
    assert time.perf_counter() - start < 2.0

    def log(first: int) -> None:
        for step in range(first, first + 600):
            tracking.journal.log_metrics({"a": float(step), "b": NAN}, step)
        tracking.journal.flush()

    log(0)
    wait_until(lambda: component._failures > 0)
    server.start()
    server.wait()
    sync_what_was_missed(server, missed)
    wait_until(lambda: component.delivery.delivered >= 1200 and component._failures == 0, 60)
    server.kill()
    log(600)
    wait_until(lambda: component._failures > 0)
    server.start()  # on the same port and database, and the run ends before it is up
    log(1200)
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(server.uri, "server")
    points = owed(info)
    assert len(points) == 3600
    assert delivered(server.uri, run.info.run_id) == points
    assert run.info.status == "FINISHED" and run.data.params == {"lr": "0.1"}
    names = [a.path for a in client(server.uri).list_artifacts(run.info.run_id)]
    assert names == ["config.yaml", "packages.txt"]
    said = [r.message for r in caplog.records]
    assert sum("fails; training goes on" in m for m in said) == 2
    assert sum("is back: sending on" in m for m in said) == 2
    assert component.how_to_open() == server.uri


def run_without_its_server(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> RunInfo:
    """A whole run while the server is down: it ends soon, and says what to type."""
    info = info_of(tmp_path, "later/r", params={"lr": 0.1})
    tracking = start_tracking(info, {"mlflow": logger(tracking_uri=server.uri, flush_timeout=1)})
    for step in range(700):
        tracking.journal.log_metrics({"a": float(step), "b": 1.0}, step)
    start = time.monotonic()
    tracking.finish("FAILED")
    assert time.monotonic() - start < 5
    assert f"distdl track sync {info.run_dir}" in caplog.text and "1400 points" in caplog.text
    return info


def sync_what_was_missed(server: Server, info: RunInfo) -> None:
    """`track sync`, twice: again as after a kill between the delivery and its note."""
    for _ in range(2):
        assert track.main(["sync", str(info.run_dir)]) == 0
        (run,) = runs_of(server.uri, "later")
        assert delivered(server.uri, run.info.run_id) == owed(info)
        assert run.info.status == "FAILED" and run.data.params == {"lr": "0.1"}
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
    second = start_tracking(node1, {"mlflow": logger(**options)})  # before the run exists
    first = start_tracking(info_of(tmp_path / "a", "nodes/r"), {"mlflow": logger(**options)})
    for tracking in (first, second):
        component = tracking.components["mlflow"]
        wait_until(lambda c=component: c.delivery.delivered > 20, 60)
        tracking.finish("SUCCEEDED")
    (run,) = runs_of(server.uri, "nodes")
    assert {"system/cpu_percent", "system/node1/cpu_percent"} <= set(run.data.metrics)
