"""Networks of detectors: torchvision's by name, what of them is frozen, and what stays float32."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import nn
from torch.utils._pytree import tree_map

from distdl.domains.detection.network_parts import part_of
from distdl.util.errors import UserError
from distdl.util.ranges import Positive
from distdl.util.suggest import did_you_mean

# By torchvision's names of their versions with ResNet-50: the classes.
WITH_RESNET = {
    "maskrcnn_resnet50_fpn": "MaskRCNN",
    "fasterrcnn_resnet50_fpn": "FasterRCNN",
    "keypointrcnn_resnet50_fpn": "KeypointRCNN",
    "retinanet_resnet50_fpn": "RetinaNet",
    "fcos_resnet50_fpn": "FCOS",
}
# These look at strides from 8 to 128 pixels, not from 4 to 64.
WITHOUT_FIRST_LAYER = ("retinanet_resnet50_fpn", "fcos_resnet50_fpn")
RESNET = ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")
# What computes boxes, scores and masks from features. Everything after it is float32.
HEADS = (
    "rpn.head",
    "roi_heads.box_predictor",
    "roi_heads.mask_predictor",
    "roi_heads.keypoint_predictor",
    "head",
)


def torchvision_detector(
    name: str, num_classes: Positive, backbone: str | None = None, **options: object
) -> nn.Module:
    """A detector of torchvision, with random weights (`model.weights` names a file).

    Args:
        name: As in torchvision, such as "maskrcnn_resnet50_fpn".
        num_classes: Categories, without the background, which torchvision counts as one.
        backbone: Another ResNet of torchvision in place of resnet50, such as "resnet18", for the
            detectors in `WITH_RESNET`; None: that of the name.
        options: Arguments of torchvision's function and class, such as `min_size`. Those that are
            None are left out.

    Raises:
        UserError: torchvision has no detector of that name, or it cannot have this backbone or
            these options.
    """
    from torchvision.models import detection, get_model, list_models

    known = list_models(module=detection)
    if name not in known:
        raise UserError.at(
            "model.network.name",
            what=f"torchvision has no detector {name!r}",
            remedy=did_you_mean(name, known) or f"one of {', '.join(sorted(known))}",
            code="incomplete",
        )
    given = {key: value for key, value in options.items() if value is not None}
    _refuse_unknown(name, given)
    if backbone is not None:
        return _with_backbone(name, num_classes, backbone, given)
    given |= {"weights": None, "weights_backbone": None}  # its defaults would download them
    return get_model(name, num_classes=num_classes + 1, **given)


def options_of(name: str) -> set[str]:
    """The arguments that a detector of torchvision takes: those of its function, of its classes and
    of its transform."""
    from torchvision.models import get_model_builder
    from torchvision.models.detection.transform import GeneralizedRCNNTransform

    builder = get_model_builder(name)
    made = inspect.signature(builder).return_annotation
    parts = [builder, GeneralizedRCNNTransform.__init__]
    parts += [vars(base)["__init__"] for base in made.__mro__ if issubclass(base, nn.Module)]
    return {"_skip_resize"}.union(*(inspect.signature(part).parameters for part in parts))


def _refuse_unknown(name: str, options: Iterable[str]) -> None:
    """torchvision's R-CNNs take any argument in silence: they hand it to a part that ignores it."""
    known = options_of(name)
    for key in options:
        if key not in known:
            raise UserError.at(
                f"model.network.{key}",
                what=f"{name} takes no argument {key!r}",
                remedy=did_you_mean(key, known) or "remove it",
                code="unknown-key",
            )


def _with_backbone(
    name: str, num_classes: int, backbone: str, options: dict[str, object]
) -> nn.Module:
    from torchvision import models
    from torchvision.models import detection
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
    from torchvision.ops.feature_pyramid_network import LastLevelP6P7

    builders = {each: models.get_model_builder(each) for each in models.list_models(module=models)}
    known = [each for each, made in builders.items() if made.__module__.endswith(".resnet")]
    if name not in WITH_RESNET:
        raise UserError.at(
            "model.network.backbone",
            what=f"{name} cannot have another backbone",
            remedy=f"model.network.backbone=null, or one of {', '.join(WITH_RESNET)}",
            code="unsupported",
        )
    if backbone not in known:
        raise UserError.at(
            "model.network.backbone",
            what=f"torchvision has no ResNet {backbone!r}",
            remedy=did_you_mean(backbone, known) or f"one of {', '.join(sorted(known))}",
            code="incomplete",
        )
    features: dict[str, object] = {"norm_layer": nn.BatchNorm2d, "trainable_layers": 5}
    if name in WITHOUT_FIRST_LAYER:
        features |= {"returned_layers": [2, 3, 4], "extra_blocks": LastLevelP6P7(256, 256)}
    body = resnet_fpn_backbone(backbone_name=backbone, weights=None, **features)
    made = getattr(detection, WITH_RESNET[name])
    return made(body, num_classes=num_classes + 1, **options)


def body_of(network: nn.Module) -> nn.Module | None:
    """The part that comes from a classifier, as torchvision's detectors have it; None: there is no
    such part."""
    return part_of(network, "backbone.body")


def keypoints_of(network: nn.Module) -> int | None:
    """How many keypoints of an object a detector of torchvision's form finds; None: none."""
    layer = part_of(network, "roi_heads.keypoint_predictor.kps_score_lowres")
    return getattr(layer, "out_channels", None)


def needs_of(network: nn.Module) -> tuple[str, ...]:
    """What the network learns beside boxes and labels."""
    heads = {"masks": "roi_heads.mask_predictor", "keypoints": "roi_heads.keypoint_predictor"}
    return tuple(name for name, path in heads.items() if part_of(network, path) is not None)


def freeze_norms(network: nn.Module, eps: float) -> None:
    """Replaces every BatchNorm2d of the backbone by one that keeps the statistics and weights it
    will be given.

    Raises:
        UserError: The network has no backbone of torchvision's form.
    """
    from torchvision.ops import FrozenBatchNorm2d

    body = body_of(network)
    if body is None:
        raise UserError.at(
            "model.norm",
            what=f"{type(network).__name__} has no backbone.body, whose norms could be frozen",
            remedy="model.norm=batch",
            code="incomplete",
        )
    for name, module in [*body.named_modules()]:
        if isinstance(module, nn.BatchNorm2d):
            body.set_submodule(name, FrozenBatchNorm2d(module.num_features, eps))


def frozen(network: nn.Module, eps: float) -> nn.Module:
    """The network after `freeze_norms`."""
    freeze_norms(network, eps)
    return network


def has_stages(network: nn.Module) -> bool:
    """Whether the stages of its backbone are known. Those of an SSD are not."""
    body = body_of(network)
    return body is not None and stages_of(body) is not None


def train_last_stages(network: nn.Module, count: int) -> None:
    """Freezes the weights of the backbone, except those of its last `count` stages.

    Raises:
        UserError: The stages of this backbone are unknown.
    """
    body = body_of(network)
    stages = None if body is None else stages_of(body)
    if stages is None:
        raise UserError.at(
            "model.trainable_stages",
            what=f"the stages of the backbone of {type(network).__name__} are not known",
            remedy="model.trainable_stages=null: all",
            code="unsupported",
        )
    for stage in stages[: max(0, len(stages) - count)]:
        for module in stage:
            module.requires_grad_(False)


def stages_of(body: nn.Module) -> list[list[nn.Module]] | None:
    """The five or six stages of a ResNet or MobileNet, the first first; None: another network.

    As in torchvision, a ResNet's first norm is trained only if all of it is.
    """
    named = dict(body.named_children())
    if "layer4" in named:
        layers = [[named[name]] for name in RESNET if name.startswith("layer") and name in named]
        first = [named[name] for name in ("conv1", "bn1") if name in named]
        return [first, *layers]
    blocks = [*named.values()]
    strided = [place for place, block in enumerate(blocks) if getattr(block, "_is_cn", False)]
    if not strided:
        return None
    ends = [0, *strided, len(blocks) - 1, len(blocks)]
    return [blocks[start:stop] for start, stop in pairwise(ends)]


def keep_float32(network: nn.Module) -> None:
    """Makes the heads of torchvision's detectors return float32 under bf16-mixed and 16-mixed.

    torchvision computes boxes in the precision of the heads' outputs, and bfloat16 has 8 bits: at
    800 pixels, a step of 4.
    """
    for path in HEADS:
        if (head := part_of(network, path)) is not None:
            head.register_forward_hook(_in_float32)


def _in_float32(module: nn.Module, inputs: object, output: object) -> object:
    return tree_map(_widened, output)


def _widened(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
