"""Which run a command means: a new one, the next attempt of an old one, or none."""

from __future__ import annotations

import json

import pytest
from omegaconf import OmegaConf

from distdl.runs.checkpoints import SUFFIX
from distdl.runs.directory import this_process
from tests.conftest import TINY

FINISHED = "has finished: nothing to do"


@pytest.fixture
def start(command, without_worker, tmp_path):
    """Starts commands whose workers "succeed" at once; returns the run's folder."""

    def started(*typed, folder="outputs/default/x"):
        output = command(*TINY, *typed)
        assert output.code == 0, output
        return tmp_path / folder

    return started


@pytest.fixture
def run(start):
    return start("name=x")


def resumed(run, command, *typed):
    """Resumes the run, which must succeed; returns the launch.yaml of the attempt."""
    output = command("resume", str(run), *typed)
    assert output.code == 0, output
    return launched(run, len(attempts(run)))


def attempts(run):
    return sorted(path.name for path in (run / "attempts").iterdir())


def launched(run, attempt=1):
    return OmegaConf.load(run / f"attempts/{attempt:03d}/launch.yaml")


def set_status(run, **changes):
    path = run / "attempts/001/status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_without_a_name_every_start_is_a_run_of_its_own_and_with_one_it_resumes(start, tmp_path):
    start("seed=1")
    start("seed=2")
    assert len(list((tmp_path / "outputs/default").iterdir())) == 2
    run = start("name=x")
    set_status(run, state="FAILED")
    start("name=x")
    assert attempts(run) == ["001", "002"]


def test_the_recipe_is_the_same_file_wherever_it_runs(start, run):
    launcher = ("max_attempts=2", "grace_seconds=5", "forward_env=[HF_TOKEN]")
    typed = [*(f"launcher.{setting}" for setting in launcher), "project.root=."]
    typed += ["trainer.devices=2", "output_dir=two"]
    two = start("name=x", *typed, folder="two/default/x")
    text = (run / "config.yaml").read_text()
    assert text == (two / "config.yaml").read_text()
    assert launched(two).resources.devices == 2 and launched(two).where.launcher.grace_seconds == 5
    assert str(run.parents[2]) not in text, "nor does it depend on the folder it was typed in"


@pytest.mark.usefixtures("no_child")
def test_what_has_finished_or_is_running_is_not_trained_again(run, command):
    output = command(*TINY, "name=x")
    assert output.code == 0 and f"outputs/default/x {FINISHED}" in output.out
    assert "resume outputs/default/x trainer.max_epochs=<more>" in output.out
    assert FINISHED in command("resume", str(run)).out
    set_status(run, state="RUNNING", **this_process())
    assert "attempt 1 is running" in command(*TINY, "name=x").err
    assert "attempt 1 is running" in command("resume", str(run), "trainer.max_epochs=9").err
    assert attempts(run) == ["001"]


def test_the_same_name_with_another_config_is_refused(run, command):
    before = (run / "config.yaml").read_bytes()
    output = command(*TINY, "name=x", "optimizer.lr=0.7", "+tags=[b]")
    assert output.code == 2
    for words in ("default/x exists with another config", "-  lr: 0.1", "+  lr: 0.7"):
        assert words in output.err
    assert "resume outputs/default/x trainer.max_epochs=<more>\n" in output.err
    output = command(*TINY, "name=x", "trainer.max_epochs=8")
    assert "resume outputs/default/x trainer.max_epochs=8\n" in output.err
    assert (run / "config.yaml").read_bytes() == before and attempts(run) == ["001"]


def test_the_name_of_a_run_that_failed_before_its_first_checkpoint(run, command):
    set_status(run, state="FAILED")
    again = (*TINY, "name=x", "optimizer.lr=0.7")
    output = command(*again, "dry_run=true")
    assert "kept as outputs/default/x.failed-1" in output.out and attempts(run) == ["001"], output
    assert command(*again).code == 0
    assert "lr: 0.7" in (run / "config.yaml").read_text() and attempts(run) == ["001"]
    assert "lr: 0.1" in (run.with_name("x.failed-1") / "config.yaml").read_text()
    # With a checkpoint to resume from, or rows of a prediction, its name is its own.
    for file in (f"checkpoints/epoch_000.ckpt{SUFFIX}", "predictions/_progress.json"):
        set_status(run, state="FAILED")
        (run / file).parent.mkdir(exist_ok=True)
        (run / file).touch()
        assert "exists with another config" in command(*TINY, "name=x", "optimizer.lr=0.8").err
        (run / file).unlink()


def test_resume_refuses_what_would_make_it_another_run(run, command):
    typed = "optimizer.lr=0.5 model=resnet34 seed=3 optimizer.lrr=1 ~tracking trainer.max_epoch=3"
    output = command("resume", "outputs/default/x", *typed.split(), "trainer.max_epochs=4,5")
    assert output.code == 2 and "7 problems, nothing was started" in output.err
    another = [f"{key}: would make it another run" for key in ("optimizer.lr", "model", "seed")]
    for words in (
        *another,
        "trainer.max_epoch: no such key\n      did you mean trainer.max_epochs?",
        "start a new run; a resume may only change data.batch_size",
        "a resume can set values, but not delete or sweep them",
    ):
        assert words in output.err, output.err
    assert attempts(run) == ["001"]


def test_what_a_resume_changes_holds_from_then_on(run, command):
    frozen = (run / "config.yaml").read_bytes()
    second = resumed(run, command, "trainer.max_epochs=5", "trainer.devices=2")
    assert second.changes == {"trainer.max_epochs": 5, "data.batch_size": 4}
    assert second.global_batch_size == 8 == launched(run).global_batch_size
    assert "the global batch stays 8" in " ".join(second.notes)
    third = resumed(run, command, "trainer.max_epochs=6")
    assert third.changes == {"trainer.max_epochs": 6, "data.batch_size": 4}
    assert third.resources.devices == 2
    assert (run / "config.yaml").read_bytes() == frozen
    output = command("resume", str(run), "trainer.devices=3", "trainer.max_epochs=7")
    assert output.code == 2 and "\n  trainer.devices: " in output.err
    notes = resumed(run, command, "trainer.devices=3", "data.batch_size=5").notes
    assert "changes from 8 to 15, as asked for" in " ".join(notes)


def test_a_resume_under_another_strategy_or_logger(start, command):
    """It is called by its name, drops the last one's settings, and may end writing slices."""
    run = start("name=x", "strategy=fsdp", "checkpoint.sharded=true", "tracking=mlflow")
    resume = ("resume", str(run))
    # What changes nothing is not a change: nothing to note, and nothing to do.
    output = command(*resume, "strategy=fsdp", "checkpoint.sharded=true")
    assert FINISHED in output.out and "from this attempt on" not in output.out
    typed = ("strategy=ddp", "strategy.comm_hook=bf16", "tracking=tensorboard")
    second = resumed(run, command, "trainer.max_epochs=5", *typed)
    assert list(second.changes.tracking) == ["tensorboard"]
    third = resumed(run, command, "strategy=pipeline", "checkpoint.sharded=false")
    assert third.changes["checkpoint.sharded"] is False
    assert "strategy.comm_hook" not in third.changes
    notes = {"strategy is ddp", "strategy.comm_hook is bf16", "tracking is tensorboard"}
    assert {f"{text} from this attempt on" for text in notes} <= {*second.notes}
    assert "strategy is pipeline from this attempt on" in third.notes
    assert attempts(run) == ["001", "002", "003"]


def test_resume_finds_a_run_that_was_moved(run, command, tmp_path):
    (tmp_path / "archive").mkdir()
    moved = run.rename(tmp_path / "archive/y")
    typed = ("resume", "archive/y", "trainer.max_epochs=9")
    output = command(*typed, "dry_run=true")
    assert output.code == 0 and "run        archive/y (resumes)" in output.out, output
    assert attempts(moved) == ["001"], "a dry run writes nothing"
    assert command(*typed).code == 0 and attempts(moved) == ["001", "002"]


def test_resume_of_what_ranks_of_others_began(start, command):
    """`torchrun -m distdl` began it; without torchrun the local launcher resumes it."""
    run = start("name=x", "trainer.devices=2")
    stored = launched(run)
    stored.where.launcher = {"_target_": "distdl.launchers.external.ExternalLauncher"}
    OmegaConf.save(stored, run / "attempts/001/launch.yaml")
    output = command("resume", str(run), "trainer.max_epochs=9", "dry_run=true")
    assert output.code == 0 and "2 processes under torch's elastic agent" in output.out
