"""What the command line answers, and which run a command means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from distdl.runs.checkpoints import SUFFIX
from distdl.runs.directory import this_process
from tests.conftest import TINY, distdl

SCRIPT = Path(sys.executable).with_name("distdl")
GROUPS = ("model", "data", "optimizer", "schedule", "strategy", "launcher", "tracking", "trainer")
LAYERS = ("callbacks", "task", "debug", "experiment")


# --- what needs no torch


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which importing torch, Lightning or MLflow fails."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'torchvision', 'lightning', 'mlflow'):\n"
        "            raise RuntimeError(f'{name} must not be imported here')\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}


def test_the_trap_works(no_torch, tmp_path) -> None:
    done = distdl(cwd=tmp_path, env=no_torch, module=("-c", "import torch"))
    assert "torch must not be imported here" in done.stderr


def test_help_lists_everything(no_torch, tmp_path) -> None:
    done = distdl("--help", cwd=tmp_path, env=no_torch)
    assert done.returncode == 0 and done.stderr == ""
    for group in (*GROUPS, *LAYERS):
        assert f"\n  {group}\n" in done.stdout
    for line in ("* resnet50 ", "  timm ", "* mlflow ", "  resnet50_ddp ", "  cpu ", "resume"):
        assert line in done.stdout
    assert "python -m distdl experiment=resnet50_ddp debug=cpu" in done.stdout
    assert "any model of timm by its name" in done.stdout, "the first comment of each file"
    assert list(tmp_path.iterdir()) == []


def test_help_of_convert(no_torch, tmp_path) -> None:
    done = distdl("convert", "--help", cwd=tmp_path, env=no_torch)
    assert done.returncode == 0 and done.stderr == ""
    assert "deepspeed_zero3" in done.stdout and "epoch_002-fsdp.ckpt" in done.stdout


@pytest.mark.parametrize(
    "typed",
    [
        ["--cfg", "job"],
        ["--cfg", "job", "experiment=resnet50_imagenet", "debug=limit"],
        ["--cfg", "job", "-m", "seed=1,2"],
        ["--cfg", "job", "--resolve", "-p", "model"],
        ["-sc", "install=bash"],
        ["lrr"],
    ],
)
def test_these_need_no_torch(no_torch, tmp_path, typed) -> None:
    done = distdl(*typed, cwd=tmp_path, env=no_torch)
    assert done.returncode == (2 if typed == ["lrr"] else 0), done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_console_script_is_the_same(tmp_path) -> None:
    typed = ["--cfg", "job", "experiment=resnet50_ddp", "seed=5"]
    script = subprocess.run([SCRIPT, *typed], cwd=tmp_path, capture_output=True, text=True)
    assert script.returncode == 0
    assert script.stdout == distdl(*typed, cwd=tmp_path).stdout


def test_who_reads_no_further_ends_it_quietly(tmp_path) -> None:
    command = f"'{sys.executable}' -m distdl --help | head -1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.startswith("distdl trains")


def test_completion(tmp_path) -> None:
    script = distdl("-sc", "install=bash", cwd=tmp_path).stdout
    assert "complete" in script and "distdl" in script
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/res_of_mine.yaml").write_text("_target_: mine.Model\n")
    asked = distdl("-sc", "query=bash", cwd=tmp_path, env={"COMP_LINE": "distdl model=res"})
    assert asked.stdout.split() == [
        "model=res_of_mine",
        *(f"model=resnet{n}" for n in (101, 152, 18, 34, 50)),
    ]


# --- composing


def test_cfg_job(command) -> None:
    said = command("--cfg", "job", "experiment=resnet50_ddp", "optimizer.lr=0.25")
    shown = OmegaConf.create(said.out)
    assert said.code == 0 and shown.optimizer.lr == 0.25 and "hydra" not in shown
    assert shown.model.num_classes == 1000  # still refers to the data
    assert "num_classes: ${data.num_classes}" in said.out
    resolved = command("--cfg", "job", "--resolve", "-p", "model").out
    assert OmegaConf.create(resolved).network.num_classes == 1000 and "${" not in resolved
    jobs = command("--cfg", "job", "-m", "seed=1,2").out
    assert jobs.count("\nname: null") == 2 and "# seed=1\n" in jobs and "\nseed: 2\n" in jobs


def test_an_experiment_with_and_without_plus(command) -> None:
    with_plus = command("--cfg", "job", "+experiment=resnet50_imagenet", "seed=1")
    without = command("--cfg", "job", "experiment=resnet50_imagenet", "seed=1")
    assert with_plus.code == 0 and with_plus.out == without.out


def test_the_users_own_configs(command, without_stage_2, tmp_path) -> None:
    folder = tmp_path / "conf/model"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# my very own\n_target_: mine.Model\n")
    (folder / "resnet50.yaml").write_text("_target_: mine.Fifty\n")
    # A foreign Hydra project: its primary config, and a group that happens to be called as ours.
    (tmp_path / "conf/config.yaml").write_text("defaults: [model: mine]\nseed: 99\n")
    (tmp_path / "mine.py").write_text("")
    said = command("dry_run=true", "trainer.accelerator=cpu")
    assert said.code == 0
    assert said.err == f"note: {tmp_path}/conf/model/resnet50.yaml replaces distdl's own\n"
    shown = OmegaConf.create(command("--cfg", "job").out)
    assert (shown.model._target_, shown.seed) == ("mine.Fifty", 0)
    assert (
        OmegaConf.create(command("--cfg", "job", "model=mine").out).model._target_ == "mine.Model"
    )
    assert "my very own" in command("--help").out


# --- dry run


def test_a_dry_run_says_what_would_run_and_writes_nothing(tmp_path) -> None:
    typed = ("+experiment=resnet50_ddp", "debug=cpu", "name=x", "dry_run=true")
    done = distdl(*typed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run        outputs/resnet50_ddp/x\n" in done.stdout
    assert "resources  1 x 1 cpu" in done.stdout
    assert "batch      8 x 1 device = 8 per step" in done.stdout
    assert "# in this process\nDISTDL_LAUNCHER=single python -m distdl.worker" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_of_several_ranks_and_of_a_sweep(command, without_stage_2, tmp_path) -> None:
    said = command("trainer.devices=2", "trainer.accelerator=cpu", "name=x", "dry_run=true")
    assert "# 2 processes under torch's elastic agent, each:\nDISTDL_LAUNCHER=local" in said.out
    assert "batch      64 x 2 devices = 128 per step" in said.out
    said = command("-m", "seed=1,2", "name=s", "dry_run=true")
    assert said.code == 0 and said.out.count("run        outputs/default/s/") == 2
    assert list(tmp_path.iterdir()) == []


# --- which run is it


@pytest.fixture
def run(command, without_worker, tmp_path):
    """Starts commands whose workers "succeed" at once; returns the run's folder."""

    def start(*typed: str, folder: str = "outputs/default/x") -> Path:
        said = command(*TINY, *typed)
        assert said.code == 0, said
        return tmp_path / folder

    return start


def attempts(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "attempts").iterdir())


def launched(run: Path, attempt: int):
    return OmegaConf.load(run / f"attempts/{attempt:03d}/launch.yaml")


def test_without_a_name_every_start_is_a_run_of_its_own(run, tmp_path) -> None:
    run("seed=1")
    run("seed=2")
    assert len(list((tmp_path / "outputs/default").iterdir())) == 2


def test_the_recipe_is_the_same_file_wherever_it_runs(run) -> None:
    one = run("name=x")
    two = run("name=x", "output_dir=two", "trainer.devices=2", folder="two/default/x")
    three = run(
        "name=x",
        "output_dir=three",
        "launcher.max_attempts=2",
        "launcher.grace_seconds=5",
        "launcher.forward_env=[HF_TOKEN]",
        "project.root=.",
        folder="three/default/x",
    )
    texts = {(path / "config.yaml").read_bytes() for path in (one, two, three)}
    assert len(texts) == 1
    assert launched(two, 1).resources.devices == 2
    assert launched(three, 1).where.launcher.grace_seconds == 5
    # Neither the recipe nor where it runs depends on the folder it was typed in.
    assert str(one.parents[2]) not in texts.pop().decode()


def test_the_same_name_with_an_equal_config_goes_on(run, command) -> None:
    path = run("name=x")
    (path / "attempts/001/status.json").write_text('{"state": "FAILED"}')
    run("name=x")
    assert attempts(path) == ["001", "002"]


def test_what_has_finished_is_not_trained_again(run, command) -> None:
    path = run("name=x")
    said = command(*TINY, "name=x")
    assert said.code == 0 and "outputs/default/x has finished: nothing to do" in said.out
    assert "resume outputs/default/x trainer.max_epochs=<more>" in said.out
    assert attempts(path) == ["001"]


def test_the_same_name_with_another_config_is_refused(run, command) -> None:
    path = run("name=x")
    before = (path / "config.yaml").read_bytes()
    said = command(*TINY, "name=x", "optimizer.lr=0.7", "+tags=[b]")
    assert said.code == 2
    for words in ("default/x exists with another config", "-  lr: 0.1", "+  lr: 0.7"):
        assert words in said.err
    assert "resume outputs/default/x trainer.max_epochs=<more>\n" in said.err
    said = command(*TINY, "name=x", "trainer.max_epochs=8")
    assert "resume outputs/default/x trainer.max_epochs=8\n" in said.err
    assert (path / "config.yaml").read_bytes() == before and attempts(path) == ["001"]


def test_the_name_of_a_run_that_failed_before_its_first_checkpoint(run, command) -> None:
    path = run("name=x")
    status = json.loads((path / "attempts/001/status.json").read_text())
    (path / "attempts/001/status.json").write_text(json.dumps(status | {"state": "FAILED"}))
    again = (*TINY, "name=x", "optimizer.lr=0.7")
    said = command(*again, "dry_run=true")
    assert "kept as outputs/default/x.failed-1" in said.out and attempts(path) == ["001"], said
    assert command(*again).code == 0
    assert "lr: 0.7" in (path / "config.yaml").read_text() and attempts(path) == ["001"]
    assert "lr: 0.1" in (path.with_name("x.failed-1") / "config.yaml").read_text()
    # It has something to go on from: its name is its own.
    (path / "attempts/001/status.json").write_text(json.dumps(status | {"state": "FAILED"}))
    (path / "checkpoints").mkdir(exist_ok=True)
    (path / f"checkpoints/epoch_000.ckpt{SUFFIX}").touch()
    assert "exists with another config" in command(*TINY, "name=x", "optimizer.lr=0.8").err


def test_what_is_finished_or_under_way_is_told_without_an_import(run, command, monkeypatch) -> None:
    path = run("name=x")
    for ask in ("_ask_child", "_ask_here"):
        monkeypatch.setattr(
            f"distdl.validation.validate.{ask}", lambda request: pytest.fail("imports")
        )
    assert "has finished: nothing to do" in command(*TINY, "name=x").out
    assert "has finished: nothing to do" in command("resume", str(path)).out
    status = json.loads((path / "attempts/001/status.json").read_text())
    mine = {"state": "RUNNING", **this_process()}
    (path / "attempts/001/status.json").write_text(json.dumps(status | mine))
    assert "attempt 1 is running" in command(*TINY, "name=x").err
    assert "attempt 1 is running" in command("resume", str(path), "trainer.max_epochs=9").err


def test_an_option_of_a_project_above(command, tmp_path, monkeypatch) -> None:
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/ours.yaml").write_text("# @package _global_\n")
    (tmp_path / "outputs/x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "outputs/x")
    assert f"cd {tmp_path}" in command("experiment=ours").err


def test_nothing_typed_is_help(command) -> None:
    said = command()
    assert said.code == 0 and "resume" in said.out and "experiment" in said.out


# --- resume


def test_resume_refuses_what_would_make_it_another_run(run, command) -> None:
    path = run("name=x")
    bad = ["optimizer.lr=0.5", "model=resnet34", "seed=3", "optimizer.lrr=1", "~tracking"]
    bad += ["trainer.max_epoch=3"]
    said = command("resume", "outputs/default/x", *bad, "trainer.max_epochs=4,5")
    assert said.code == 2 and "7 problems, nothing was started" in said.err
    for words in (
        "trainer.max_epoch: no such key\n      did you mean trainer.max_epochs?",
        "optimizer.lr: would make it another run",
        "model: would make it another run",
        "seed: would make it another run",
        "a resume may change data.batch_size",
        "else start a new run",
        "optimizer.lrr: no such key\n      did you mean optimizer.lr?",
        "a resume sets values, it deletes and sweeps none",
    ):
        assert words in said.err, said.err
    assert attempts(path) == ["001"]


def test_what_a_resume_changes_holds_from_then_on(run, command) -> None:
    path = run("name=x")
    frozen = (path / "config.yaml").read_bytes()
    assert command("resume", str(path), "trainer.max_epochs=5", "trainer.devices=2").code == 0
    second = launched(path, 2)
    assert second.changes == {"trainer.max_epochs": 5, "data.batch_size": 4}
    assert second.global_batch_size == 8 == launched(path, 1).global_batch_size
    assert "the global batch stays 8" in " ".join(second.notes)
    assert command("resume", str(path), "trainer.max_epochs=6").code == 0
    third = launched(path, 3)
    assert third.changes == {"trainer.max_epochs": 6, "data.batch_size": 4}
    assert third.resources.devices == 2
    assert (path / "config.yaml").read_bytes() == frozen
    said = command("resume", str(path), "trainer.devices=3", "trainer.max_epochs=7")
    assert said.code == 2
    assert "the run's global batch of 8 does not divide by 3 devices" in said.err
    assert "data.batch_size=<per device>" in said.err
    said = command("resume", str(path), "trainer.devices=3", "data.batch_size=5")
    assert said.code == 0
    assert "changes from 8 to 15, as asked for" in " ".join(launched(path, 4).notes)


def test_a_resume_under_another_strategy(run, command) -> None:
    """It is called by its name, drops the last one's settings, and may end writing slices."""
    path = run("name=x", "strategy=fsdp", "checkpoint.sharded=true")
    # What changes nothing is not a change: nothing to note, and nothing to do.
    said = command("resume", str(path), "strategy=fsdp", "checkpoint.sharded=true")
    assert "has finished: nothing to do" in said.out and "from this attempt on" not in said.out
    two = ("resume", str(path), "trainer.max_epochs=5")
    assert command(*two, "strategy=ddp", "strategy.comm_hook=bf16").code == 0
    assert "strategy is ddp from this attempt on" in (notes := launched(path, 2).notes)
    assert "strategy.comm_hook is bf16 from this attempt on" in notes
    said = command("resume", str(path), "strategy=pipeline", "checkpoint.sharded=false")
    assert said.code == 0, said
    third = launched(path, 3)
    assert third.changes["checkpoint.sharded"] is False
    assert "strategy.comm_hook" not in third.changes
    assert "strategy is pipeline from this attempt on" in third.notes
    assert "checkpoint.sharded is false from this attempt on" in third.notes
    said = command("resume", str(path), "strategy=pipeline", "trainer.max_epochs=5")
    assert "has finished: nothing to do" in said.out, said
    assert attempts(path) == ["001", "002", "003"]


def test_a_resume_with_other_loggers(run, command) -> None:
    path = run("name=x", "tracking=mlflow")
    assert command("resume", str(path), "trainer.max_epochs=5", "tracking=tensorboard").code == 0
    changes = launched(path, 2).changes
    assert list(changes.tracking) == ["tensorboard"], changes
    assert "tracking is tensorboard from this attempt on" in launched(path, 2).notes


def test_resume_finds_a_run_that_was_moved(run, command, tmp_path) -> None:
    path = run("name=x")
    (tmp_path / "archive/default").mkdir(parents=True)
    moved = path.rename(tmp_path / "archive/default/y")
    said = command("resume", "archive/default/y", "trainer.max_epochs=9", "dry_run=true")
    assert said.code == 0 and "run        archive/default/y (resumes)" in said.out, said
    assert attempts(moved) == ["001"], "a dry run writes nothing"
    assert command("resume", "archive/default/y", "trainer.max_epochs=9").code == 0
    assert attempts(moved) == ["001", "002"]


def test_resume_of_what_ranks_of_others_began(run, command) -> None:
    """`torchrun -m distdl` began it; without torchrun the local launcher goes on."""
    path = run("name=x", "trainer.devices=2")
    stored = launched(path, 1)
    stored.where.launcher = {"_target_": "distdl.launchers.external.ExternalLauncher"}
    OmegaConf.save(stored, path / "attempts/001/launch.yaml")
    said = command("resume", str(path), "trainer.max_epochs=9", "dry_run=true")
    assert said.code == 0 and "2 processes under torch's elastic agent" in said.out
