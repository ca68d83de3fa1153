"""Fine-tuning: what a network takes of a file, what of it is frozen, and its layers in order."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn
from torchvision.models import resnet18, vit_b_16

from distdl.callbacks.metrics import rates
from distdl.models import Detector, ImageClassifier, torchvision_detector
from distdl.models.freezing import freeze
from distdl.models.parts import heads_of, layers_in, layers_of
from distdl.models.weights import load_weights
from distdl.optim.learning_rates import describe_groups, layer_rates
from distdl.optim.optimizers import build_optimizer
from tests.prepared import refusal


class Own(nn.Module):
    """A user's network: a parameter of its own, two branches, an odd name of its head."""

    def __init__(self, classes=10):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3) for _ in range(3))
        self.judge = nn.Linear(4, classes)

    def forward(self, images):
        x = self.stem(images) * self.scale
        for block in self.blocks:
            x = x[..., 1:-1, 1:-1] + block(x)
        return self.judge(x.mean((2, 3)))


def tiny_vit(classes=10):
    return timm.create_model("vit_tiny_patch16_224", num_classes=classes, depth=2, embed_dim=24)


NETWORKS = {
    "torchvision": (lambda classes: resnet18(num_classes=classes), "fc"),
    "timm": (tiny_vit, "head"),
    "own": (Own, "judge"),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_a_new_head_and_all_else_from_the_file(kind, tmp_path, caplog):
    build, head = NETWORKS[kind]
    file = tmp_path / "base.pth"
    saved = build(10).state_dict()
    torch.save(saved, file)
    for classes in (4, 10):  # with as many classes, too
        network = build(classes)
        before = copy.deepcopy(network.state_dict())
        caplog.clear()
        with caplog.at_level("INFO"):
            module = ImageClassifier(network, classes, weights=str(file), head="new")
        for name, value in module.network.state_dict().items():
            expected = before if name.startswith(f"{head}.") else saved
            assert value.equal(expected[name]), name
        rest = len(saved) - 2
        assert f"{rest} of {rest + 2} weights and buffers are from {file}" in caplog.text
        assert f"new: {head}.weight [{classes}, " in caplog.text
        assert f"left in the file: {head}.weight [10, " in caplog.text


def test_a_run_stands_for_its_best_checkpoint(tmp_path):
    (tmp_path / "attempts").mkdir()
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    network = resnet18(num_classes=3)
    problem = refusal(load_weights, network, tmp_path)
    assert problem.what == f"{tmp_path} has no checkpoint"
    (tmp_path / "checkpoints").mkdir()
    for number, name in enumerate(("last", "best")):
        saved = resnet18(num_classes=3).state_dict()
        saved["fc.bias"] = torch.full((3,), float(number))
        torch.save(saved, tmp_path / f"checkpoints/{name}.ckpt")
        load_weights(network, tmp_path)
        assert network.fc.bias.tolist() == [number] * 3


def test_a_file_that_lacks_the_head_and_old_counters(tmp_path):
    whole = resnet18().state_dict()
    saved = {k: v for k, v in whole.items() if k[:3] != "fc." and "num_batches" not in k}
    torch.save(saved, tmp_path / "backbone.pth")
    network = resnet18(num_classes=3)
    load_weights(network, tmp_path / "backbone.pth", "new", 3)
    assert network.conv1.weight.equal(saved["conv1.weight"])
    problem = refusal(load_weights, network, tmp_path / "backbone.pth")
    assert problem.path == "model.weights"
    assert "fc.bias" in problem.what


def test_what_does_not_fit_is_refused(tmp_path):
    file = tmp_path / "base.pth"
    torch.save(resnet18(num_classes=10).state_dict(), file)
    for network, classes, path, text in (
        (tiny_vit(4), 4, "model.weights", "of another network than VisionTransformer: "),
        (Own(4), 4, "model.weights", "of another network than Own: "),
        (resnet18(num_classes=4), 5, "model.head", "no layer of ResNet has 5 outputs"),
    ):
        problem = refusal(load_weights, network, file, "new", classes)
        assert problem.path == path
        assert text in problem.what


def states(network):
    return {name: value.clone() for name, value in network.state_dict().items()}


@pytest.mark.parametrize("kind", NETWORKS)
def test_only_the_head_is_trained(kind):
    build, head = NETWORKS[kind]
    module = ImageClassifier(build(10), 10, freeze=["backbone"], channels_last=False)
    trained = [name for name, p in module.network.named_parameters() if p.requires_grad]
    assert trained == [f"{head}.weight", f"{head}.bias"]
    before = states(module.network)
    for _ in range(2):
        module.eval()
        module.train()
        size = 224 if kind == "timm" else 32
        module(torch.randn(2, 3, size, size))
    assert all(value.equal(before[name]) for name, value in module.network.state_dict().items())
    assert module.network.training


def test_blocks_patterns_and_parameters_are_frozen_by_name():
    network = resnet18()
    frozen = freeze(network, ["conv1", "bn1", "layer[12]"])
    open_ones = {name.split(".")[0] for name, p in network.named_parameters() if p.requires_grad}
    assert open_ones == {"layer3", "layer4", "fc"}
    modes = {name.split(".")[0] for name in frozen.norms}
    assert modes == {"bn1", "layer1", "layer2"}
    vit = tiny_vit()
    freeze(vit, ["patch_embed", "cls_token", "pos_embed", "blocks.0"])
    closed = {name for name, p in vit.named_parameters() if not p.requires_grad}
    assert {"cls_token", "pos_embed"} < closed
    assert not [name for name in closed if name.startswith(("blocks.1", "norm", "head"))]


def test_misspelt_patterns_and_nothing_left_to_train():
    for patterns, what, remedy in (
        (["layr1"], "ResNet has no module or parameter 'layr1'", "did you mean layer1?"),
        (["layr[12].*"], "no module or parameter 'layr[12].*'", "did you mean layer[12].*?"),
        (["backbon"], "no module or parameter 'backbon'", "did you mean backbone?"),
        (["zzz"], "no module or parameter 'zzz'", "its parts are conv1, bn1, relu"),
        (["*"], "nothing is left to train in ResNet", "model.freeze=[backbone]"),
    ):
        problem = refusal(freeze, resnet18(), patterns, ["fc"])
        assert problem.path == "model.freeze"
        assert what in problem.what
        assert remedy in problem.remedy


def test_a_model_node_is_checked_before_the_start(tmp_path):
    weights = resnet18(num_classes=10).state_dict()
    torch.save(weights, tmp_path / "base.pth")
    broken = (tmp_path / "base.pth").read_bytes()[:1000]
    (tmp_path / "cut.pth").write_bytes(broken)
    torch.save({**weights, "conv1.weight": torch.zeros(64, 3, 5, 5)}, tmp_path / "wide.pth")
    torch.save({**weights, "bn1.bias": torch.full([64], math.nan)}, tmp_path / "nan.pth")
    network = {"_target_": "torchvision.models.resnet18", "num_classes": 4}
    node = {"network": network, "num_classes": 4, "weights": str(tmp_path / "base.pth")}
    context = {"local": True, "config": {}, "refused": []}
    assert not [*ImageClassifier.check({**node, "head": "new", "freeze": ["layer1"]}, context)]
    for more, path, text in (
        ({"freeze": ["layerr1"]}, "freeze", "layerr1"),
        ({"freeze": ["*"]}, "freeze", "nothing is left"),
        ({"head": "new", "weights": None}, "head", "no effect without"),
        ({"head": "new", "num_classes": 7}, "head", "has 7 outputs"),
        ({"network": {"_target_": "torchvision.models.resnet34"}}, "weights", "another network"),
        ({"weights": "nowhere.pth"}, "weights", "no such file"),
        ({"weights": f"{tmp_path}/cut.pth"}, "weights", f"{tmp_path}/cut.pth: is not a checkpoint"),
        (
            {"weights": f"{tmp_path}/wide.pth"},
            "weights",
            "it has conv1.weight [64, 3, 5, 5] in place of [64, 3, 7, 7], fc.weight [10, 512] in",
        ),
        (
            {"network": {"_target_": "torchvision.models.resnet34"}, "num_classes": 1000},
            "weights",
            "it lacks layer1.2.bn1.bias, layer1.2.bn1.running_mean, ",
        ),
        ({"weights": f"{tmp_path}/nan.pth", "head": "new"}, "weights", "infinite values in bn1.b"),
    ):
        problems = [*ImageClassifier.check(node | more, context)]
        assert [problem.path for problem in problems] == [path]
        assert text in problems[0].what
    gone = {**node, "weights": "nowhere.pth"}
    assert not [*ImageClassifier.check(gone, {**context, "resumes": True})]
    assert [*ImageClassifier.check({**gone, "lora": {"rank": 2}}, {**context, "resumes": True})]
    lora = {**node, "weights": None, "lora": {"rank": 2}}
    assert "beside random weights" in next(iter(ImageClassifier.check(lora, context)))
    pretrained = {**lora, "network": {**network, "weights": "DEFAULT"}}
    assert not [*ImageClassifier.check(pretrained, context)]
    dry = {"local": True, "config": {"dry_run": True}, "refused": []}
    (note,) = ImageClassifier.check({**node, "head": "new"}, dry)
    assert "120 of 122 weights and buffers are from" in note
    assert "new: fc.weight [4, 512], fc.bias [4]; left in the file: fc.weight [10, 512]" in note


def test_layers_in_the_order_of_forward():
    network = resnet18(num_classes=4)
    layers = layers_of(network, heads_of(network, 4))
    stages = [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert [*layers] == ["conv1", *stages, "fc"]
    assert layers["conv1"] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    with torch.device("meta"):
        vit = vit_b_16()
    layers = layers_of(vit, heads_of(vit, 1000))
    blocks = [f"encoder.layers.encoder_layer_{number}" for number in range(12)]
    assert [*layers] == ["conv_proj", *blocks, "heads.head"]
    assert {"class_token", "encoder.pos_embedding"} < {*layers["conv_proj"]}
    assert layers[blocks[-1]][-2:] == ["encoder.ln.weight", "encoder.ln.bias"]
    timms = tiny_vit()
    layers = layers_of(timms, heads_of(timms, 10))
    assert [*layers] == ["cls_token", "blocks.0", "blocks.1", "head"]
    assert layers["blocks.1"][-2:] == ["norm.weight", "norm.bias"]
    own = Own()
    assert layers_of(own, heads_of(own, 10)) == {
        "stem": ["scale", *(f"stem.{n}" for n in ("0.weight", "0.bias", "1.weight", "1.bias"))],
        **{f"blocks.{n}": [f"blocks.{n}.weight", f"blocks.{n}.bias"] for n in range(3)},
        "judge": ["judge.weight", "judge.bias"],
    }
    for each in (network, vit, timms, own):
        found = [n for names in layers_of(each, ()).values() for n in names]
        assert sorted(found) == sorted(name for name, _ in each.named_parameters())


SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "lr_scaling": "linear", "weight_decay": 1e-4}


def groups(module, **more):
    """The groups of an optimizer for a global batch of 512."""
    node = SGD | more
    of_layers = layer_rates(*layers_in(module), node)
    return build_optimizer(module, node, global_batch=512, rates=of_layers).param_groups


def test_each_layer_has_its_share_of_the_rate():
    module = ImageClassifier(resnet18(num_classes=4), 4)
    built = groups(module, layer_decay=0.5)
    layers = ["fc", "layer4.1", "layer4.0", "layer3.1", "layer3.0", "layer2.1"]
    layers += ["layer2.0", "layer1.1", "layer1.0", "conv1"]
    by_layer = {group["layer"]: group["lr"] for group in built}
    assert by_layer == pytest.approx({n: 0.2 * 0.5**i for i, n in enumerate(layers)})
    assert [(g["layer"], g["weight_decay"], len(g["params"])) for g in built[-2:]] == [
        ("conv1", 1e-4, 1),
        ("conv1", 0.0, 2),
    ]
    assert sum(len(group["params"]) for group in built) == len([*module.parameters()])
    assert describe_groups(built).startswith("fc 0.2, layer4.1 0.1, layer4.0 0.05, ")
    logged = rates([SimpleNamespace(param_groups=built)])
    assert logged["lr"] == 0.2
    assert logged["lr-SimpleNamespace/layer4.0"] == pytest.approx(0.05)
    assert len(logged) == 11


@pytest.mark.parametrize("kind", [*NETWORKS, "detector"])
def test_a_lower_rate_for_the_backbone(kind):
    if kind == "detector":
        module = Detector(torchvision_detector("maskrcnn_resnet50_fpn", 4, "resnet18"), 4)
        heads = {name for name, _ in module.named_parameters() if ".backbone.body." not in name}
    else:
        build, head = NETWORKS[kind]
        module = ImageClassifier(build(10), 10)
        heads = {f"network.{head}.weight", f"network.{head}.bias"}
    of_rate = {}
    for group in groups(module, backbone_lr=0.01):
        of_rate.setdefault(round(group["lr"], 6), set()).update(map(id, group["params"]))
    names = {id(p): name for name, p in module.named_parameters()}
    assert of_rate.keys() == {0.2, 0.02}
    assert {names[key] for key in of_rate[0.2]} == heads
    assert len(of_rate[0.02]) == len(names) - len(heads)


def test_a_module_whose_layers_are_unknown():
    problem = refusal(groups, nn.Linear(2, 2), layer_decay=0.5)
    assert problem.path == "optimizer.layer_decay"
    assert "pipeline_blocks()" in problem.remedy
    assert refusal(groups, nn.Linear(2, 2), backbone_lr=0.5).path == "optimizer.backbone_lr"


def test_what_is_trained_later_is_in_the_optimizer_from_the_start():
    module = ImageClassifier(Own(), 10, freeze=["stem", "blocks"], unfreeze_at=1)
    later = module.trained_later
    assert "network.stem.1.weight" in later
    optimizer = build_optimizer(module, SGD, global_batch=256, later=later)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 13
    for number, trained in ((0, False), (1, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ImageClassifier, "current_epoch", number)
            module.train()
            module.on_train_batch_start(None, 0)
        assert module.network.stem[0].weight.requires_grad is trained
        assert module.network.stem[1].training is trained
        module.train()
        assert module.network.stem[1].training is trained


def test_unfreezing_where_it_cannot_be():
    network = {"_target_": "torchvision.models.resnet18"}
    node = {"network": network, "num_classes": 1000, "freeze": ["conv1"], "unfreeze_at": 1}
    kinds = {
        "distdl.strategies.FSDPStrategy": False,
        "distdl.strategies.DeepSpeedStrategy": False,
        "distdl.strategies.PipelineStrategy": False,
        "lightning.pytorch.strategies.DeepSpeedStrategy": True,
        "lightning.pytorch.strategies.ModelParallelStrategy": True,
    }
    for target, refused in kinds.items():
        config = {"strategy": {"_target_": target}}
        context = {"local": True, "config": config, "refused": []}
        problems = [*ImageClassifier.check(node, context)]
        assert [problem.path for problem in problems] == ["unfreeze_at"] * refused
    for target in [*kinds][:3]:
        config = {"strategy": {"_target_": target}, "checkpoint": {"sharded": True}}
        problems = [*ImageClassifier.check(node, context | {"config": config})]
        assert [each.remedy for each in problems] == (
            ["checkpoint.sharded=false"] if "DeepSpeed" in target else []
        )
    problems = [*ImageClassifier.check(node | {"freeze": []}, context | {"config": {}})]
    assert [problem.what for problem in problems] == ["has no effect without model.freeze"]
