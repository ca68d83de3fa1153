"""Detector: any detector of torchvision, its initial weights, and what it says of an image."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torchvision.models import resnet50
from torchvision.models.detection import maskrcnn_resnet50_fpn
from torchvision.ops import FrozenBatchNorm2d

from distdl.callbacks.best import Best
from distdl.config import compose
from distdl.config import recipe as configs
from distdl.domains.detection.categories import Categories
from distdl.domains.domain import domain_of
from distdl.models import Detector, torchvision_detector
from distdl.models.detection_network import stages_of
from distdl.models.detection_weights import load_detector_weights
from tests.prepared import quiet_trainer, refusal

# A Mask R-CNN that takes a tenth of a second for an image.
SMALL = {
    "backbone": "resnet18",
    "min_size": 64,
    "max_size": 96,
    "rpn_pre_nms_top_n_train": 100,
    "rpn_post_nms_top_n_train": 20,
    "rpn_batch_size_per_image": 16,
    "box_batch_size_per_image": 16,
    "rpn_pre_nms_top_n_test": 60,
    "rpn_post_nms_top_n_test": 20,
    "box_detections_per_img": 5,
    "box_score_thresh": 0.0,
}
COCOS_IDS = Categories((1, 3, 18, 44, 90), ("disc", "square", "triangle", "cross", "ring"))


def small(name="maskrcnn_resnet50_fpn", seed=0, **options):
    torch.manual_seed(seed)
    return torchvision_detector(name, 5, **{**SMALL, **options})


def images(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, *size, generator=generator) for size in sizes]


def target(height, width, count):
    boxes = torch.tensor([[4.0, 5.0, 30.0, 40.0], [10.0, 10.0, 20.0, 30.0]])[:count]
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    masks[:, 8:25, 12:18] = 1
    return {"boxes": boxes, "labels": torch.arange(1, count + 1), "masks": masks}


def batch(*counts):
    pictures = images(*[(64, 48 + 8 * row) for row in range(len(counts))])
    targets = [target(*picture.shape[1:], n) for picture, n in zip(pictures, counts, strict=True)]
    return {
        "image": pictures,
        "target": targets,
        "weight": torch.ones(len(counts)),
        "index": torch.arange(len(counts)),
    }


class Loader(torch.utils.data.Dataset):
    """Batches as they are."""

    def __init__(self, *batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def loader(*batches):
    return torch.utils.data.DataLoader(Loader(*batches), batch_size=None)


def test_trains_with_each_loss_logged_and_validates_with_cocos_numbers(tmp_path):
    class Trained(Detector):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.001)

    trainer = quiet_trainer(tmp_path, max_epochs=1, log_every_n_steps=1)
    module = Trained(small(), 5)
    trainer.fit(module, loader(batch(2, 0), batch(0, 0)), loader(batch(1, 2, 0)))
    losses = {name for name in trainer.logged_metrics if name.startswith("train/")}
    expected = ("classifier", "box_reg", "mask", "objectness", "rpn_box_reg")
    assert losses == {f"train/loss_{name}" for name in expected}
    assert trainer.callback_metrics["val/samples"] == 3
    assert 0 <= trainer.callback_metrics["val/mask_ap"] <= 1
    assert trainer.callback_metrics["val/box_ap_large"] == -1  # there is no such object
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())


MAIN = {
    "maskrcnn_resnet50_fpn": "val/mask_ap",
    "fasterrcnn_resnet50_fpn": "val/box_ap",
    "keypointrcnn_resnet50_fpn": "val/keypoint_ap",
}


@pytest.mark.parametrize("name", MAIN)
def test_what_the_network_finds_decides_the_best_checkpoint(name):
    best = Best("val/acc1", "min")  # nobody has chosen
    best.judge(domain_of(Detector(small(name), 5)))
    assert (best.monitor, best.mode) == (MAIN[name], "max")
    typed = Best("val/acc1", "min", typed=True)
    typed.judge(domain_of(Detector(small(name), 5)))
    assert (typed.monitor, typed.mode) == ("val/acc1", "min")


def test_no_answer_depends_on_its_neighbours():
    module = Detector(small(), 5).eval()
    pictures = images((48, 64), (96, 40), (64, 64), (30, 120))
    with torch.no_grad():
        alone = [module([picture])[0] for picture in pictures]
        order = [2, 0, 3, 1]
        together = module([pictures[place] for place in order])
    for place, found in zip(order, together, strict=True):
        assert len(found) == SMALL["box_detections_per_img"]
        for name in ("boxes", "labels", "scores"):
            assert torch.equal(getattr(found, name), getattr(alone[place], name))
        assert found.masks == alone[place].masks
    with torch.no_grad():  # which torchvision's own batches do not give
        padded = module.network(pictures)
    assert any(
        not torch.equal(theirs["scores"], ours.scores)
        for theirs, ours in zip(padded, alone, strict=True)
    )


def test_no_step_depends_on_the_batch_that_a_training_began_with():
    """torchvision's pooling would keep the scales of its first batch, so that a resume, which
    begins with another one, would train otherwise."""
    small_ones = {"image": images((40, 40), (40, 40)), "target": [target(40, 40, 2)] * 2}
    others = batch(2, 1)
    losses = []
    for first in (small_ones, others):
        module = Detector(small(min_size=32, max_size=96), 5)
        module.log_dict = lambda *args, **kwargs: None
        module.training_step(first, 0)
        torch.manual_seed(1)
        losses.append(module.training_step(others, 1))
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn"])
def test_boxes_are_float32_under_bf16(name):
    options = {key: SMALL[key] for key in ("backbone", "min_size", "max_size")}
    options |= SMALL if name.startswith("mask") else {"score_thresh": 0.0}
    torch.manual_seed(0)
    network = torchvision_detector(name, 5, **options)
    for layer in network.modules():  # random boxes that are not those of the anchors
        if isinstance(layer, nn.Conv2d) and layer.out_channels in (12, 36):
            nn.init.normal_(layer.weight, std=0.1)
    module = Detector(network, 5).eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        found = module.network(images((64, 96)))[0]
    assert found["boxes"].dtype == torch.float32
    inner = found["boxes"][(found["boxes"] > 1) & (found["boxes"] < 63)]
    assert (inner.bfloat16().float() != inner).float().mean() > 0.5


def test_frozen_as_torchvision_freezes_them(monkeypatch):
    """Against torchvision's own builders, whose weights are put in place of a download."""
    from torchvision.models import _api, mobilenet_v3_large
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    for builder, classifier in (
        (maskrcnn_resnet50_fpn, resnet50),
        (fasterrcnn_mobilenet_v3_large_320_fpn, mobilenet_v3_large),
    ):
        state = classifier().state_dict()
        monkeypatch.setattr(_api, "load_state_dict_from_url", lambda *a, s=state, **k: dict(s))
        theirs = builder(weights=None, num_classes=6, weights_backbone="IMAGENET1K_V1")
        ours = Detector(
            torchvision_detector(builder.__name__, 5), 5, "x.pth", norm="frozen"
        ).network
        assert trained(ours) == trained(theirs)
        frozen = {n for n, m in theirs.named_modules() if isinstance(m, FrozenBatchNorm2d)}
        assert frozen == {n for n, m in ours.named_modules() if isinstance(m, FrozenBatchNorm2d)}
        assert len(frozen) > 40


def trained(network):
    return {name for name, each in network.named_parameters() if each.requires_grad}


def test_without_weights_nothing_is_frozen():
    network = small()
    every = {name for name, _ in network.named_parameters()}
    assert trained(Detector(network, 5, norm="frozen").network) == every
    assert not any(isinstance(module, FrozenBatchNorm2d) for module in network.modules())
    assert not any("layer3" in n for n in trained(Detector(network, 5, trainable_stages=1)))
    assert stages_of(nn.Sequential(nn.Linear(1, 1))) is None


def test_a_backbone_of_unknown_stages_is_trained_whole():
    network = torchvision_detector("ssdlite320_mobilenet_v3_large", 5)
    every = {name for name, _ in network.named_parameters()}
    assert trained(Detector(network, 5, "x.pth").network) == every
    problem = refusal(Detector, network, 5, "x.pth", trainable_stages=3)
    assert problem.remedy == "model.trainable_stages=null: all"


def test_weights_of_a_classifier_are_those_of_the_backbone(tmp_path):
    from torchvision.models import resnet18

    file = tmp_path / "resnet18.pth"
    torch.save(resnet18().state_dict(), file)
    network = small()
    load_detector_weights(network, file, COCOS_IDS)
    state = torch.load(file)
    assert torch.equal(network.backbone.body.layer4[1].conv2.weight, state["layer4.1.conv2.weight"])
    assert torch.equal(network.backbone.body.bn1.running_var, state["bn1.running_var"])
    other = small(backbone="resnet34")
    problem = refusal(load_detector_weights, other, file, COCOS_IDS)
    assert "another network than MaskRCNN or its backbone" in problem.what
    torch.save({**state, "bn1.bias": torch.full([64], torch.nan)}, file)
    problem = refusal(load_detector_weights, small(), file, COCOS_IDS)
    assert "has NaN or infinite values in bn1.bias" in problem.what


@pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "retinanet_resnet50_fpn"])
def test_ninety_one_classes_become_ours_by_cocos_ids(name, tmp_path):
    options = {key: SMALL[key] for key in ("backbone", "min_size", "max_size")}
    torch.manual_seed(1)
    theirs = torchvision_detector(name, 90, **options).eval()
    file = tmp_path / "coco.pth"
    torch.save(old_names(theirs.state_dict()), file)
    ours = torchvision_detector(name, 5, **options).eval()
    load_detector_weights(ours, file, COCOS_IDS)
    rows = [0, *COCOS_IDS.ids]
    features = torch.rand(7, 1024)
    if name.startswith("mask"):
        for scores, expected in zip(
            ours.roi_heads.box_predictor(features),
            theirs.roi_heads.box_predictor(features),
            strict=True,
        ):
            expected = expected.reshape(7, 91, -1)[:, rows].flatten(1)
            assert torch.allclose(scores, expected, atol=1e-6)
        mask = torch.rand(2, 256, 3, 3)
        expected = theirs.roi_heads.mask_predictor(mask)[:, rows]
        assert torch.allclose(ours.roi_heads.mask_predictor(mask), expected, atol=1e-6)
    else:
        layers = [torch.rand(1, 256, 4, 5)]
        expected = theirs.head(layers)["cls_logits"][:, :, rows]
        assert torch.allclose(ours.head(layers)["cls_logits"], expected, atol=1e-6)
        # The box of an anchor is that of all classes.
        expected = theirs.head(layers)["bbox_regression"]
        assert torch.equal(ours.head(layers)["bbox_regression"], expected)
    for name, value in ours.state_dict().items():
        if value.shape == theirs.state_dict()[name].shape:
            assert torch.equal(value, theirs.state_dict()[name]), name


def old_names(state):
    """Those of the published files, which torchvision's layers still translate."""
    for new, old in (
        (r"(inner_blocks|layer_blocks)\.(\d)\.0\.", r"\1.\2."),
        (r"rpn\.head\.conv\.0\.0\.", "rpn.head.conv."),
    ):
        state = {re.sub(new, old, name): value for name, value in state.items()}
    return state


def test_other_ids_and_other_files_are_told(tmp_path, caplog):
    theirs = small(seed=1).state_dict()
    file = tmp_path / "five.pth"
    torch.save(theirs, file)
    seven = torchvision_detector("maskrcnn_resnet50_fpn", 7, **SMALL)
    with caplog.at_level("WARNING"):
        load_detector_weights(seven, file, Categories.numbered(7))
    assert "cls_score.weight" in caplog.text
    assert torch.equal(seven.rpn.head.cls_logits.bias, theirs["rpn.head.cls_logits.bias"])
    problem = refusal(load_detector_weights, seven, tmp_path / "none.pth", COCOS_IDS)
    assert "no such file" in problem.what
    torch.save(nn.Linear(2, 2).state_dict(), file)
    problem = refusal(load_detector_weights, seven, file, COCOS_IDS)
    assert problem.path == "model.weights"


def test_torchvisions_own_weights_need_norms_without_eps(tmp_path, monkeypatch):
    import hashlib

    from distdl.models import detection_weights

    network = Detector(small(), 5, "x.pth", norm="frozen").network
    file = tmp_path / "coco.pth"
    torch.save(network.state_dict(), file)
    begin = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    monkeypatch.setitem(detection_weights.WITHOUT_EPS, begin, "maskrcnn_resnet50_fpn")
    problem = refusal(load_detector_weights, network, file, COCOS_IDS)
    assert problem.remedy.startswith("model.frozen_eps=0")
    exact = Detector(small(), 5, "x.pth", norm="frozen", frozen_eps=0.0).network
    load_detector_weights(exact, file, COCOS_IDS)


def test_the_published_files_without_eps_are_those_of_torchvision():
    from torchvision.models import detection

    from distdl.models.detection_weights import WITHOUT_EPS

    for name in WITHOUT_EPS.values():
        kind = next(w for n, w in vars(detection).items() if n.lower() == f"{name}_weights")
        digest = kind.COCO_V1.url.rpartition("-")[2].removesuffix(".pth")
        assert WITHOUT_EPS[digest] == name


KEYPOINTS = "model.network.name=keypointrcnn_resnet50_fpn"


@pytest.mark.parametrize(
    "words, path, what",
    [
        (["model.num_classes=4"], "model.num_classes", "data.num_classes is 80"),
        (["model.network.num_classes=7"], "model.num_classes", "is 80, and the network has 7"),
        (["model.freeze=[backbon]"], "model.freeze", "backbon"),
        (["model.keypoint_sigmas=[0.1]", KEYPOINTS], "model.keypoint_sigmas", "17 keypoints"),
        (["+data.keypoints=false", KEYPOINTS], "model.network", "KeypointRCNN learns keypoints"),
        (["strategy=pipeline"], "model", "no chain of layers"),
        (["+data.masks=false"], "model.network", "learns masks"),
        (["trainer.precision=bf16-true"], "model", "round boxes"),
        (["model.weights=/nowhere.pth"], "model.weights", "no such file"),
        (["model.network.name=maskrcnn_resnet50"], "model.network.name", "no detector"),
        (["+model.network.min_sizes=3"], "model.network.min_sizes", "takes no argument"),
        (["model.network.backbone=resnet19"], "model.network.backbone", "no ResNet"),
    ],
)
def test_is_refused_before_the_start(words, path, what):
    from distdl.validation.binding import Binding
    from distdl.validation.resolve import resolve

    config = compose.compose(["model=maskrcnn", "+data.num_classes=80", *words])
    values = resolve(config).values
    binding = Binding(
        {
            "config": values,
            "context": {"local": True, "world_size": 1},
            "trust": [(), ()],
            "expressions": [],
        }
    )
    binding.import_targets()
    binding.visit(values["model"], ("model",))
    found = [problem for problem in binding.findings.problems if problem.path == path]
    assert any(what in problem.what for problem in found), binding.findings.problems


def test_a_head_for_other_categories_and_targets_without_masks_are_refused():
    problem = refusal(Detector, small(), 4)
    assert (problem.path, problem.remedy) == (
        "model.num_classes",
        "model.num_classes=5, or a network for 4",
    )
    module = Detector(small(), 5)
    first = batch(1)
    del first["target"][0]["masks"]
    problem = refusal(module.training_step, first, 0)
    assert problem.what == "its targets have no masks, which MaskRCNN learns"


def test_debug_cuts_what_a_model_has_and_adds_nothing():
    detector = configs.recipe_of(compose.compose(["model=maskrcnn", "debug=cpu"])).model.network
    assert (detector.rpn_post_nms_top_n_train, detector.min_size) == (100, 96)
    assert "topk_candidates" not in detector
    assert configs.recipe_of(
        compose.compose(["model=retinanet", "debug=cpu"])
    ).model.network.keys() >= {"topk_candidates"}
    # Batch norm of all ranks needs GPUs.
    second = compose.compose(["+experiment=maskrcnn_v2_coco", "debug=cpu"])
    assert not second.trainer.sync_batchnorm
    classifier = compose.compose(["debug=cpu"])
    assert "min_size" not in classifier.model.network
    assert classifier.data.image_size == 64
