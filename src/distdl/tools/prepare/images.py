"""Checks one image for a data set, repairs it, and scales it down if the user asks for that.

PIL decodes each image completely. The file's bytes are stored unchanged, except in these cases:

- A file named JPEG that is not a JPEG, or a CMYK JPEG, which many decoders do not read or read with
  wrong colours: re-encoded at quality 100 without subsampling, like in Inception's script
  (tensorflow/models, research/inception/inception/data/build_imagenet_data.py).
- A format that only PIL reads (BMP, TIFF, ...): stored as PNG, without loss.
- The user wants smaller images: every scaled image becomes a JPEG.
- The user wants a share of the images decoded (`raw_fraction`): pixels, as a binary PPM or PGM.

An EXIF orientation stays in the file, and pixels are not rotated, as usual for ImageNet.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import asdict, dataclass

from PIL import Image, ImageFile

from distdl.datasets.image_files import converted, load_image
from distdl.datasets.image_headers import MOST_PIXELS
from distdl.util.errors import Unwritten, UserError

# PIL's names of the formats that are kept; MPO, from phones, is a JPEG followed by other JPEGs.
KEPT = {"JPEG": ".jpg", "MPO": ".jpg", "PNG": ".png", "WEBP": ".webp"}
JPEGS = ("JPEG", "MPO")
JPEG_NAMES = (".jpg", ".jpeg", ".jpe", ".jfif")
DEFAULT_QUALITY = 90
WORTH_IT = 0.9  # re-encoding is lossy, so it must save at least a tenth
SUBSAMPLINGS = ("444", "422", "420")  # of colours; as PIL's numbers 0, 1, 2. PIL's default is 420
RAW = {"RGB": ".ppm", "L": ".pgm"}
ORIENTATION = 0x0112  # EXIF's tag


@dataclass(frozen=True)
class Treatment:
    """How the user wants each image to be changed, with loss.

    Images are scaled down until the longer side has at most `max_side` pixels, and the shorter side
    at most `short_side`. Every JPEG is encoded again at `quality`, if that saves a tenth of its
    bytes; None: only scaled images, at 90. An image with more than `max_pixels` counts as damaged.
    What is encoded again has the colours of `subsampling`, one of `SUBSAMPLINGS`; None: "420". Of
    all images `raw_fraction`, from 0 to 1, chosen by their bytes, are stored as pixels, which need
    no decoding and about ten times the room.
    """

    max_side: int | None = None
    short_side: int | None = None
    quality: int | None = None
    max_pixels: int = MOST_PIXELS
    subsampling: str | None = None
    raw_fraction: float = 0.0

    def settings(self) -> dict[str, int | float | str | None]:
        """As JSON, by which interrupted work is recognised; without what older versions lack."""
        values = asdict(self)
        newer = {"max_pixels": MOST_PIXELS, "subsampling": None, "raw_fraction": 0.0}
        return {k: v for k, v in values.items() if k not in newer or v != newer[k]}

    @property
    def lossy(self) -> bool:
        return any((self.max_side, self.short_side, self.quality))

    def __str__(self) -> str:
        parts = []
        if self.max_side:
            parts.append(f"longer side at most {self.max_side}")
        if self.short_side:
            parts.append(f"shorter side at most {self.short_side}")
        if self.lossy:
            encoded = "scaled images as JPEG"
            if self.quality:
                encoded = "all JPEGs, and scaled images as JPEG," if parts else "all JPEGs"
            colours = f", {':'.join(self.subsampling)}" if self.subsampling else ""
            parts.append(f"{encoded} at quality {self._quality}{colours} (lossy)")
        if self.raw_fraction:
            parts.append(f"{self.raw_fraction:.0%} of the images as pixels")
        return ", ".join(parts) or "as they are"

    @property
    def _quality(self) -> int:
        return self.quality or DEFAULT_QUALITY

    def check(self) -> None:
        """Raises UserError if a value is out of its range."""
        sides = {"--max-side": self.max_side, "--short-side": self.short_side}
        for option, side in (sides | {"--max-pixels": self.max_pixels}).items():
            if side is not None and side < 1:
                raise UserError.at(
                    option,
                    what=f"{side} is not a number of pixels",
                    remedy=f"{option} 256",
                    code="wrong-type",
                )
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise UserError.at(
                "--quality",
                what=f"{self.quality} is not from 1 to 100",
                remedy="--quality 90",
                code="out-of-range",
            )

        if self.subsampling is not None and not self.lossy:
            raise UserError.at(
                "--subsampling",
                what="is of images that are encoded again, and none is",
                remedy="add --quality 90 or --short-side 256, or leave it out",
                code="conflict",
            )
        if not 0 <= self.raw_fraction <= 1:
            raise UserError.at(
                "--raw-fraction",
                what=f"{self.raw_fraction} is not a share from 0 to 1",
                remedy="--raw-fraction 0.1",
                code="out-of-range",
            )

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after scaling, never larger and never 0."""
        long = max(width, height)
        short = min(width, height)
        scale = min(1.0, (self.max_side or long) / long, (self.short_side or short) / short)
        return max(1, round(width * scale)), max(1, round(height * scale))

    def apply(self, data: bytes, name: str) -> tuple[bytes, str, str]:
        """Checks one image, and changes it if necessary.

        Returns the bytes to store, their extension (".jpg", ".png" or ".webp"), and what was
        unusual about the image and how it was repaired, usually "".

        Raises:
            DamagedImage: It cannot be decoded.
            Unwritten: It can be decoded, but not encoded again.
        """
        image = load_image(data, most_pixels=self.max_pixels)
        size = self.size(*image.size)
        named_jpeg = name.lower().endswith(JPEG_NAMES)
        oddity = ""
        if image.format in JPEGS and image.mode not in ("L", "RGB"):
            oddity = f"{image.mode} as RGB"
        elif named_jpeg and image.format not in JPEGS:
            oddity = f"{image.format} named JPEG"
        elif image.format not in KEPT:
            oddity = f"{image.format} as {'PNG' if size == image.size else 'JPEG'}"
        if self._as_pixels(data):
            whole = plain(image)
            shown = whole if size == image.size else whole.resize(size, Image.Resampling.LANCZOS)
            return written(shown, "PPM"), RAW[shown.mode], oddity
        if size != image.size:
            smaller = plain(image).resize(size, Image.Resampling.LANCZOS)
            return self._jpeg(smaller, image, **self._lossy), ".jpg", oddity
        if oddity.endswith("as PNG"):
            return png(image), ".png", oddity
        if oddity:
            return self._jpeg(plain(image), image, quality=100, subsampling=0), ".jpg", oddity
        if image.format not in JPEGS:
            return data, KEPT[str(image.format)], ""
        if self.quality is not None:
            again = self._jpeg(plain(image), image, **self._lossy)
            if len(again) < WORTH_IT * len(data):
                return again, ".jpg", ""
        return data, ".jpg", ""

    def _as_pixels(self, data: bytes) -> bool:
        """Whether this image is one of `raw_fraction`: by its bytes, so that it is in each run."""
        number = int.from_bytes(hashlib.sha256(data).digest()[:8])
        return number < self.raw_fraction * 2**64

    @property
    def _lossy(self) -> dict[str, int]:
        """How PIL encodes again."""
        quality = {"quality": self._quality}
        if self.subsampling is None:
            return quality
        return {**quality, "subsampling": SUBSAMPLINGS.index(self.subsampling)}

    def _jpeg(self, image: Image.Image, original: Image.Image, **how: int | Image.Exif) -> bytes:
        turned = orientation(original)
        if turned != 1:
            exif = Image.Exif()
            exif[ORIENTATION] = turned
            how["exif"] = exif
        # With `optimize` the whole file must fit PIL's buffer, which has 1 or 2 bytes per pixel;
        # noise needs 5 ("Suspension not allowed here"). JPEG blocks have up to 16 x 16 pixels.
        room = 4 * len(image.getbands()) * (image.width + 15) * (image.height + 15)
        ImageFile.MAXBLOCK = max(ImageFile.MAXBLOCK, room)
        return written(image, "JPEG", optimize=True, **how)


def plain(image: Image.Image) -> Image.Image:
    """The image as grey or RGB, for JPEG."""
    return image if image.mode in ("L", "RGB") else converted(image, "RGB")


def png(image: Image.Image) -> bytes:
    """Encodes as PNG, without loss except for modes that PNG lacks, such as CMYK and floats."""
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I;16B"):
        image = converted(image, "RGB")
    return written(image, "PNG")


def written(image: Image.Image, form: str, **how: int | Image.Exif) -> bytes:
    """Encodes an image; raises Unwritten if PIL cannot."""
    memory = io.BytesIO()
    try:
        image.save(memory, form, **how)
    except (OSError, ValueError) as error:
        raise Unwritten(f"cannot be written as {form}: {error}") from error
    return memory.getvalue()


def orientation(image: Image.Image) -> int:
    """EXIF's orientation, 1 to 8; 1 is upright."""
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # ImageNet has images with broken EXIF, which no decoder reads
        return 1
