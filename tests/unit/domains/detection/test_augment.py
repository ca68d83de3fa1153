"""Augmentation of boxes, masks and keypoints: they stay on what they show."""

import random

import pytest
import torch
from torchvision import tv_tensors

from distdl.data.drawing import seed_all
from distdl.domains.detection.augment import DetectionAugment
from distdl.domains.detection.views import swaps
from tests.prepared import refusal

KINDS = {
    "flip": {"horizontal_flip": 1},
    "multiscale": {"multiscale": {"short_sides": [60, 90], "longest": 200}},
    "jitter": {"large_scale_jitter": {"size": 80, "scale": [0.3, 1.5]}},
    "photometric": {"photometric": {"p": 1.0}},
    "all": {"photometric": {}, "multiscale": {"short_sides": [70]}, "horizontal_flip": 0.5},
}


def scene(boxes, height=60, width=100):
    """A grey image in which each box is white, with its mask and its left upper corner."""
    image = torch.full((3, height, width), 60, dtype=torch.uint8)
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    for mask, (x1, y1, x2, y2) in zip(masks, boxes, strict=True):
        image[:, y1:y2, x1:x2] = 255
        mask[y1:y2, x1:x2] = 1
    canvas = (height, width)
    values = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    corners = values[:, [0, 1, 2, 1]].reshape(-1, 2, 2)
    target = {
        "boxes": tv_tensors.BoundingBoxes(values, format="XYXY", canvas_size=canvas),
        "masks": tv_tensors.Mask(masks),
        "keypoints": tv_tensors.KeyPoints(corners, canvas_size=canvas),
        "seen": torch.full((len(boxes), 2), 2.0),
        "labels": torch.arange(len(boxes)),
    }
    return image, target


@pytest.mark.parametrize("kind", KINDS)
def test_boxes_masks_and_points_stay_on_their_objects(kind):
    augment = DetectionAugment({"horizontal_flip": 0, **KINDS[kind]})
    left = 0
    for seed in range(12):
        seed_all(seed)
        image, target = augment(*scene([(5, 10, 35, 40), (60, 20, 95, 55)]), [1, 0])
        seed_all(seed)
        again, same = augment(*scene([(5, 10, 35, 40), (60, 20, 95, 55)]), [1, 0])
        assert torch.equal(image, again)
        assert all(torch.equal(target[key], same[key]) for key in target)
        assert image.dtype == torch.uint8
        assert len({len(value) for value in target.values()}) == 1
        left += len(target["boxes"])
        for row, mask in enumerate(target["masks"]):
            assert mask.shape == image.shape[-2:]
            x1, y1, x2, y2 = target["boxes"][row].tolist()
            ys, xs = torch.nonzero(mask, as_tuple=True)
            if len(xs) < 30:
                continue
            assert abs(int(xs.min()) - x1) < 2
            assert abs(int(ys.min()) - y1) < 2
            assert abs(int(xs.max()) + 1 - x2) < 2
            assert abs(int(ys.max()) + 1 - y2) < 2
            inside = image.float().mean(0)[mask.bool()].mean()
            outside = image.float().mean(0)[target["masks"].sum(0) == 0].mean()
            assert kind in ("photometric", "all") or inside > outside + 60
            (left_x, _), (right_x, _) = target["keypoints"][row].tolist()
            assert left_x < right_x
    assert left > 12
    empty, target = augment(*scene([]))
    assert len(target["boxes"]) == 0
    assert target["masks"].shape == (0, *empty.shape[-2:])


def test_a_flip_swaps_left_and_right():
    assert swaps(["nose", "left_eye", "right_eye", "left_ear"]) == [0, 2, 1, 3]
    augment = DetectionAugment({"horizontal_flip": 1})
    _, target = augment(*scene([(5, 10, 35, 40)]), [0, 1])
    assert target["keypoints"][0, 0, 0] > target["keypoints"][0, 1, 0]
    random.seed(0)
    flips = sum(
        bool(DetectionAugment({})(*scene([(5, 10, 35, 40)]))[1]["boxes"][0, 0] > 50)
        for _ in range(40)
    )
    assert 8 < flips < 32


@pytest.mark.parametrize(
    ("config", "path", "text"),
    [
        ("flip", "augment", "not a mapping"),
        ({"horizontal_flp": 0.5}, "augment.horizontal_flp", "unknown"),
        ({"horizontal_flip": 2}, "augment.horizontal_flip", "not a probability"),
        ({"horizontal_flip": True}, "augment.horizontal_flip", "not a probability"),
        ({"multiscale": True}, "augment.multiscale", "not a mapping"),
        ({"multiscale": {"short_sides": 640}}, "augment.multiscale.short_sides", "not a list"),
        ({"multiscale": {"short_sides": []}}, "augment.multiscale.short_sides", "not a list"),
        ({"multiscale": {"longest": 0}}, "augment.multiscale.longest", "not a number of pixels"),
        ({"multiscale": {"short_side": 1}}, "augment.multiscale.short_side", "unknown"),
        ({"large_scale_jitter": {"scale": [2, 0.1]}}, "augment.large_scale_jitter.scale", "first"),
        ({"large_scale_jitter": {"size": 1e3}}, "augment.large_scale_jitter.size", "pixels"),
        ({"photometric": {"hue": [-1, 1]}}, "augment.photometric.hue", "from -0.5 to 0.5"),
        ({"photometric": {"p": "x"}}, "augment.photometric.p", "not a probability"),
        ({"multiscale": {}, "large_scale_jitter": {}}, "augment", "choose one of them"),
    ],
)
def test_wrong_settings_are_refused(config, path, text):
    problem = refusal(DetectionAugment, config)
    assert problem.path == f"data.{path}"
    assert text in problem.what
