"""What is wrong with a command is told in one go, sorted by its path."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import distdl

# Everything that is wrong in one of these is told by one command: kind -> (what is typed, what is
# read). The first needs nothing imported, and so ends the command in a moment.
TEXT = {
    "unknown key": (["lrr=1"], ["lrr: unknown key", "did you mean optimizer.lr?"]),
    "unknown key, added": (
        ["+trainer.max_epoch=3"],
        ["trainer.max_epoch: ", "did you mean trainer.max_epochs?"],
    ),
    "missing value": (["data=imagenet"], ["data.root: missing", "write data.root=..."]),
    "wrong type": (["seed=abc"], ["seed: must be an integer, not 'abc'"]),
    "wrong type, nested": (["data.batch_size=many"], ["data.batch_size: must be an integer"]),
    "wrong value": (["optimizer.lr_scaling=cubic"], ["optimizer.lr_scaling: ", "linear"]),
    "foreign target": (
        ["+callbacks.shell._target_=os.system"],
        ["callbacks.shell._target_: os.system is outside the allowed packages"],
    ),
    "a package that could be allowed": (
        ["+callbacks.foreign._target_=composer.Thing"],
        ["composer.Thing is outside", "if you trust it: project.allow=[composer]"],
    ),
    "devices against the strategy": (
        ["strategy=single", "trainer.devices=2", "trainer.accelerator=cpu"],
        ["strategy: single trains on one device", "strategy=ddp"],
    ),
    "interpolation to nothing": (
        ["experiment_name=${projct.name}"],
        ["experiment_name: refers to projct.name, which is not in the config"],
    ),
    "unset variable": (
        ["checkpoint.resume_from=${oc.env:NOT_SET_ANYWHERE}"],
        ["the environment variable NOT_SET_ANYWHERE is not set", "export NOT_SET_ANYWHERE="],
    ),
    "plain secret": (
        ["+model.api_token=canary-5e11a0"],
        ["model.api_token: holds a secret as plain text", "${oc.env:"],
    ),
    "what distdl sets itself": (["+trainer.callbacks=[]"], ["trainer.callbacks: is set by distdl"]),
    "number out of range": (
        ["data.image_size=0"],
        ["data.image_size: must be an integer of at least 1"],
    ),
    "rate out of range": (
        ["schedule.warmup_epochs=-1"],
        ["schedule.warmup_epochs: must be greater than or equal to 0, not -1"],
    ),
    "a training of nothing": (
        ["trainer.limit_train_batches=0"],
        ["trainer.limit_train_batches: 0 is a training of no batches"],
    ),
}

CLASSES = {
    "unknown argument": (
        ["optimizer.momentun=0.9"],
        ["optimizer.momentun: torch.optim.SGD takes no argument", "optimizer.momentum?"],
    ),
    "LightningCLI's class": (
        ["optimizer.class_path=mine.Adam"],
        ["optimizer.class_path: ", "LightningCLI's word: optimizer._target_=mine.Adam"],
    ),
    "missing argument": (
        ["+callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping"],
        ["callbacks.stop.monitor: missing", "write callbacks.stop.monitor=..."],
    ),
    "target that cannot be imported": (
        ["+callbacks.ours._target_=distdl.callbacks.Progres"],
        ["callbacks.ours._target_: distdl.callbacks has no 'Progres'"],
    ),
    "number out of range, as the class says": (
        ["data.num_classes=ten"],
        ["data.num_classes: must be an integer of at least 1, not 'ten'"],
    ),
    "3.0 for 3": (["data.train_samples=3.0"], ["write data.train_samples=3"]),
    "a number for a tensor": (
        ["optimizer.weight_decay=1e-4x"],
        ["optimizer.weight_decay: must be a number or a tensor, not '1e-4x'"],
    ),
    "another type": (
        ["optimizer.nesterov=yes"],
        ["optimizer.nesterov: must be true or false, not 'yes'", "write optimizer.nesterov=true"],
    ),
    "no dtype": (
        ["+callbacks.half._target_=own.Casts", "+callbacks.half.dtype=fp16"],
        ["callbacks.half.dtype: must be a dtype of torch or null, not 'fp16'", "torch.float16?"],
    ),
    "a module's name": (
        ["+callbacks.other._target_=own.cast.Casts"],
        ["callbacks.other._target_: own has no 'cast'", "did you mean own.casts?"],
    ),
    "clipping by the Trainer": (
        ["model._target_=own.Manual", "trainer.gradient_clip_val=1"],
        ["trainer.gradient_clip_val: the model steps its optimizers itself", "clip_gradients"],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("refused")


OWN = """
import torch
from lightning.pytorch import Callback, LightningModule

class Casts(Callback):
    def __init__(self, dtype: torch.dtype | None = None): self.dtype = dtype

class Manual(LightningModule):
    def __init__(self, **arguments):
        super().__init__()
        self.automatic_optimization = False
"""


@pytest.fixture(scope="module", params=[TEXT, CLASSES], ids=["text", "classes"])
def all_wrong(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Every mistake of one table, and what the command said to them."""
    typed = [word for words, _ in request.param.values() for word in words]
    if request.param is CLASSES:
        root = tmp_path_factory.mktemp("project")
        (root / "own").mkdir()
        (root / "own/casts.py").touch()
        (root / "own/__init__.py").write_text(OWN)
        typed.append(f"project.root={root}")
    return request.param, distdl(*typed, cwd=folder)


def check_refused(done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "Error executing job" not in done.stderr
    assert done.stdout == ""
    assert list(folder.iterdir()) == [], "a refused command writes no file"


def test_all_problems_in_one_go(all_wrong, folder) -> None:
    table, done = all_wrong
    check_refused(done, folder)
    head, *lines = done.stderr.splitlines()
    problems = [line for line in lines if line.startswith("  ") and line[2] != " "]
    assert head == f"distdl: {len(problems)} problems, nothing was started"
    unchecked = "classes and their arguments were not checked yet"
    assert (lines[-1] == unchecked) == (table is TEXT)
    paths = [line.strip().split(":")[0] for line in problems]
    assert paths == sorted(paths)
    assert len(problems) >= len(table) and len(set(problems)) == len(problems)
    for _, read in table.values():
        for words in read:
            assert words in done.stderr
    assert "canary-5e11a0" not in done.stdout + done.stderr, "a secret is not repeated"
    for right in ("trainer.devices", "trainer.accelerator", "model.network", "tracking"):
        assert f"\n  {right}" not in done.stderr


@pytest.mark.usefixtures("no_child")
def test_what_each_stage_could_find_is_told_at_once(command) -> None:
    wrong = ("data.image_size=0", "trainer.limit_train_batches=0", "schedule.warmup_epochs=-1")
    said = command("checkpoint.resume_from=nowhere", *wrong)
    assert said.code == 2 and said.err.startswith("distdl: 4 problems, nothing was started\n")
    for key in ("checkpoint.resume_from=nowhere", *(each.partition("=")[0] for each in wrong)):
        assert f"\n  {key}: " in said.err


def test_an_unknown_machine_is_one_problem(folder) -> None:
    """Not two, as its devices cannot be counted either; nor does a wrong key beside it hide it."""
    role = "launcher.role=arn:aws:iam::123456789012:role/x"
    place = f"launcher.image=me/x launcher.bucket=mine {role}"
    typed = "launcher=sagemaker launcher.instance_type=ml.p4d.24xlargee launcher.spott=true"
    done = distdl(*typed.split(), *place.split(), cwd=folder)
    check_refused(done, folder)
    assert "2 problems" in done.stderr, done.stderr
    assert "launcher.instance_type: " in done.stderr and "ml.p4d.24xlarge?" in done.stderr
    assert "did you mean launcher.spot?" in done.stderr
