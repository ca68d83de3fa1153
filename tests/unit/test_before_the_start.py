"""What is known before a start is refused there, in words, and what is written can be read."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distdl.config import compose
from distdl.data.stored import StoredImages
from distdl.job import JobState
from distdl.launch import jobs, planning
from distdl.runs.attempt import Attempt
from distdl.runs.checkpoints import manifest_at
from distdl.runs.files import write_json
from distdl.tasks.predict import on_host, refuse_difference
from distdl.tools.drill import drill
from distdl.tools.report.plots import Chart, draw
from distdl.util import strict_json
from distdl.util.errors import UserError
from distdl.validation.lightnings import try_trainer
from distdl.validation.targets import Trust, problem_of


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as error:
        planning.plan(compose.compose(overrides))
    return "\n".join(map(str, error.value.problems))


@pytest.mark.parametrize(
    "overrides, text",
    [
        (
            "data.num_classes=10 model.num_classes=5",
            "model.num_classes: is 5, and the data have 10",
        ),
        ("data.num_classes=10 model.network.num_classes=5", "model.network.num_classes: is 5"),
        ("trainer.max_epochs=0", "trainer.max_epochs: 0 would train for no epoch"),
        ("trainer.max_steps=0", "trainer.max_steps: 0 would train for no step"),
        ("trainer.limit_train_batches=0.0", "0 would train on no batches"),
        ("data.train_samples=640 trainer.val_check_interval=11", "an epoch has 10 batches"),
        (
            "data.train_samples=640 trainer.limit_train_batches=0.5 trainer.val_check_interval=6",
            "an epoch has 5 batches",
        ),
        ("data.train_samples=20", "data.batch_size: 20 training samples are fewer than one"),
        ("launcher._target_=${.y}", "launcher._target_: refers to y, which is not in the config"),
        ("trainer.max_epochs=${..y.z}", "trainer.max_epochs: refers to y.z"),
        ("data._target_=mine.data.Data", "there is no module 'mine'"),
    ],
)
def test_what_cannot_train(tmp_path, monkeypatch, overrides, text):
    monkeypatch.chdir(tmp_path)
    assert text in refused("trainer.accelerator=cpu", *overrides.split())


def test_what_can_train(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ("trainer.check_val_every_n_epoch=null", "trainer.limit_val_batches=0")
    for each in more:
        words = ["data.train_samples=640", "trainer.val_check_interval=11", each]
        planning.plan(compose.compose(["trainer.accelerator=cpu", *words]))
    words = ["data.num_classes=10", "model.num_classes=20", "task=validate", "trainer.max_epochs=0"]
    words.append("task.checkpoint=none")
    planning.plan(compose.compose(["trainer.accelerator=cpu", *words]))


@pytest.mark.parametrize("kind", ["folder", "prepared"])
def test_the_data_on_the_disk_are_counted(request, tmp_path, kind):
    from tests import prepared

    config = {
        "task": {"_target_": "distdl.tasks.train"},
        "data": {"batch_size": 4},
        "trainer": {"val_check_interval": 20},
    }
    context = {"local": True, "world_size": 2, "config": config}
    if kind == "prepared":
        root = tmp_path / "shards"
        prepared.prepare(root)
        classes = None
    else:
        for split in ("train", "val"):
            for name in "ab":
                (tmp_path / split / name).mkdir(parents=True)
                for number in range(20):
                    (tmp_path / split / name / f"{number}.jpg").write_bytes(b"")
        root = tmp_path
        classes = 2
    node = {"root": str(root), "num_classes": classes, "batch_size": 4}
    (problem,) = [p for p in StoredImages.check(node, context) if not isinstance(p, str)]
    assert problem.what == "trainer.val_check_interval is 20, and an epoch has 5 batches"


def test_an_experiment_may_be_called_as_a_number(tmp_path, monkeypatch):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/2024.yaml").write_text("# @package _global_\nseed: 77\n")
    (tmp_path / "conf/experiment/1.5.yaml").write_text("# @package _global_\nseed: 78\n")
    monkeypatch.chdir(tmp_path)
    for text, seed in (("2024", 77), ("[2024]", 77), ("1.5", 78), ('"2024"', 77)):
        for plus in ("", "+"):
            assert compose.compose([f"{plus}experiment={text}"]).seed == seed
    for text in ("2025", "null", "true", "[2025]", "[2024,x]"):
        with pytest.raises(UserError) as error:
            compose.compose([f"experiment={text}"])
        assert "no option" in str(error.value)


def test_a_module_that_is_not_there_is_looked_for(tmp_path):
    (tmp_path / "mine").mkdir()
    trust = Trust((str(tmp_path),))
    what, remedy = problem_of("mine.model.Net", trust, ("model",))
    assert what.startswith(f"{tmp_path}/mine has no module 'model'")
    assert "model.py" in remedy
    what, _ = problem_of("other.model.Net", trust, ("model",))
    assert str(tmp_path) in what
    assert "nor is it installed" in what
    what, remedy = problem_of("numpy.save", trust, ("model",))
    assert "outside the allowed packages" in what
    assert "project.allow=[numpy]" in remedy


CLUSTERS = {
    "slurm": {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train.sh", "SLURM_PROCID": "0"},
    "torchelastic": {"TORCHELASTIC_RUN_ID": "1"},
    "lsf": {"LSB_JOBID": "1", "LSB_DJOB_RANKFILE": "/none", "JSM_NAMESPACE_LOCAL_RANK": "0"},
    "kubeflow": {"KUBERNETES_PORT": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1", "RANK": "1"},
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_the_variables_of_a_cluster_are_those_of_the_shell(monkeypatch, cluster):
    for name, value in (CLUSTERS[cluster] | {"SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    assert try_trainer({"max_epochs": 1}) is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[1e308], [1, 1e308, -1e308], [math.inf, -math.inf], [math.nan]])
def test_a_report_draws_any_number_or_says_so(values):
    series = SimpleNamespace(steps=[*range(len(values))], times=[0.0] * len(values), values=values)
    hidden = sum(not abs(value) < 1e100 for value in values)
    for more in ({}, {"unit": "%", "scale": 100.0}):
        svg, [(label, _)] = draw(Chart("Loss", {"train/loss": series}, **more), 0.0)
        assert "<svg" in svg
        assert label.startswith(f"train/loss ({hidden} of {len(values)} values")


def test_a_drill_needs_no_max_attempts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose.compose(["trainer.accelerator=cpu"])
    for attempts, expected in ((None, 1), (3, 3)):
        config.launcher.max_attempts = attempts
        assert drill.shortened(config, 20).launcher.max_attempts == expected
    del config.launcher.max_attempts
    assert "max_attempts" not in drill.shortened(config, 20).launcher


ODD = {
    "an empty dict": {},
    "a value of type NoneType": None,
    "a value of type str as 'x'": {"x": "text"},
    "a value of type dict as 'x'": {"x": {"y": torch.zeros(2)}},
    "a value of type list": [torch.zeros(2), torch.zeros(3)],
    "a tensor of torch.complex64": torch.zeros(2, dtype=torch.complex64),
    "a nested tensor": torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    "a sparse": torch.zeros(2, 2).to_sparse(),
    "a tensor of shape [2, 0]": torch.zeros(2, 0),
    "a tensor of shape [3]": torch.zeros(3),
    "'index', which is also the name of a column": {"index": torch.zeros(2)},
    "'1', which is also the name of another key": {1: torch.zeros(2), "1": torch.zeros(2)},
}


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("text", ODD)
def test_what_no_table_holds_is_refused(text):
    with pytest.raises(UserError) as error:
        on_host(ODD[text], 2, ("index",))
    assert f"predict_step returned {text}" in str(error.value)


def test_batches_of_other_columns_are_refused():
    one = {"x": ("torch.float32", (3,))}
    refuse_difference(one, {"x": ("torch.float32", (3,))})
    for other in ({"x": ("torch.float32", (4,))}, {"y": ("torch.float32", (3,))}, {}):
        with pytest.raises(UserError, match="per sample in one batch of predict_step"):
            refuse_difference(one, other)


def test_every_number_is_written_as_json(tmp_path):
    values = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": np.float64("nan"), "e": 1.5}

    def refuse(text: str):
        raise AssertionError(f"{text} is no JSON")

    read = json.loads(strict_json.dumps(values), parse_constant=refuse)
    assert read == {"a": "nan", "b": ["inf", {"c": "-inf"}], "d": "nan", "e": 1.5}
    attempt = Attempt(tmp_path / "001")
    attempt.path.mkdir()
    attempt.end(JobState.SUCCEEDED, metrics={"x": math.nan, "y": -math.inf, "z": 1})
    json.loads((attempt.path / "status.json").read_text(), parse_constant=refuse)
    metrics = attempt.status()["metrics"]
    assert math.isnan(metrics["x"])
    assert metrics["y"] == -math.inf
    assert metrics["z"] == 1
    files = {"a.ckpt": {"size": 1, "sha256": ""}}
    write_json(tmp_path / "a.ckpt.manifest.json", {"files": files, "metrics": {"x": math.inf}})
    assert manifest_at(tmp_path / "a.ckpt")["metrics"] == {"x": math.inf}


def test_rows_in_json_lines_are_json():
    pyarrow = pytest.importorskip("pyarrow")
    from distdl.tasks.prediction_rows import column, encoded

    table = pyarrow.table({"x": column(np.array([[1.0, math.nan], [math.inf, 2.0]]))})
    lines = encoded(table, "jsonl").decode().splitlines()
    assert lines == ['{"x": [1.0, "nan"]}', '{"x": ["inf", 2.0]}']


def test_a_copied_folder_is_not_the_run_that_runs(tmp_path):
    attempt = Attempt(tmp_path / "run/attempts/001")
    attempt.path.mkdir(parents=True)
    attempt.begin()
    assert attempt.state() is JobState.RUNNING
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = Attempt(tmp_path / "copy/attempts/001")
    assert copy.state() is JobState.FAILED
    assert not copy.is_under_way()
    assert copy.copy_of(copy.status()) == str(attempt.path)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert Attempt(tmp_path / "moved/attempts/001").state() is JobState.RUNNING
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert Attempt(tmp_path / "link/attempts/001").state() is JobState.RUNNING
    assert os.getpid() == attempt_of(tmp_path / "moved")["pid"]


def attempt_of(run: Path) -> dict[str, object]:
    return Attempt(run / "attempts/001").status()


def test_a_copys_job_is_not_asked_or_cancelled(tmp_path, monkeypatch):
    attempt = Attempt(tmp_path / "run/attempts/001")
    attempt.path.mkdir(parents=True)
    where = {"launcher": {"_target_": "distdl.launchers.slurm.SlurmLauncher"}}
    attempt.write_launch({"run_id": "x/run", "where": where})
    job = SimpleNamespace(handle="slurm://12", url=None)
    jobs.record(attempt, job)
    assert attempt.job()["host"] == socket.gethostname()
    asked: list[str] = []
    launcher = SimpleNamespace(attach=lambda handle: asked.append(handle) or job)
    monkeypatch.setattr(jobs.Platforms, "_launcher", lambda *_: launcher)
    assert jobs.job_of(attempt).own is job
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copy = jobs.job_of(Attempt(tmp_path / "copy/attempts/001"))
    with pytest.raises(UserError, match="of which this is a copy"):
        copy.cancel()
    assert asked == ["slurm://12"]
