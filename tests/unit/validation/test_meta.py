"""A model that is built to be looked at downloads and reads no weights."""

import pytest
from omegaconf import OmegaConf
from torchvision.models import WeightsEnum

from distdl.tools.measure import step_parts
from distdl.validation import meta

RETINANET = {"_target_": "torchvision.models.detection.retinanet_resnet50_fpn", "num_classes": 5}
RESNET = {"_target_": "torchvision.models.resnet18", "weights": "DEFAULT"}


def test_weights_are_left_out_wherever_they_stand():
    node = {"parts": [{"backbone": RESNET}, [RESNET, 3]], "pretrained": True, "head": RETINANET}
    bare = meta.without_weights(node)
    resnet = {"_target_": "torchvision.models.resnet18"}
    assert bare["parts"] == [{"backbone": resnet}, [resnet, 3]]
    # The default of a detector's function downloads a backbone.
    assert bare["head"] == {**RETINANET, "weights": None, "weights_backbone": None}
    assert "pretrained" not in bare


def test_a_plan_of_a_detector_downloads_no_backbone(monkeypatch):
    def download(*_, **__):
        pytest.fail("weights are downloaded")

    monkeypatch.setattr(WeightsEnum, "get_state_dict", download)
    node = {"_target_": "distdl.models.Detector", "network": RETINANET, "num_classes": 4}
    module = step_parts.without_memory(OmegaConf.create({"model": node, "trainer": {}}))
    assert module.network.backbone is not None
