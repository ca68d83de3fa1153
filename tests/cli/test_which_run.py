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
def start(said, without_worker, tmp_path):
    """Starts commands whose workers "succeed" at once; returns the run's folder."""

    def started(*typed, folder="outputs/default/x"):
        said(*TINY, *typed)
        return tmp_path / folder

    return started


@pytest.fixture
def run(start):
    return start("name=x")


def resumed(run, said, *typed):
    """Resumes the run, which must succeed; returns the launch.yaml of the attempt."""
    said("resume", str(run), *typed)
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
    typed = [
        *(f"launcher.{setting}" for setting in launcher),
        "project.root=.",
        "trainer.devices=2",
        "output_dir=two",
    ]
    two = start("name=x", *typed, folder="two/default/x")
    text = (run / "config.yaml").read_text()
    assert text == (two / "config.yaml").read_text()
    assert launched(two).resources.devices == 2
    assert launched(two).where.launcher.grace_seconds == 5
    assert str(run.parents[2]) not in text, "nor does it depend on the folder it was typed in"


@pytest.mark.usefixtures("no_child")
def test_what_has_finished_or_is_running_is_not_trained_again(run, said):
    shown = said(*TINY, "name=x")
    assert f"outputs/default/x {FINISHED}" in shown
    assert "resume outputs/default/x trainer.max_epochs=6" in shown
    assert FINISHED in said("resume", str(run))
    set_status(run, state="RUNNING", **this_process())
    for typed in ([*TINY, "name=x"], ["resume", str(run), "trainer.max_epochs=9"]):
        assert "attempt 1 is running" in said(*typed, code=2)
    assert attempts(run) == ["001"]


def test_the_same_name_with_another_config_is_refused(run, said):
    before = (run / "config.yaml").read_bytes()
    shown = said(*TINY, "name=x", "optimizer.lr=0.7", "+tags=[b]", code=2)
    for words in ("default/x exists with another config", "-  lr: 0.1", "+  lr: 0.7"):
        assert words in shown
    advice = "resume outputs/default/x trainer.max_epochs="
    assert f"{advice}6\n" in shown
    assert f"{advice}8\n" in said(*TINY, "name=x", "trainer.max_epochs=8", code=2)
    assert (run / "config.yaml").read_bytes() == before
    assert attempts(run) == ["001"]


def test_the_name_of_a_run_that_failed_before_its_first_checkpoint(run, said):
    set_status(run, state="FAILED")
    again = (*TINY, "name=x", "optimizer.lr=0.7")
    assert "kept as outputs/default/x.failed-1" in said(*again, "dry_run=true")
    assert attempts(run) == ["001"]
    said(*again)
    assert "lr: 0.7" in (run / "config.yaml").read_text()
    assert attempts(run) == ["001"]
    assert "lr: 0.1" in (run.with_name("x.failed-1") / "config.yaml").read_text()
    # With a checkpoint to resume from, or rows of a prediction, its name is its own.
    for file in (f"checkpoints/epoch_000.ckpt{SUFFIX}", "predictions/_progress.json"):
        set_status(run, state="FAILED")
        (run / file).parent.mkdir(exist_ok=True)
        (run / file).touch()
        other = (*TINY, "name=x", "optimizer.lr=0.8")
        assert "exists with another config" in said(*other, code=2)
        (run / file).unlink()


def test_resume_refuses_what_would_make_it_another_run(run, said):
    typed = "optimizer.lr=0.5 model=resnet34 seed=3 optimizer.lrr=1 ~tracking trainer.max_epoch=3"
    typed = (*typed.split(), "trainer.max_epochs=4,5")
    shown = said("resume", "outputs/default/x", *typed, code=2)
    another = [f"{key}: would make it another run" for key in ("optimizer.lr", "model", "seed")]
    for words in (
        "7 problems, nothing was started",
        *another,
        "trainer.max_epoch: no such key [unknown-key]\n      did you mean trainer.max_epochs?",
        "start a new run; a resume may only change model.recompute, data.batch_size",
        "a resume can set values, but not delete or sweep them",
    ):
        assert words in shown, shown
    assert attempts(run) == ["001"]


@pytest.mark.parametrize("word", ["task._target_=distdl.tasks.validate", "task=validate"])
def test_a_resume_whose_task_evaluates_may_change_more(word, run, said):
    precise = "trainer.precision=bf16-mixed"
    shown = said("resume", "outputs/default/x", word, precise, code=2)
    assert "has no best.ckpt" in shown  # which is all that is wrong
    assert "precision" not in shown
    trains = said(
        "resume", "outputs/default/x", "task._target_=distdl.tasks.train", precise, code=2
    )
    assert "trainer.precision: would make it another run" in trains
    assert "trainer.precision only for a task that evaluates (task=validate, test, " in trains


def test_what_a_resume_changes_holds_from_then_on(run, said):
    frozen = (run / "config.yaml").read_bytes()
    second = resumed(run, said, "trainer.max_epochs=5", "trainer.devices=2")
    assert second.changes == {"trainer.max_epochs": 5, "data.batch_size": 4}
    assert second.global_batch_size == 8 == launched(run).global_batch_size
    assert "the global batch stays 8" in " ".join(second.notes)
    third = resumed(run, said, "trainer.max_epochs=6")
    assert third.changes == {"trainer.max_epochs": 6, "data.batch_size": 4}
    assert third.resources.devices == 2
    assert (run / "config.yaml").read_bytes() == frozen
    typed = ("resume", str(run), "trainer.devices=3", "trainer.max_epochs=7")
    assert "\n  trainer.devices: " in said(*typed, code=2)
    notes = resumed(run, said, "trainer.devices=3", "data.batch_size=5").notes
    assert "changes from 8 to 15, as asked for" in " ".join(notes)


def test_a_resume_under_another_strategy_or_logger(start, said):
    """It is called by its name, drops the last one's settings, and may end writing slices."""
    run = start("name=x", "strategy=fsdp", "checkpoint.sharded=true", "tracking=mlflow")
    # What changes nothing is not a change: nothing to note, and nothing to do.
    shown = said("resume", str(run), "strategy=fsdp", "checkpoint.sharded=true")
    assert FINISHED in shown
    assert "from this attempt on" not in shown
    typed = ("strategy=ddp", "strategy.comm_hook=bf16", "tracking=tensorboard")
    second = resumed(run, said, "trainer.max_epochs=5", *typed)
    assert list(second.changes.tracking) == ["tensorboard"]
    third = resumed(run, said, "strategy=pipeline", "checkpoint.sharded=false")
    assert third.changes["checkpoint.sharded"] is False
    assert "strategy.comm_hook" not in third.changes
    notes = {"strategy is ddp", "strategy.comm_hook is bf16", "tracking is tensorboard"}
    assert {f"{text} from this attempt on" for text in notes} <= {*second.notes}
    assert "strategy is pipeline from this attempt on" in third.notes
    assert attempts(run) == ["001", "002", "003"]


def test_resume_of_what_ranks_of_others_began(start, said):
    """`torchrun -m distdl` began it; without torchrun the local launcher resumes it."""
    run = start("name=x", "trainer.devices=2")
    stored = launched(run)
    stored.where.launcher = {"_target_": "distdl.launchers.external.ExternalLauncher"}
    OmegaConf.save(stored, run / "attempts/001/launch.yaml")
    shown = said("resume", str(run), "trainer.max_epochs=9", "dry_run=true")
    assert "2 processes under torch's elastic agent" in shown
    assert attempts(run) == ["001"], "a dry run writes nothing"
