"""What is wrong with a command is reported in one go, sorted by its path."""

from __future__ import annotations

import re

import pytest

from tests.conftest import distdl

# What is typed, each of it wrong. The text needs nothing imported, and so ends the command soon.
TEXT = """
lrr=1 +trainer.max_epoch=3 data=imagenet seed=abc data.batch_size=many optimizer.lr_scaling=cubic
+callbacks.shell._target_=os.system +callbacks.foreign._target_=composer.Thing strategy=single
experiment_name=${projct.name} checkpoint.resume_from=${oc.env:NOT_SET_ANYWHERE}
+model.api_token=canary-5e11a0 +trainer.callbacks=[] data.image_size=0 schedule.warmup_epochs=-1
trainer.limit_train_batches=0
"""
CLASSES = """
optimizer.momentun=0.9 optimizer.class_path=mine.Adam data.num_classes=ten data.train_samples=3.0
+callbacks.ours._target_=distdl.callbacks.Progres optimizer.weight_decay=1e-4x
optimizer.nesterov=yes +callbacks.half.dtype=fp16 +callbacks.other._target_=own.cast.Casts
trainer.gradient_clip_val=1 +callbacks.stop._target_=lightning.pytorch.callbacks.EarlyStopping
"""
RIGHT = {
    TEXT: ["trainer.devices=2", "trainer.accelerator=cpu"],
    CLASSES: ["+callbacks.half._target_=own.Casts", "model._target_=own.Manual"],
}
# Where the problem is reported, if not at what was typed.
ELSEWHERE = {"data": "data.root", "callbacks.stop._target_": "callbacks.stop.monitor"}
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


def refused(*typed, cwd) -> tuple[list[str], str]:
    """The paths of the problems, in their order, and what was printed."""
    done = distdl(*typed, cwd=cwd)
    assert (done.returncode, done.stdout) == (2, ""), done
    assert "Traceback" not in done.stderr and "Error executing job" not in done.stderr
    assert list(cwd.iterdir()) == [], "a refused command writes no file"
    paths = re.findall(r"^  ([^ :]+):", done.stderr, re.MULTILINE)
    assert done.stderr.startswith(f"distdl: {len(paths)} problems, nothing was started\n")
    return paths, done.stderr


@pytest.mark.parametrize("words", [TEXT, CLASSES], ids=["text", "classes"])
def test_all_problems_in_one_go(words, tmp_path, tmp_path_factory) -> None:
    root = tmp_path_factory.mktemp("project")
    (root / "own").mkdir()
    (root / "own/casts.py").touch()
    (root / "own/__init__.py").write_text(OWN)
    typed = [*words.split(), *RIGHT[words], f"project.root={root}"]
    paths, printed = refused(*typed, cwd=tmp_path)
    keys = [word.lstrip("+").partition("=")[0] for word in words.split()]
    assert paths == sorted(ELSEWHERE.get(key, key) for key in keys), printed
    unchecked = printed.endswith("classes and their arguments were not checked yet\n")
    assert unchecked == (words is TEXT)
    assert "canary-5e11a0" not in printed, "a secret is not repeated"


@pytest.mark.usefixtures("no_child")
def test_what_each_part_of_the_first_stage_finds_is_reported_at_once(command) -> None:
    typed = ["checkpoint.resume_from=nowhere", "data.image_size=0", "trainer.limit_train_batches=0"]
    output = command(*typed)
    assert output.code == 2 and output.err.startswith("distdl: 3 problems, nothing was started\n")
    assert all(f"\n  {word.partition('=')[0]}" in output.err for word in typed)


def test_an_unknown_machine_is_one_problem(tmp_path) -> None:
    """Not two, as its devices cannot be counted either; nor does a wrong key beside it hide it."""
    typed = (
        "launcher=sagemaker launcher.instance_type=ml.p4d.24xlargee launcher.spott=true "
        "launcher.image=me/x launcher.bucket=mine launcher.role=arn:aws:iam::123456789012:role/x"
    )
    paths, printed = refused(*typed.split(), cwd=tmp_path)
    assert paths == ["launcher.instance_type", "launcher.spott"]
    assert "ml.p4d.24xlarge?" in printed and "did you mean launcher.spot?" in printed
