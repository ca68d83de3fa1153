"""Augmentation of an image with boxes, masks and keypoints (`data.augment`), as uint8."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean

# The options of each augmentation, with their defaults; those of a flip are a plain number.
KEYS: dict[str, dict[str, Any]] = {
    "horizontal_flip": {},
    "multiscale": {"short_sides": [640, 672, 704, 736, 768, 800], "longest": 1333},
    "large_scale_jitter": {"size": 1024, "scale": [0.1, 2.0]},
    "photometric": {
        "brightness": [0.875, 1.125],
        "contrast": [0.5, 1.5],
        "saturation": [0.5, 1.5],
        "hue": [-0.05, 0.05],
        "p": 0.5,
    },
}
MOST_PIXELS = 8192  # of a side: more is probably a typo, and would fill any memory
FILL = (124, 116, 104)  # ImageNet's mean colour, around an image that is too small for a crop
SMALLEST = 1.0  # pixels of a box's sides: smaller ones are left out


class DetectionAugment:
    """`data.augment` of detection: a mapping. Every key is optional, and null turns it off.

    - photometric: {brightness, contrast, saturation, hue, p}: torchvision's
      RandomPhotometricDistort (Liu et al. 2016, arXiv 1512.02325).
    - multiscale: {short_sides, longest}: the short side gets one of these lengths, if the long one
      does not become longer than `longest`; torchvision's RandomShortestSize.
    - large_scale_jitter: {size, scale}: the image is scaled so that it fits a square of `size`
      times a factor from `scale`, and a square of `size` is cropped, or filled with the mean colour
      (Ghiasi et al. 2021, arXiv 2012.07177; torchvision's ScaleJitter and RandomCrop).
    - horizontal_flip: the probability of a flip (default 0.5, also without a mapping). Keypoints
      whose names begin with `left_` and `right_` change places.

    They are applied in this order. Boxes of which less than a pixel is left are left out.

    Args:
        config: The mapping.

    Raises:
        UserError: If `check` finds a problem.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        problems = list(self.check(config))
        if problems:
            raise UserError(*(replace(p, path=f"data.{p.path}") for p in problems))
        config = config or {}
        self.flip = float(config.get("horizontal_flip", 0.5) or 0)
        ops = [_op(key, config) for key in KEYS]
        self.ops = [op for op in ops if op is not None]

    @staticmethod
    def check(config: object) -> Iterable[Problem]:
        """Problems of `data.augment`; paths are relative to the data node."""
        if config is None:
            return
        if not isinstance(config, Mapping):
            yield Problem(
                "augment",
                what=f"is {config!r}, not a mapping",
                remedy="'data.augment={horizontal_flip: 0.5}'",
                code="wrong-type",
            )
            return
        for key, value in config.items():
            path = f"augment.{key}"
            if key not in KEYS:
                yield Problem(
                    path,
                    what="unknown",
                    remedy=did_you_mean(key, KEYS) or f"known keys: {', '.join(KEYS)}",
                    code="unknown-key",
                )
            elif key == "horizontal_flip":
                if value is not None and not _number(value, 0, 1):
                    yield Problem(
                        path,
                        what=f"is {value!r}, not a probability",
                        remedy=f"data.{path}=0.5",
                        code="out-of-range",
                    )
            elif value is not None and not isinstance(value, Mapping):
                yield Problem(
                    path,
                    what=f"is {value!r}, not a mapping",
                    remedy=_example(key),
                    code="wrong-type",
                )
            elif value is not None:
                yield from _wrong_values(path, KEYS[key], value)
        if config.get("multiscale") is not None and config.get("large_scale_jitter") is not None:
            yield Problem(
                "augment",
                what="uses both multiscale and large_scale_jitter: choose one of them",
                remedy="data.augment.multiscale=null",
                code="ambiguous",
            )

    def __call__(
        self, image: torch.Tensor, target: dict[str, Any], swapped: Sequence[int] = ()
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Augments an image and its target.

        Args:
            image: uint8 [3, H, W].
            target: "boxes", "masks" and "keypoints" as torchvision's tv_tensors, the last of them
                [N, P, 2], with "seen" float32 [N, P]; all but boxes may be missing. Other tensors
                are [N].
            swapped: For each keypoint the one in whose place it comes by a flip, [P].
        """
        seen: Any = tv_tensors.Image(image)
        for op in self.ops:
            seen, target = op(seen, target)
        if random.random() < self.flip:
            seen = F.horizontal_flip(seen)
            geometry = ("boxes", "masks", "keypoints")
            flipped = {key: F.horizontal_flip(target[key]) for key in geometry if key in target}
            target = {**target, **flipped}
            if "keypoints" in target and swapped:
                for key in ("keypoints", "seen"):
                    target[key] = tv_tensors.wrap(target[key][:, list(swapped)], like=target[key])
        return seen.as_subclass(torch.Tensor), _inside(target)


def _inside(target: dict[str, Any]) -> dict[str, Any]:
    """Boxes cut at the border; without objects of which nothing is left."""
    boxes = F.clamp_bounding_boxes(target["boxes"]).as_subclass(torch.Tensor)
    kept = ((boxes[:, 2:] - boxes[:, :2]) >= SMALLEST).all(1)
    target = {**target, "boxes": boxes}
    left = {key: value[kept] for key, value in target.items()}
    if "keypoints" in target:
        left["keypoints"] = tv_tensors.wrap(left["keypoints"], like=target["keypoints"])
    return left


def _op(key: str, config: Mapping[str, Any]) -> Any:  # noqa: ANN401  (a transform of torchvision)
    if key == "horizontal_flip" or config.get(key) is None:
        return None
    options = {**KEYS[key], **config[key]}
    if key == "multiscale":
        sides = [*options["short_sides"]]
        return v2.RandomShortestSize(sides, max_size=options["longest"], antialias=True)
    if key == "photometric":
        ranges = {k: tuple(options[k]) for k in ("brightness", "contrast", "saturation", "hue")}
        return v2.RandomPhotometricDistort(**ranges, p=options["p"])
    square = (options["size"], options["size"])
    fill = {tv_tensors.Image: FILL, tv_tensors.Mask: 0, "others": 0}
    jitter = v2.ScaleJitter(square, scale_range=tuple(options["scale"]), antialias=True)
    return v2.Compose([jitter, v2.RandomCrop(square, pad_if_needed=True, fill=fill)])


def _example(key: str) -> str:
    inner = ", ".join(f"{name}: {value}" for name, value in KEYS[key].items())
    return f"'data.augment.{key}={{{inner}}}'"


# Of the options that are pairs or lists: the smallest and the largest number.
_LIMITS = {"hue": (-0.5, 0.5), "scale": (0.01, 10.0), "short_sides": (1, MOST_PIXELS)}


def _wrong_values(
    path: str, defaults: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterable[Problem]:
    for key, value in values.items():
        where = f"{path}.{key}"
        default = defaults.get(key)
        if key not in defaults:
            yield Problem(
                where,
                what="unknown",
                remedy=did_you_mean(key, defaults) or f"known keys: {', '.join(defaults)}",
                code="unknown-key",
            )
        elif key == "p":
            if not _number(value, 0, 1):
                yield Problem(
                    where,
                    what=f"is {value!r}, not a probability",
                    remedy=f"data.{where}=0.5",
                    code="out-of-range",
                )
        elif key in ("size", "longest"):
            if type(value) is not int or not 1 <= value <= MOST_PIXELS:
                yield Problem(
                    where,
                    what=f"is {value!r}, not a number of pixels from 1 to {MOST_PIXELS:,}",
                    remedy=f"data.{where}={default}",
                    code="out-of-range",
                )
        elif key == "short_sides":
            low, high = _LIMITS[key]
            if not _list(value) or not all(type(v) is int and low <= v <= high for v in value):
                yield Problem(
                    where,
                    what=f"is {value!r}, not a list of numbers of pixels from {low} to {high:,}",
                    remedy=f"'data.{where}={default}'",
                    code="wrong-type",
                )
        else:
            low, high = _LIMITS.get(key, (0.0, 10.0))
            pair = _list(value) and len(value) == 2 and all(_number(v, low, high) for v in value)
            if not pair or value[0] > value[1]:
                yield Problem(
                    where,
                    what=(
                        f"is {value!r}, not two numbers from {low:g} to {high:g}, the smaller first"
                    ),
                    remedy=f"'data.{where}={default}'",
                    code="wrong-type",
                )


def _list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0


def _number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and low <= value <= high
