"""Encoded image files: which file names are images, and how PIL loads them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from distdl.datasets.image_headers import FORMATS, MOST_PIXELS, DamagedImage, examine

if TYPE_CHECKING:
    from PIL import Image

# Names are compared in lower case, so `.JPEG` counts. A file with another ending is an image by its
# content (`distdl.datasets.left_out`).
EXTENSIONS = (
    ".jpg",
    ".jpeg",
    ".jpe",
    ".jfif",
    ".png",
    ".webp",
    ".bmp",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".pbm",
    ".pnm",
)


def is_image(name: str, endings: tuple[str, ...] = EXTENSIONS) -> bool:
    """Whether a file is an image, by its name. Excludes macOS's hidden files, like `._dog.jpg`."""
    return name.lower().endswith(endings) and not name.rpartition("/")[2].startswith(".")


def load_image(data: bytes, mode: str | None = None, most_pixels: int = MOST_PIXELS) -> Image.Image:
    """Loads an image with PIL, and converts it to a PIL mode.

    EXIF orientation is ignored, as in torchvision's ImageFolder.

    Raises:
        DamagedImage: It cannot be decoded, or `distdl.datasets.image_headers` refuses it.
    """
    from PIL import Image

    header = examine(data, most_pixels)
    if Image.MAX_IMAGE_PIXELS is not None and header.height * header.width > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = most_pixels  # the user's own limit
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
        return converted(image, mode) if mode else image
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and others
        unknown = isinstance(error, Image.UnidentifiedImageError)
        raise DamagedImage("its header is broken" if unknown else str(error)) from error


def converted(image: Image.Image, mode: str) -> Image.Image:
    """`image.convert(mode)`, but with 16 bits of grey scaled to 8, where PIL clips them."""
    from PIL import Image

    if image.mode.startswith("I"):
        grey = np.asarray(image).clip(0, 65535) / 257
        image = Image.fromarray(grey.round().astype(np.uint8))
    return image.convert(mode)
