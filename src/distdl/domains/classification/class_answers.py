"""What a classifier answers: the class of an image. This file goes into every model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distdl.domains.answers import Answers, Network, Shape
from distdl.images.crop import Crop, central_crop
from distdl.images.decoding import CropDecoder
from distdl.util.json_rules import Unsafe, listed, shown, whole

MOST_CLASSES = 1_000_000
LARGEST_SIDE = 8192
TOP = 5  # classes in an answer


def _class_name(value: object, where: str) -> str:
    if type(value) not in (str, int):
        raise Unsafe(f"{where}: {shown(value)} is not a name")
    return str(value)


class ClassAnswers(Answers[torch.Tensor, np.ndarray]):
    """Of an image its class, the probability, and those of the most probable classes.

    The model takes pixels uint8 [B, 3, S, S], and gives probabilities float32 [B, classes].
    """

    domain = "classification"
    in_rows = 1
    rules = {
        "classes": listed(_class_name),
        "image_size": whole(1, LARGEST_SIDE),
        "short_side": whole(1, LARGEST_SIDE),
    }

    def __init__(self, description: Mapping[str, Any]) -> None:
        super().__init__(description)
        self._decode_crop = CropDecoder("auto", self.max_pixels)
        self.classes: list[str] = description["classes"]
        self.image_size: int = description["image_size"]
        self.short_side: int = description["short_side"]
        if not 1 <= len(self.classes) <= MOST_CLASSES:
            raise Unsafe(f"{len(self.classes)} classes")
        if self.short_side < self.image_size:
            raise Unsafe("short_side is smaller than image_size")

    def description(self) -> dict[str, Any]:
        return {
            "classes": self.classes,
            "image_size": self.image_size,
            "short_side": self.short_side,
        }

    @property
    def names(self) -> list[str]:
        return self.classes

    def takes(self) -> Shape:
        return (None, 3, self.image_size, self.image_size)

    def gives(self) -> Sequence[Shape]:
        return ((None, len(self.classes)),)

    def seen(self, data: bytes) -> torch.Tensor:
        """uint8 [3, S, S]."""

        def choose(height: int, width: int) -> Crop:
            return central_crop(height, width, self.short_side, self.image_size)

        return self._decode_crop(data, choose)

    def example(self) -> torch.Tensor:
        return torch.zeros(3, self.image_size, self.image_size, dtype=torch.uint8)

    def found(self, network: Network, images: Sequence[torch.Tensor]) -> list[np.ndarray]:
        """Of each image the probabilities, float32 [number of classes]."""
        (probabilities,) = network(torch.stack([*images])).values()
        return [*probabilities.numpy()]

    def answer(self, found: np.ndarray, top_k: int | None) -> dict[str, Any]:
        """By the probabilities [number of classes] of an image."""
        count = TOP if top_k is None else max(1, top_k)
        best = np.argsort(-found, kind="stable")[:count]
        top = [{"class": self.classes[i], "probability": float(found[i])} for i in best]
        return {**top[0], "top": top}

    def gist(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        return dict(answer["top"][0])
