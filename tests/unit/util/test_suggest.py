"""What was meant by what was typed."""

import pytest

from distdl.config import compose
from distdl.util.errors import UserError
from distdl.util.suggest import closest, closest_pattern, did_you_mean


def test_suggestions_compare_numbers_as_numbers():
    depths = [f"resnet{depth}" for depth in (18, 34, 50, 101, 152)]
    meant = {"resnet51": 50, "resnet49": 50, "resnet500": 50, "resnet35": 34, "resnet100": 101}
    for typed, depth in meant.items():
        assert closest(typed, depths) == f"resnet{depth}"
        assert did_you_mean(f"model.{typed}", [f"model.{d}" for d in depths]).endswith(f"{depth}?")
    assert closest("x" + "9" * 5000, depths) == "" == closest("a1", ["a9"])
    with pytest.raises(UserError, match="did you mean model=resnet50"):
        compose.compose(["model=resnet51"])


def test_two_letters_that_changed_places_are_a_near_miss():
    known = ["model", "checkpoint.mode", "trainer.max_epochs"]
    assert did_you_mean("modle", known) == "did you mean model?"


def test_a_pattern_keeps_its_stars_and_brackets():
    blocks = [f"layer{number}" for number in (1, 2, 3)]
    names = ["conv1", *blocks, *(f"{block}.conv1.weight" for block in blocks)]
    for typed, meant in (
        ("layr[12]", "layer[12]"),
        ("layr1.*", "layer1.*"),
        ("layer1.*.weigth", "layer1.conv1.weight"),
        ("network.layer[12].*", "layer[12].*"),
        ("encoder.*", ""),
        ("zzz", ""),
    ):
        assert closest_pattern(typed, names) == meant
    inner = ["network", *(f"network.{name}" for name in names)]
    assert closest_pattern("layer[12].*", inner) == "network.layer[12].*"
