"""A small trained run, its exports, and Python without distdl."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import UNCHECKED, distdl, environment
from tests.unit.sample_data import write_photographs

CLASSES = ("ant", "bee", "cat")
TRAIN = 3
VAL = 7
DATA = ("data=imagenet", "data.root=images", "data.num_classes=3", "data.image_size=32")
SMALL = ("model=resnet18", "data.batch_size=4", "data.num_workers=0", "trainer.accelerator=cpu")
SHORT = ("trainer.max_epochs=1", "schedule.warmup_epochs=0", "tracking.mlflow.register=insects")
RUN = "outputs/default/r"
# What shares `project` runs in one process, which then makes it once.
EXPORTED = pytest.mark.xdist_group("exported")
# Refuses every import of distdl, as on a machine where it is not installed.
WITHOUT_DISTDL = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "distdl":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="session")
def project(tmp_path_factory):
    """A folder of photographs, and a run that was trained on them, whose model is registered."""
    folder = tmp_path_factory.mktemp("project")
    write_photographs(folder / "images", CLASSES, train=TRAIN, val=VAL)
    done = distdl(*DATA, *SMALL, *SHORT, "name=r", cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "agrees  with the network on 21 of 21 images" in done.stdout
    assert "champion is version 1" in done.stdout
    return folder


def export(project, *words, code=0, module=UNCHECKED):
    done = distdl("export", RUN, *words, cwd=project, module=module)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def pt2(project):
    """The folder of the run's `pt2` export."""
    export(project, "--to", "pt2")
    (folder,) = (project / RUN / "exports").glob("pt2-*")
    return folder


def outside(folder, code):
    """What `code` prints as JSON, in a Python of its own in `folder` that has no distdl."""
    more = {"PYTHONPATH": str(folder), "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    options = {"cwd": folder, "env": environment(**more), "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, "-c", WITHOUT_DISTDL + code], **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def validation_images(project):
    """In the order of their names."""
    root = project / "images/val"
    return [root / name / file for name in CLASSES for file in sorted(os.listdir(root / name))]


def accuracy(answers, images):
    pairs = zip(answers, images, strict=True)
    return sum(answer["class"] == path.parent.name for answer, path in pairs) / len(images)
