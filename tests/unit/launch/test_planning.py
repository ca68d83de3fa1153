"""What cannot train is refused before a start, in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from distdl.config import compose
from distdl.launch import launch, planning
from distdl.runs.directory import RunDirectory
from distdl.util.errors import UserError

RUN = RunDirectory(Path("outputs/default/a b"))


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


def test_what_continues_a_run_has_the_words_that_only_the_user_may_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "launcher=mpi",
        "launcher.hosts=[localhost]",
        "launcher.python=python3 -s",
        "project.allow=[mine]",
        "~launcher.env",
        "trainer.accelerator=cpu",
        "trainer.devices=1",
    ]
    config = compose.compose(words)
    planned = planning.Plan(launch.of(config, compose.typed(config)), config, RUN, "default/a b")
    command = planned.resume_command("trainer.max_epochs=4")
    assert command == (
        "python -m distdl resume 'outputs/default/a b' trainer.max_epochs=4 "
        "'launcher.python=python3 -s' 'project.allow=[mine]'"
    )
