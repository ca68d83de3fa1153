"""Scores encoded images by an exported model, with the preprocessing of the validation.

This file goes into every model folder, with all that it imports, so that a model answers the same
without distdl.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from distdl.data.crop import central_crop
from distdl.data.decoding import decoder, jpeg_header
from distdl.datasets.image_files import DamagedImage

DESCRIPTION = "model.json"
# What untrusted bytes may be; PIL has readers for more, and one of them starts Ghostscript.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
# A file of some kilobytes can hold a billion pixels, which would fill the memory.
MOST_PIXELS = 50_000_000

Probabilities = Callable[[torch.Tensor], np.ndarray]


class TooLarge(DamagedImage):
    """More than `MOST_PIXELS` pixels."""


class Scorer:
    """The model of a folder that `distdl export` wrote.

    Args:
        folder: With `model.json`, and `model.pt2` or `model.onnx`.

    Raises:
        ValueError: The folder is incomplete or damaged, or the model could run code when loaded.
    """

    def __init__(self, folder: str | Path) -> None:
        folder = Path(folder)
        try:
            self.description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_bytes())
            self.classes = [str(name) for name in self.description["classes"]]
            self.image_size = int(self.description["image_size"])
            self.short_side = int(self.description["short_side"])
            files = dict(self.description["files"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"{folder / DESCRIPTION} cannot be read: {what}") from None
        for name, digest in files.items():
            path = folder / name
            if not path.is_file() or _sha256(path) != digest:
                raise ValueError(
                    f"{path} is missing or damaged: remove the folder, and export again"
                )
        self._decode = decoder("auto")
        load = _load_onnx if "model.onnx" in files else _load_pt2
        self.probabilities: Probabilities = load(folder)
        """uint8 [B, 3, S, S] to float32 [B, number of classes]."""

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

    def answers(self, pixels: Sequence[torch.Tensor], top_k: int = 5) -> list[dict[str, Any]]:
        """Per image its class and probability, and under `top` those of the `top_k` best."""
        if not pixels:
            return []
        rows = self.probabilities(torch.stack(list(pixels)))
        best = np.argsort(-rows, axis=1, kind="stable")[:, : max(1, top_k)]
        return [self._answer(row, order) for row, order in zip(rows, best, strict=True)]

    def _answer(self, row: np.ndarray, order: np.ndarray) -> dict[str, Any]:
        top = [{"class": self.classes[i], "probability": float(row[i])} for i in order]
        return {**top[0], "top": top}

    def score(self, images: Sequence[bytes], top_k: int = 5) -> list[dict[str, Any]]:
        """`answers` of encoded images."""
        return self.answers([self.pixels(data) for data in images], top_k)


def refuse_large(data: bytes) -> None:
    """Raises DamagedImage or TooLarge by the header alone."""
    header = jpeg_header(data)
    height, width = header[:2] if header else _size_by_pil(data)
    if height * width > MOST_PIXELS:
        megapixels = f"{height * width / 1e6:.0f} megapixels, more than {MOST_PIXELS / 1e6:.0f}"
        raise TooLarge(f"has {megapixels}")


def _size_by_pil(data: bytes) -> tuple[int, int]:
    from PIL import Image

    if not data:
        raise DamagedImage("is empty")
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return image.height, image.width
    except Image.DecompressionBombError as error:
        raise TooLarge(str(error)) from None
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and others
        raise DamagedImage(f"is not an image ({', '.join(FORMATS)})") from error


def _load_pt2(folder: Path) -> Probabilities:
    path = folder / "model.pt2"
    refuse_pickle(path)
    network = torch.export.load(path).module()

    def run(images: torch.Tensor) -> np.ndarray:
        with torch.inference_mode():
            return network(images).numpy()

    return run


def _load_onnx(folder: Path) -> Probabilities:
    import onnxruntime

    path = str(folder / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: session.run(None, {name: images.contiguous().numpy()})[0]


def refuse_pickle(path: Path) -> None:
    """Raises ValueError if torch would unpickle a part of this archive, which can run any code."""
    try:
        with zipfile.ZipFile(path) as archive:
            for item in archive.infolist():
                name = item.filename
                if name.endswith("_config.json"):
                    entries = json.loads(archive.read(item))["config"].values()
                    pickled = any(entry.get("use_pickle") is not False for entry in entries)
                else:
                    pickled = name.endswith((".pt", ".pkl")) and item.file_size > 0
                if pickled:
                    raise ValueError(f"{path} holds a pickle, which can run any code: {name}")
    except (OSError, zipfile.BadZipFile, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a model of torch.export: {error}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
