"""Each detector of torchvision, by its name alone: it trains a step, validates, and predicts rows
and COCO's result files, which COCO's own program takes (`make matrix`)."""

import contextlib
import io
import json
import math

import pyarrow.parquet as pq
import pytest

from tests.conftest import UNCHECKED, distdl, losses, matrix_only, status
from tests.drawn_coco import CATEGORIES, draw

DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_resnet50_fpn",
    "fasterrcnn_resnet50_fpn_v2",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn_v2",
    "retinanet_resnet50_fpn",
    "retinanet_resnet50_fpn_v2",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)
VAL, FOUND = 3, 4  # images, and detections of each
SMALL = (
    "model=detector",
    "data=coco",
    "data.root=coco",
    "data.batch_size=2",
    "data.num_workers=0",
    "optimizer.lr=1e-4",
    "schedule.warmup_epochs=0",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=1",
    "trainer.log_every_n_steps=1",
    "tracking=none",
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    draw(folder / "coco", train=4, val=VAL, seed=1, keypoints=True)
    return folder


def options(name):
    """Random weights find as many objects as are kept. The sizes of SSDs are fixed."""
    limits = {"score_thresh": 0.0, "detections_per_img": FOUND}
    if "rcnn" in name:
        limits = {f"box_{key}": value for key, value in limits.items()}
    if not name.startswith("ssd"):
        limits |= {"min_size": 64, "max_size": 96}
    return [f"+model.network.{key}={value}" for key, value in limits.items()]


def about(name):
    """What of the data the detector learns."""
    if name.startswith("keypoint"):
        return ["data.labels=[person_keypoints]", "data.num_classes=1", "data.keypoints=true"]
    return [f"data.num_classes={len(CATEGORIES)}"]


def results(run, kind, truth):
    """COCO's result file, as its program reads it."""
    from pycocotools.coco import COCO

    file = run / f"predictions/coco_{kind}.json"
    if not file.exists():
        return None
    with contextlib.redirect_stdout(io.StringIO()):
        COCO(str(truth)).loadRes(str(file))
    return json.loads(file.read_text())


def test_these_are_all():
    from torchvision.models import detection, list_models

    assert list_models(module=detection) == [*DETECTORS]


@matrix_only
@pytest.mark.parametrize("name", DETECTORS)
def test_trains_validates_and_predicts(name, project):
    masks = name.startswith("mask")
    points = name.startswith("keypoint")
    words = [*SMALL, *about(name), *options(name), f"model.network.name={name}", f"name={name}"]
    done = distdl(*words, f"data.masks={str(masks).lower()}", cwd=project, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    run = project / "outputs/default" / name
    assert [*map(math.isfinite, losses(run).values())] == [True]
    metrics = status(run)["metrics"]
    assert metrics["val/samples"] == VAL
    kind = "mask" if masks else "box"
    if points:
        kind = "keypoint"
    assert 0 <= metrics[f"val/{kind}_ap"] <= 1

    done = distdl("resume", str(run), "task=predict", cwd=project, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = (run / "predictions").glob("*.parquet")
    rows = pq.read_table(file).to_pylist()
    assert len(rows) == VAL * FOUND
    label = "person_keypoints" if points else "instances"
    truth = project / f"coco/annotations/{label}_val2017.json"
    found = results(run, "bbox", truth)
    assert [each["score"] for each in found] == [row["score"] for row in rows]
    known = json.loads(truth.read_text())
    assert {row["image_id"] for row in rows} == {each["id"] for each in known["images"]}
    assert {row["category_id"] for row in rows} <= {each["id"] for each in known["categories"]}
    segments = results(run, "segm", truth)
    assert (segments is not None) == masks
    for each, row in zip(segments or (), rows, strict=masks):
        assert each["segmentation"] == json.loads(row["mask"])
    placed = results(run, "keypoints", truth)
    assert (placed is not None) == points
    for each, row in zip(placed or (), rows, strict=points):
        assert each["keypoints"] == row["keypoints"]
        assert len(row["keypoints"]) == 3 * 17
        assert all(seen == 1 for seen in row["keypoints"][2::3])
