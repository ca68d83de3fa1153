"""Encoded image files: which file names are images, and how PIL loads them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

# torchvision's list; names are compared in lower case, so `.JPEG` counts.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class DamagedImage(ValueError):
    """Bytes that cannot be decoded to a complete image."""


def is_image(name: str, endings: tuple[str, ...] = EXTENSIONS) -> bool:
    """Whether a file is an image, by its name. Excludes macOS's hidden files, like `._dog.jpg`."""
    return name.lower().endswith(endings) and not name.rpartition("/")[2].startswith(".")


def load_image(data: bytes, mode: str | None = None) -> Image.Image:
    """Loads an image with PIL, and converts it to a PIL mode.

    EXIF orientation is ignored, as in torchvision's ImageFolder. Raises DamagedImage.
    """
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        return converted(image, mode) if mode else image
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and others
        unknown = isinstance(error, Image.UnidentifiedImageError)
        reason = "is not an image" if unknown else str(error)
        raise DamagedImage(reason if data else "is empty") from error


def converted(image: Image.Image, mode: str) -> Image.Image:
    """`image.convert(mode)`, but with 16 bits of grey scaled to 8, where PIL clips them."""
    from PIL import Image

    if image.mode.startswith("I"):
        grey = np.asarray(image).clip(0, 65535) / 257
        image = Image.fromarray(grey.round().astype(np.uint8))
    return image.convert(mode)
