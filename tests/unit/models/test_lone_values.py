"""A batch norm that would get one value per channel is named before the start."""

from __future__ import annotations

import pytest

from distdl.models import ImageClassifier

NETWORK = {"_target_": "torchvision.models.resnet18", "num_classes": 4}
NODE = {"network": NETWORK, "num_classes": 4}
DATA = {"_target_": "distdl.data.SyntheticImages", "batch_size": 1, "image_size": 32}
TASK = {"task": {"_target_": "distdl.tasks.train"}}


def found(model=None, data=None, context=None, **more):
    config = {"data": {**DATA, **(data or {})}, **TASK, **more}
    given = {"local": True, "refused": [], "world_size": 1, "config": config, **(context or {})}
    return [*ImageClassifier.check({**NODE, **(model or {})}, given)]


def test_one_small_image_per_device_is_refused():
    (problem,) = found()
    assert problem.path == "norm"
    assert "batch norm in layer4.0.bn1 gets one value per channel" in problem.what
    assert "32 x 32 pixels" in problem.what
    assert "data.batch_size=2" in problem.remedy
    resized = {"image_size": 224, "resize": {"from": 32, "to": 64, "until_epoch": 3}}
    assert found(data=resized), "the smallest images count"
    assert found({"freeze": ["layer4"], "unfreeze_at": 2}), "it comes later"


@pytest.mark.parametrize(
    "what",
    [
        {"data": {"batch_size": 2}},
        {"data": {"image_size": 64}},
        {"data": {"_target_": "mine.Data"}},
        {"model": {"norm": "group"}},
        {"model": {"freeze": ["layer4"]}},
        {"model": {"network": {"_target_": "torchvision.models.vit_b_16", "num_classes": 4}}},
        {"context": {"batch_chosen_later": True}},
        {"context": {"world_size": 2}, "trainer": {"sync_batchnorm": True}},
        {"task": {"_target_": "distdl.tasks.validate"}},
        {"strategy": {"_target_": "distdl.strategies.PipelineStrategy"}},
    ],
)
def test_what_has_more_values_or_needs_none_is_not(what):
    assert not found(**what)
