"""Initial weights of a detector: of a classifier for its backbone, or of a whole detector.

torchvision's detectors for COCO tell 91 classes apart, by COCO's ids with their gaps. A detector of
80 categories takes from each of their heads the rows of its own ids.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from distdl.checkpoint import formats
from distdl.checkpoint.adapters import refuse_adapters
from distdl.checkpoint.convert import plain_weights
from distdl.checkpoint.settled import refuse_unsettled
from distdl.domains.detection.categories import Categories
from distdl.models.detection_network import body_of
from distdl.models.weights import refuse_broken
from distdl.runs.checkpoints import located
from distdl.util.errors import UserError

log = logging.getLogger(__name__)

COCOS = 91  # classes of torchvision's detectors: COCO's ids up to 90, and the background
REMEDY = "a file of the same detector, or of the classifier that is its backbone"
COUNTED = "num_batches_tracked"  # which FrozenBatchNorm2d has not
# Of a classifier, after what its backbone takes.
CLASSIFIERS_HEAD = ("fc.", "classifier.", "head.")
# What begins the names of a classifier's layers, where the backbone's begin with nothing.
FEATURES = "features."
# Parts of the names of layers that tell classes apart.
BY_CLASS = ("box_predictor.", "mask_fcn_logits.", "cls_logits.", "classification_head.module_list.")
# Layers of these names have four numbers a class; all others have one, or one for each anchor.
FOUR_EACH = ("bbox_pred",)
# The published files whose norms had no `eps` when they were trained: torchvision sets it to 0 when
# it loads them. A file is known by the first digits of its SHA-256, which are in its name, too.
WITHOUT_EPS = {
    "258fb6c6": "fasterrcnn_resnet50_fpn",
    "bf2d0c1e": "maskrcnn_resnet50_fpn",
    "fc266e95": "keypointrcnn_resnet50_fpn",
    "eeacb38b": "retinanet_resnet50_fpn",
}


def load_detector_weights(
    network: nn.Module, file: Path, categories: Categories, new_head: bool = False
) -> None:
    """Loads a file into a detector, in place.

    Args:
        file: `.pth`, `.safetensors`, any checkpoint of distdl or Lightning, or a run, of a
            classifier or of a detector.
        categories: Of the detector's labels.
        new_head: Whether the layers that tell classes apart keep their initial values.

    Raises:
        UserError: There is no such file, or its weights belong to another network.
    """
    file = located(file)
    checkpoint = formats.read(file)
    refuse_adapters(checkpoint, str(file))
    refuse_unsettled(checkpoint, str(file))
    weights = plain_weights(checkpoint["state_dict"])
    weights = {name: value for name, value in weights.items() if not name.endswith(COUNTED)}
    refuse_broken(file, weights)
    if fitting := _of_backbone(network, weights):
        network.load_state_dict(fitting, strict=False)
        left = [name for name in weights if name.startswith(CLASSIFIERS_HEAD)]
        counts = f"{len(fitting)} of {len(weights)} weights are taken for the backbone"
        text = "%s: %s; all others are random; left in the file: %s"
        log.info(text, file, counts, ", ".join(left) or "none")
        return
    random = _without_head(network, weights) if new_head else []
    random += _fit_heads(network, weights, categories)
    try:
        # Old files have other names, which torchvision's layers translate.
        seen = network.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise UserError.at(
            "model.weights",
            what=f"{file} holds the weights of another network: {error}",
            remedy=REMEDY,
            code="mismatch",
        ) from None
    missing = [k for k in seen.missing_keys if not k.endswith(COUNTED) and k not in random]
    if missing or seen.unexpected_keys:
        shown = ", ".join([*missing[:2], *seen.unexpected_keys[:2]])
        what = f"{file} holds the weights of another network than {type(network).__name__}"
        raise UserError.at(
            "model.weights", what=f"{what} or its backbone: {shown}", remedy=REMEDY, code="mismatch"
        )
    _refuse_eps(network, file)
    log.info("%s: %d weights of the detector", file, len(weights))
    if new_head:
        log.info("not loaded from %s, for a new head: %s", file, ", ".join(random))
    elif random:
        text = "not loaded from %s, since its classes have no COCO ids, or other ones: %s"
        log.warning(text, file, ", ".join(random))


def _of_backbone(
    network: nn.Module, weights: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The weights of a classifier, by the names in the network; empty if it is another one."""
    body = body_of(network)
    own = {k: v for k, v in body.state_dict().items() if not k.endswith(COUNTED)} if body else {}
    kept = {k: v for k, v in weights.items() if not k.startswith(CLASSIFIERS_HEAD)}
    found = {name.removeprefix(FEATURES): value for name, value in kept.items()}
    if found.keys() != own.keys() or any(found[k].shape != v.shape for k, v in own.items()):
        return {}
    return {f"backbone.body.{name}": value for name, value in found.items()}


def _without_head(network: nn.Module, weights: dict[str, torch.Tensor]) -> list[str]:
    """Drops what tells classes apart, in place: its names.

    Raises:
        UserError: The network has no such layers of torchvision's names.
    """
    dropped = [name for name in network.state_dict() if any(part in name for part in BY_CLASS)]
    if not dropped:
        raise UserError.at(
            "model.head",
            what=f"the layers of {type(network).__name__} that tell classes apart are not known",
            remedy="model.head=null",
            code="unsupported",
        )
    for name in dropped:
        weights.pop(name, None)
    return dropped


def _fit_heads(
    network: nn.Module, weights: dict[str, torch.Tensor], categories: Categories
) -> list[str]:
    """Takes the rows of the categories, in place, and drops what has other classes: its names."""
    classes = len(categories) + 1
    dropped = []
    has_cocos_ids = all(0 < identity < COCOS for identity in categories.ids)
    for name, own in network.state_dict().items():
        value = weights.get(name)
        if value is None or value.shape == own.shape or value.shape[1:] != own.shape[1:]:
            continue
        each, rest = divmod(len(value), COCOS)
        if has_cocos_ids and not rest and len(own) == each * classes:
            weights[name] = _rows(value, name, categories)
        else:
            dropped.append(name)
            del weights[name]
    return dropped


def _rows(value: torch.Tensor, name: str, categories: Categories) -> torch.Tensor:
    """The rows of the background and of the categories."""
    ids = torch.tensor([0, *categories.ids])
    layer = name.split(".")[-2]
    if layer in FOUR_EACH:
        return value.unflatten(0, (COCOS, -1))[ids].flatten(0, 1)
    return value.unflatten(0, (-1, COCOS))[:, ids].flatten(0, 1)


def _refuse_eps(network: nn.Module, file: Path) -> None:
    """Raises UserError if the norms add what they did not when these weights were trained."""
    from torchvision.ops import FrozenBatchNorm2d

    eps = {module.eps for module in network.modules() if isinstance(module, FrozenBatchNorm2d)}
    if eps <= {0.0}:
        return
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest[:8] in WITHOUT_EPS:
        what = f"{file} are torchvision's weights of {WITHOUT_EPS[digest[:8]]}, whose norms have no"
        raise UserError.at(
            "model.frozen_eps",
            what=f"{what} eps; here it is {max(eps):g}",
            remedy="model.frozen_eps=0, as in torchvision",
            code="mismatch",
        )
