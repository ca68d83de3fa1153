"""Scores encoded images by an exported model, with the preprocessing of the validation.

This file goes into every model folder, with all that it imports, so that a model answers the same
without distdl.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distdl.datasets.image_headers import MOST_PIXELS, Header, examine
from distdl.images.crop import Crop, central_crop
from distdl.images.decoding import CropDecoder
from distdl.tools.serving.safe_loading import DESCRIPTION, checked_archive, read, refuse_onnx

# Pixels, uint8 [B, 3, S, S], to probabilities, float32 [B, number of classes].
Network = Callable[[torch.Tensor], np.ndarray]


class Scorer:
    """The model of a folder that `distdl export` wrote.

    distdl's own copy of this class, under `distdl serve` and `deploy`, executes nothing of the
    folder (`safe_loading`). The copy in a folder is Python of whoever wrote the folder, and by
    design `mlflow models serve`, the scoring scripts and `python -m distdl_scoring.server` run it.

    Args:
        folder: With `model.json`, and `model.pt2` or `model.onnx`.

    Raises:
        ValueError: The folder is incomplete or damaged, or holds what could run code.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        try:
            description, name, data = read(folder)
            self.classes: list[str] = description["classes"]
            self.image_size: int = description["image_size"]
            self.short_side: int = description["short_side"]
            self.max_pixels: int = description.get("max_pixels", MOST_PIXELS)
            load = {"model.pt2": _load_pt2, "model.onnx": _load_onnx}[name]
            self._network: Network = load(data, description)
        except Exception as error:  # torch and onnxruntime raise many
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{folder} cannot be read; export it again: {what}") from error
        self._decode = CropDecoder("auto", self.max_pixels)

    def examine(self, data: bytes) -> Header:
        """Format and size of an encoded image. Raises DamagedImage and TooLarge."""
        return examine(data, self.max_pixels)

    def pixels(self, data: bytes) -> torch.Tensor:
        """An encoded image as the validation sees it, uint8 [3, S, S].

        Raises:
            DamagedImage: It is not a complete image of a format that is read.
            TooLarge: It has more than `max_pixels`, or would be too much work.
        """

        def choose(height: int, width: int) -> Crop:
            return central_crop(height, width, self.short_side, self.image_size)

        return self._decode(data, choose)

    @torch.inference_mode()
    def probabilities(self, pixels: Sequence[torch.Tensor]) -> np.ndarray:
        """Images as `pixels` returns them, to float32 [number of images, number of classes]."""
        return self._network(torch.stack([*pixels]))

    def answers(self, pixels: Sequence[torch.Tensor], top_k: int = 5) -> list[dict[str, Any]]:
        """Per image its class and probability, and under `top` those of the `top_k` best."""
        return [self.named(row, top_k) for row in self.probabilities(pixels)]

    def named(self, row: np.ndarray, top_k: int) -> dict[str, Any]:
        """The answer for one image, by its probabilities [number of classes]."""
        best = np.argsort(-row, kind="stable")[: max(1, top_k)]
        top = [{"class": self.classes[i], "probability": float(row[i])} for i in best]
        return {**top[0], "top": top}

    def score(self, images: Sequence[bytes], top_k: int = 5) -> list[dict[str, Any]]:
        """`answers` of encoded images."""
        return self.answers([self.pixels(data) for data in images], top_k)


def _load_pt2(data: bytes, description: Mapping[str, Any]) -> Network:
    archive = checked_archive(data, description)
    network = torch.export.load(archive).module()
    return lambda pixels: network(pixels).numpy()


def _load_onnx(data: bytes, description: Mapping[str, Any]) -> Network:
    import onnxruntime

    refuse_onnx(data)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    taken = [each.shape[1:] for each in session.get_inputs()]
    given = [each.shape[1:] for each in session.get_outputs()]
    side = description["image_size"]
    count = len(description["classes"])
    if taken != [[3, side, side]] or given != [[count]]:
        raise ValueError(f"model.onnx takes {taken} and gives {given}, unlike {DESCRIPTION}")
    name = session.get_inputs()[0].name
    return lambda pixels: session.run(None, {name: pixels.contiguous().numpy()})[0]
