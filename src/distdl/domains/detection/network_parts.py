"""Parts of detectors of torchvision's form. This file goes into every model folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def part_of(network: nn.Module, path: str) -> nn.Module | None:
    """The layer at a dotted path; None: there is none."""
    module: object = network
    for name in path.split("."):
        module = getattr(module, name, None)
    return module if isinstance(module, nn.Module) else None


def classes_of(network: nn.Module) -> int | None:
    """How many classes a detector of torchvision's form tells apart, with the background; None: it
    is of another form."""
    scores = part_of(network, "roi_heads.box_predictor.cls_score")
    dense = part_of(network, "head.classification_head")
    for value in (
        getattr(scores, "out_features", None),
        getattr(dense, "num_classes", None),
        getattr(dense, "num_columns", None),  # SSD
    ):
        if isinstance(value, int):
            return value
    return None


@contextmanager
def no_scales_kept(network: nn.Module) -> Iterator[None]:
    """In the block, torchvision's pooling infers the scales of its feature maps from the images
    that it is given. It would keep those of the first ones that it ever saw, and of images of less
    than 46 pixels they are wrong. Behind the block it has what it had before."""
    from torchvision.ops import MultiScaleRoIAlign

    poolers = [each for each in network.modules() if isinstance(each, MultiScaleRoIAlign)]
    kept = [(each.scales, each.map_levels) for each in poolers]
    for each in poolers:
        each.scales = each.map_levels = None
    try:
        yield
    finally:
        for each, (scales, levels) in zip(poolers, kept, strict=True):
            each.scales, each.map_levels = scales, levels
