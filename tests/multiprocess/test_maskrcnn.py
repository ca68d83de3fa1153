"""Mask R-CNN on a drawn set: killed with -9 inside an epoch, resumed to the same bits, and asked
for predictions, which are those of its validation. Two ranks: test_detection."""

import contextlib
import io
import json
import shutil

import pytest
import torch

from distdl.runs.checkpoints import CheckpointStore
from tests import drawn_coco
from tests.conftest import UNCHECKED, distdl, losses, matrix_only, samples
from tests.strategies import small_detector

# Four batches an epoch; a checkpoint every fifth step, and a kill after the sixth.
IMAGES, BATCH, KILLED_AT = 8, 2, 6
SMALL = (
    "+experiment=maskrcnn_coco",
    "debug=cpu",
    "data.num_classes=5",
    "model.network._target_=small_detector.Small",
    "data.image_size=null",
    "+model.network.box_score_thresh=0.0",
    "+model.network.box_detections_per_img=10",
    "model.network.min_size=48",
    "model.network.max_size=64",
    "trainer.limit_train_batches=null",
    "trainer.limit_val_batches=null",
    "checkpoint.every_n_steps=5",
    "checkpoint.keep_last=20",
    "callbacks=[default,record_samples]",
    "tracking=none",
)
KILLER = f'''"""Ends it with -9 inside the second epoch of the first attempt."""

import os
import signal
from pathlib import Path

from lightning.pytorch import Callback


class Killer(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == {KILLED_AT} and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine.py").write_text(KILLER)
    shutil.copy(small_detector.__file__, folder)
    drawn_coco.draw(folder / "coco", train=IMAGES, val=3, seed=1)
    return folder


def ran(project, *words):
    done = distdl(*words, cwd=project, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(project, name, *more):
    words = (*SMALL, "data.root=coco", f"data.batch_size={BATCH}", f"name={name}", *more)
    return distdl(*words, cwd=project, module=UNCHECKED)


def every_image_once(run):
    """Of each epoch, in the history that was kept."""
    first, second = samples(run)[1], samples(run)[2]
    begin = min(step for _, step in second)
    kept = {key: ids for key, ids in first.items() if key[1] < begin} | second
    for epoch in (0, 1):
        seen = sorted(i for (e, _), ids in kept.items() if e == epoch for i in ids)
        assert seen == list(range(IMAGES))


def weights(run):
    newest = CheckpointStore(run / "checkpoints").newest()
    return torch.load(newest, weights_only=True)["state_dict"]


@pytest.fixture(scope="module")
def whole(project):
    """A run that nobody has disturbed."""
    done = train(project, "whole")
    assert done.returncode == 0, done.stdout + done.stderr
    return project / "outputs/maskrcnn_coco/whole"


def test_killed_inside_an_epoch_it_resumes_to_the_same_bits(project, whole):
    done = train(project, "killed", "+callbacks.killer._target_=mine.Killer")
    assert done.returncode != 0
    killed = whole.with_name("killed")
    ran(project, "resume", str(killed))
    every_image_once(killed)
    assert losses(killed) == losses(whole)
    resumed = weights(killed)
    for name, value in weights(whole).items():
        assert torch.equal(resumed[name], value), name


@matrix_only
def test_predictions_are_what_a_validation_measures(project, whole):
    """By COCO's own program on the result JSON. What such a short training finds is made the truth
    in part, or all numbers were 0."""
    ran(project, "resume", str(whole), "task=predict", "task.checkpoint=last", "data.batch_size=3")
    results = {
        kind: json.loads((whole / f"predictions/coco_{kind}.json").read_text())
        for kind in ("bbox", "segm")
    }
    assert len(results["bbox"]) == len(results["segm"]) > 8
    other = shutil.copytree(project / "coco", project / "found")
    file = other / "annotations/instances_val2017.json"
    content = json.loads(file.read_text())
    pairs = [*zip(results["bbox"], results["segm"], strict=True)]
    content["annotations"] = [
        {
            "id": number,
            "image_id": box["image_id"],
            "category_id": box["category_id"],
            "iscrowd": 0,
            "bbox": box["bbox"],
            "area": box["bbox"][2] * box["bbox"][3],
            "segmentation": mask["segmentation"],
        }
        for number, (box, mask) in enumerate(pairs[::3], 1)
    ]
    file.write_text(json.dumps(content))
    again = ("task=validate", "task.checkpoint=last", f"data.root={other}")
    ran(project, "resume", str(whole), *again)
    numbers = json.loads((whole / "attempts/003/status.json").read_text())["metrics"]
    for kind, prefix in (("bbox", "box"), ("segm", "mask")):
        stats = cocos(file, results[kind], kind)
        assert stats[0] > 0.05
        for place, name in ((0, "ap"), (1, "ap50"), (8, "ar100")):
            # What Lightning logs is in single precision.
            assert numbers[f"val/{prefix}_{name}"] == pytest.approx(stats[place], rel=1e-6)


def cocos(file, results, kind):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(file))
        program = COCOeval(truth, truth.loadRes(results), kind)
        program.evaluate()
        program.accumulate()
        program.summarize()
    return program.stats.tolist()
