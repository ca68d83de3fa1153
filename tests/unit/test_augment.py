"""`data.augment`: each kind does what its name says, repeats with its seed, and is checked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from distdl.data.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from distdl.util.errors import UserError
from tests.unit.sample_data import seed_all

COLOURS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8))
MEAN, STD = (torch.tensor(values)[:, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
OFF = dict.fromkeys(("rand_augment", "trivial_augment", "color_jitter", "random_erasing"))


def drawn(config, seed=0, image=COLOURS):
    seed_all(seed)
    return Augment(config)(image)


@pytest.mark.parametrize(
    ("config", "flip"),
    [
        (None, 0.5),
        ({}, 0.5),
        (OFF, 0.5),
        ({"horizontal_flip": None}, 0),
        ({"horizontal_flip": 0}, 0),
    ],
)
def test_by_default_an_image_is_only_flipped(config, flip):
    assert Augment(config).flip == flip and torch.equal(drawn(config), COLOURS)


@pytest.mark.parametrize(
    "config",
    [
        {"rand_augment": {"ops": 2, "magnitude": 15}},
        {"trivial_augment": True},
        {"color_jitter": {"brightness": 0.4, "hue": 0.1}},
        {"random_erasing": {"p": 1.0}},
        {"random_erasing": {"p": 1.0, "fill": "noise"}},
    ],
)
def test_each_changes_the_image_and_repeats_with_its_seed(config):
    results = [drawn(config, seed) for seed in range(8)]
    assert all(r.shape == COLOURS.shape and r.dtype == torch.uint8 for r in results)
    assert sum(not torch.equal(r, COLOURS) for r in results) >= 4
    assert len({r.numpy().tobytes() for r in results}) >= 4
    assert torch.equal(drawn(config, 3), results[3])


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        ({"rand_augment": {"ops": 3, "magnitude": 12}}, v2.RandAugment(3, 12)),
        ({"trivial_augment": True}, v2.TrivialAugmentWide()),
        ({"color_jitter": {"contrast": 0.3}}, v2.ColorJitter(contrast=0.3)),
    ],
)
def test_they_are_torchvisions(config, theirs):
    for seed in range(5):
        torch.manual_seed(seed)
        expected = pil_to_tensor(theirs(to_pil_image(COLOURS)))
        assert torch.equal(drawn(config, seed), expected)


def test_erasing_fills_a_rectangle_with_what_becomes_zero():
    erased = 0
    for seed in range(30):
        image = torch.full((3, 64, 64), 255, dtype=torch.uint8)
        result = drawn({"random_erasing": {"p": 0.5}}, seed, image)
        assert image.min() == 255, "the decoded image is not written to"
        hole = (result != 255).all(0)
        if hole.any():
            erased += 1
            assert torch.equal(hole, hole.any(1)[:, None] & hole.any(0)[None])
            assert 0.015 < hole.float().mean() < 0.35
            assert ((result[:, hole] / 255 - MEAN) / STD).abs().max() < 0.01
    assert 7 < erased < 23


def test_noise_is_normal_after_normalisation():
    image = torch.zeros(3, 224, 224, dtype=torch.uint8)
    result = drawn({"random_erasing": {"p": 1.0, "fill": "noise"}}, 1, image)
    normalised = (result[:, result.sum(0) > 0] / 255 - MEAN) / STD
    assert abs(normalised.mean()) < 0.1 and 0.85 < normalised.std() < 1.05


@pytest.mark.parametrize(
    ("config", "path", "fragment"),
    [
        ({"randaugment": {}}, "augment.randaugment", "did you mean rand_augment?"),
        ("rand_augment", "augment", "'data.augment={rand_augment: {ops: 2, magnitude: 9}}'"),
        ("trivial_augment", "augment", "'data.augment={trivial_augment: true}'"),
        ({"rand_augment": 9}, "augment.rand_augment", "{ops: 2, magnitude: 9}"),
        ({"rand_augment": {"op": 2}}, "augment.rand_augment.op", "did you mean ops?"),
        ({"rand_augment": {"ops": 1.5}}, "augment.rand_augment.ops", "whole number"),
        ({"rand_augment": {"magnitude": 31}}, "augment.rand_augment.magnitude", "up to 30"),
        ({"color_jitter": {"hue": 0.7}}, "augment.color_jitter.hue", "up to 0.5"),
        ({"random_erasing": {"p": "often"}}, "augment.random_erasing.p", "number"),
        ({"random_erasing": {"fill": "black"}}, "augment.random_erasing.fill", "=mean or"),
        ({"horizontal_flip": 2}, "augment.horizontal_flip", "probability"),
        ({"trivial_augment": 1}, "augment.trivial_augment", "=true"),
        ({"trivial_augment": True, "rand_augment": {"ops": 2}}, "augment", "choose one of them"),
    ],
)
def test_invalid_settings(config, path, fragment):
    (problem,) = Augment.check(config)
    assert problem.path == path and fragment in f"{problem.what} {problem.remedy}"
    with pytest.raises(UserError, match=r"data\.augment"):
        Augment(config)
