"""Scores encoded images by an exported model, with the preprocessing of the validation.

This file goes into every model folder, with all that it imports, so that a model answers the same
without distdl.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from distdl.data.crop import central_crop
from distdl.data.decoding import decoder
from distdl.datasets.image_files import DamagedImage
from distdl.serving.safe_loading import DESCRIPTION, checked_archive, read, refuse_onnx

# What untrusted bytes may be; PIL has readers for more, and one of them starts Ghostscript.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
# A file of some kilobytes can hold a billion pixels, which would fill the memory.
MOST_PIXELS = 50_000_000

# Pixels, uint8 [B, 3, S, S], to probabilities, float32 [B, number of classes].
Network = Callable[[torch.Tensor], np.ndarray]


class TooLarge(DamagedImage):
    """More than `MOST_PIXELS` pixels."""

    status_code = 413  # of the answer over HTTP


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
            load = {"model.pt2": _load_pt2, "model.onnx": _load_onnx}[name]
            self._network: Network = load(data, description)
        except Exception as error:  # torch and onnxruntime raise many
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{folder} cannot be read; export it again: {what}") from error
        self._decode = decoder("auto")

    def pixels(self, data: bytes) -> torch.Tensor:
        """An encoded image as the validation sees it, uint8 [3, S, S].

        Raises:
            DamagedImage: It is not a complete image of `FORMATS`.
            TooLarge: It has more than `MOST_PIXELS`.
        """
        refuse_large(data)
        image = self._decode(data)
        height, width = image.shape[-2:]
        crop = central_crop(height, width, self.short_side, self.image_size)
        if crop.to_height * crop.to_width > MOST_PIXELS:
            raise TooLarge(f"is {width} x {height} pixels: too long and narrow to resize")
        return crop.apply(image)

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


def refuse_large(data: bytes) -> None:
    """Raises DamagedImage or TooLarge by the header alone."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            pixels = image.height * image.width
    except Image.DecompressionBombError as error:
        raise TooLarge(str(error)) from None
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and others
        raise DamagedImage(f"is not an image ({', '.join(FORMATS)})") from error
    if pixels > MOST_PIXELS:
        raise TooLarge(f"has {pixels / 1e6:.0f} megapixels, more than {MOST_PIXELS / 1e6:.0f}")


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
    side, count = description["image_size"], len(description["classes"])
    if taken != [[3, side, side]] or given != [[count]]:
        raise ValueError(f"model.onnx takes {taken} and gives {given}, unlike {DESCRIPTION}")
    name = session.get_inputs()[0].name
    return lambda pixels: session.run(None, {name: pixels.contiguous().numpy()})[0]
