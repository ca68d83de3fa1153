"""Encoded images as files hold them: which names are images, and PIL, which reads all of them."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image

# torchvision's list; compared in lower case, so `.JPEG` counts.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class DamagedImage(ValueError):
    """Bytes that no decoder makes a complete image of."""


def is_image(name: str, endings: tuple[str, ...] = EXTENSIONS) -> bool:
    """By its name. Not what macOS hides beside an image: `._dog.jpg`."""
    return name.lower().endswith(endings) and not name.rpartition("/")[2].startswith(".")


def load_image(data: bytes, mode: str | None = None) -> Image.Image:
    """All pixels of an image, by PIL. EXIF orientation is ignored, as in torchvision's ImageFolder.

    Args:
        data: A file's bytes.
        mode: PIL's, to convert it to; None: as it is.

    Raises:
        DamagedImage: It is no image, or ends too early.
    """
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data))
        image.load()
        return image.convert(mode) if mode else image
    except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and others
        reason = "is no image" if isinstance(error, Image.UnidentifiedImageError) else str(error)
        raise DamagedImage(reason if data else "is empty") from error
