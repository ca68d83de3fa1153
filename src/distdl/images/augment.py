"""Augmentation of a training image after the crop (`data.augment`), as uint8."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from distdl.images.draws import GLOBAL, Draws
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean

# Mean and standard deviation of ImageNet's red, green and blue, for values from 0 to 1.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The options of each augmentation, with their defaults. One without options takes a plain value.
KEYS: dict[str, dict[str, Any]] = {
    "horizontal_flip": {},
    "rand_augment": {"ops": 2, "magnitude": 9},
    "trivial_augment": {},
    "color_jitter": {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0},
    "random_erasing": {"p": 0.25, "fill": "mean"},
}
FILLS = ("mean", "noise")
# Range of the erased share of the image, and of height / width: torchvision's and timm's defaults.
ERASED, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)


class Augment:
    """`data.augment`: a mapping. Every key is optional, and null turns it off.

    - horizontal_flip: the probability of a flip (default 0.5, also without a mapping).
    - rand_augment: {ops: 2, magnitude: 9}, torchvision's (Cubuk et al. 2019, arXiv 1909.13719).
    - trivial_augment: true, torchvision's TrivialAugmentWide (Mueller and Hutter 2021,
      arXiv 2103.10158).
    - color_jitter: {brightness, contrast, saturation, hue}, as torchvision's ColorJitter.
    - random_erasing: {p: 0.25, fill: mean or noise} (Zhong et al. 2017, arXiv 1708.04896). "mean"
      fills with the mean colour, as torchvision does. "noise" draws each pixel from a normal
      distribution, as timm's `--remode pixel` does, and clamps it to uint8.

    They are applied in this order, as in torchvision's references and in timm. torchvision's ops
    run on PIL images, which takes a third of the time that tensors would take.

    Args:
        config: The mapping.
        mean, std: The device normalises by these; for values from 0 to 1.

    Raises:
        UserError: If `check` finds a problem.
    """

    def __init__(
        self,
        config: Mapping[str, Any] | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        problems = list(self.check(config))
        if problems:
            raise UserError(*(replace(p, path=f"data.{p.path}") for p in problems))
        config = config or {}
        self.flip = float(config.get("horizontal_flip", 0.5) or 0)
        self.ops = _ops(config)
        erasing = config.get("random_erasing")
        self.erasing = {**KEYS["random_erasing"], **erasing} if erasing else None
        self._mean = torch.tensor(mean).view(3, 1, 1) * 255
        self._std = torch.tensor(std).view(3, 1, 1) * 255

    @staticmethod
    def check(config: Mapping[str, Any] | None) -> Iterable[Problem]:
        """Problems of `data.augment`; paths are relative to the data node."""
        if config is not None and not isinstance(config, Mapping):
            meant = config if config in KEYS else "rand_augment"
            yield Problem(
                "augment",
                what=f"is {config!r}, not a mapping",
                remedy=f"'data.augment={{{meant}: {_example(meant)}}}'",
                code="wrong-type",
            )
            return
        for key, value in (config or {}).items():
            path = f"augment.{key}"
            if key not in KEYS:
                yield Problem(
                    path,
                    what="unknown",
                    remedy=did_you_mean(key, KEYS) or f"known keys: {', '.join(KEYS)}",
                    code="unknown-key",
                )
            elif value is None:
                continue
            elif key == "horizontal_flip":
                if not _number(value, 1):
                    yield Problem(
                        path,
                        what=f"is {value!r}, not a probability",
                        remedy=f"data.{path}=0.5",
                        code="out-of-range",
                    )
            elif key == "trivial_augment":
                if not isinstance(value, bool):
                    yield Problem(
                        path,
                        what=f"is {value!r}, not true or false",
                        remedy=f"data.{path}=true",
                        code="wrong-type",
                    )
            elif not isinstance(value, Mapping):
                yield Problem(
                    path,
                    what=f"is {value!r}, not a mapping",
                    remedy=f"data.{path}={_example(key)}",
                    code="wrong-type",
                )
            else:
                yield from _wrong_values(path, KEYS[key], value)
        if config and config.get("rand_augment") and config.get("trivial_augment"):
            yield Problem(
                "augment",
                what="uses both rand_augment and trivial_augment: choose one of them",
                remedy="data.augment.trivial_augment=null",
                code="ambiguous",
            )

    def __call__(self, image: torch.Tensor, draws: Draws = GLOBAL) -> torch.Tensor:
        """Augments an image, uint8 [3, S, S]; the flip is part of the crop instead. torchvision's
        ops draw from torch's default generator, whatever `draws` is."""
        if self.ops:
            image = _through_pil(image, self.ops)
        if self.erasing and draws.random() < self.erasing["p"]:
            image = self._erased(image, draws)
        return image

    def _erased(self, image: torch.Tensor, draws: Draws) -> torch.Tensor:
        height, width = image.shape[-2:]
        for _ in range(10):  # like torchvision's RandomErasing.get_params
            area = height * width * draws.uniform(*ERASED)
            ratio = math.exp(draws.uniform(*map(math.log, ERASED_RATIO)))
            h = round(math.sqrt(area * ratio))
            w = round(math.sqrt(area / ratio))
            if 0 < h < height and 0 < w < width:
                break
        else:
            return image
        top, left = draws.randint(0, height - h), draws.randint(0, width - w)
        noise = self.erasing and self.erasing["fill"] == "noise"
        fill = draws.normal((3, h, w)) * self._std + self._mean if noise else self._mean
        image = image.clone()
        image[:, top : top + h, left : left + w] = fill.round().clamp(0, 255).to(torch.uint8)
        return image


def _example(key: str) -> str:
    """An example value of that key, as on the command line."""
    plain = {"horizontal_flip": "0.5", "trivial_augment": "true"}
    inner = ", ".join(f"{k}: {v}" for k, v in KEYS[key].items())
    return plain.get(key) or f"{{{inner}}}"


def _ops(config: Mapping[str, Any]) -> list[Callable[[Any], Any]]:
    """torchvision's ops, for PIL images."""
    wanted = ("rand_augment", "trivial_augment", "color_jitter")
    if not any(config.get(key) for key in wanted):
        return []
    # Imported only if it is needed, since the import takes a second.
    from torchvision.transforms import v2

    ops: list[Callable[[Any], Any]] = []
    if config.get("rand_augment"):
        options = {**KEYS["rand_augment"], **config["rand_augment"]}
        ops.append(v2.RandAugment(options["ops"], options["magnitude"]))
    if config.get("trivial_augment"):
        ops.append(v2.TrivialAugmentWide())
    if config.get("color_jitter"):
        ops.append(v2.ColorJitter(**config["color_jitter"]))
    return ops


def _through_pil(image: torch.Tensor, ops: Sequence[Callable[[Any], Any]]) -> torch.Tensor:
    from PIL import Image

    picture: Any = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    for op in ops:
        picture = op(picture)
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def _wrong_values(
    path: str, defaults: Mapping[str, Any], values: Mapping[str, Any]
) -> Iterable[Problem]:
    # torchvision has 31 magnitude bins, and allows a hue of at most 0.5.
    most = {"magnitude": 30, "hue": 0.5, "p": 1, "ops": 14}
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
        elif key == "fill":
            if value not in FILLS:
                yield Problem(
                    where,
                    what=f"is {value!r}",
                    remedy=f"data.{where}=mean or data.{where}=noise",
                    code="wrong-choice",
                )
        elif isinstance(default, int) and type(value) is not int:
            yield Problem(
                where,
                what=f"is {value!r}, not a whole number",
                remedy=f"data.{where}={default}",
                code="wrong-type",
            )
        elif not _number(value, most.get(key, math.inf)):
            limit = f" up to {most[key]}" if key in most else ""
            yield Problem(
                where,
                what=f"is {value!r}, not a number from 0{limit}",
                remedy=f"data.{where}={default}",
                code="out-of-range",
            )


def _number(value: object, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= most
