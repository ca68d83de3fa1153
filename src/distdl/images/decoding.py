"""Decoders of images: fast ones, and PIL as the reference.

Where a fast decoder would fail or give other pixels than PIL (CMYK, PNG, WebP, files with errors),
PIL decodes the file. EXIF orientation is ignored, as in torchvision's ImageFolder.

`CropDecoder` is the way from bytes to a square of pixels, for training, validation, predictions,
exports and servers: it takes `distdl.images.native` where that can decode the file.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch

from distdl.datasets.image_files import load_image
from distdl.datasets.image_headers import MOST_PIXELS, DamagedImage, Header, examine
from distdl.images.crop import Crop
from distdl.images.draws import GLOBAL, Draws
from distdl.images.native import EXAMPLE, WHOLE, Library, installed

log = logging.getLogger(__name__)

Decoder = Callable[[bytes], torch.Tensor]
# From an image's height and width to its crop.
Choose = Callable[[int, int], Crop]

# Of whole images, in the order in which `auto` tries them: fastest first (benchmarks/loader.py).
CPU_DECODERS = ("simplejpeg", "torchcodec", "pil")
# native decodes crops alone; nvjpeg decodes on the GPU, in distdl.images.nvjpeg.
DECODERS = ("auto", "native", *CPU_DECODERS, "nvjpeg")


def decoder(name: str = "auto", most_pixels: int = MOST_PIXELS) -> Decoder:
    """A function from a file's bytes to RGB pixels, uint8 [3, H, W].

    The memory layout is channels_last. The function can be pickled. It raises `DamagedImage` if the
    bytes are not an image or are truncated (it never returns an image with a grey bottom), and if
    `distdl.datasets.image_headers` refuses them.

    Args:
        name: One of `CPU_DECODERS`; "auto" and "native": the first that is installed and works.
        most_pixels: An image with more is refused.

    Raises:
        ImportError: The package of that name is missing, or does not load.
        ValueError: There is no such decoder.
    """
    name = whole_decoder(name)
    if name not in CPU_DECODERS:
        raise ValueError(f"unknown decoder {name!r}; known decoders: {', '.join(DECODERS)}")
    if name == "torchcodec":
        from torchcodec.decoders import decode_jpeg  # noqa: F401, new in torchcodec 0.16

        return functools.partial(decode_torchcodec, most_pixels=most_pixels)
    if name == "pil":
        return functools.partial(decode_pil, most_pixels=most_pixels)
    importlib.import_module(name)
    return functools.partial(decode_simplejpeg, most_pixels=most_pixels)


def whole_decoder(name: str) -> str:
    """The decoder of whole images that a name in a config means here: for "auto" and "native" the
    first that is installed and works."""
    if name in ("auto", "native"):
        return next(known for known in CPU_DECODERS if works(known))
    return name


def works(name: str) -> bool:
    """Whether a decoder's package is installed and loads (torchcodec must fit torch's build)."""
    if name == "native":
        return native_library() is not None
    if name != "pil" and importlib.util.find_spec(name) is None:
        return False
    try:
        decoder(name)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


@functools.cache
def native_library() -> Library | None:
    """The library, if it is installed and decodes as Python does; if not, that is said once."""
    path = installed()
    if path is None:
        log.info(
            "images: without distdl-native, decoding takes more CPU time (docs/data/native.md)"
        )
        return None
    try:
        library = Library(path)
        _try(library)
    except (OSError, ValueError) as error:
        log.warning("images: distdl-native is not used, so decoding is slower: %s", error)
        return None
    return library


def _try(library: Library) -> None:
    """Raises ValueError if the example has other pixels than by the usual way."""
    data = EXAMPLE
    image = decoder("auto")(data)
    for crop in (Crop(3, 5, 14, 17, 12, 12, 12, True), Crop(0, 0, 20, 28, 16, 22, 12)):
        seen = torch.empty(crop.size, crop.size, 3, dtype=torch.uint8)
        where = [seen.data_ptr()]
        done = library.crops([data], [crop], where, seen.numel(), [WHOLE], MOST_PIXELS)
        if not all(done) or not torch.equal(seen.permute(2, 0, 1), crop.apply(image)):
            raise ValueError("it decodes an example to other pixels than the usual decoder")


def used(name: str, crops: bool = True) -> str:
    """What decodes images of the usual kinds here, by the name in a config; "none": nothing
    does.

    Args:
        crops: Whether crops alone are needed, as by `CropDecoder`.
    """
    if crops and name in ("auto", "native") and works("native"):
        return "native"
    whole = whole_decoder(name)
    return whole if whole == "nvjpeg" or works(whole) else "none"


class CropDecoder:
    """From a file's bytes to the pixels of a crop, resized: uint8 [3, S, S], channels_last.

    The pixels are those of `Crop.apply` on the image that the decoder of that name gives; with
    "auto" and "native" those of `auto`, bit by bit, but usual JPEGs are decoded by
    `distdl.images.native`, if it is installed. It can be pickled.

    Args:
        name, most_pixels: As for `decoder`. With "native" the library must work.

    Raises:
        ImportError: As for `decoder`, and for "native".
    """

    def __init__(self, name: str = "auto", most_pixels: int = MOST_PIXELS) -> None:
        self.whole = decoder(name, most_pixels)
        self._whole_name = whole_decoder(name)
        self.most_pixels = most_pixels
        self._native_too = name in ("auto", "native")
        if name == "native" and not works(name):
            raise ImportError("distdl-native is not installed, or does not work")

    @property
    def native(self) -> Library | None:
        """The library, where it is used."""
        return native_library() if self._native_too else None

    @property
    def name(self) -> str:
        """What decodes images of the usual kinds here."""
        return self._whole_name if self.native is None else "native"

    def __call__(self, data: bytes, choose: Choose, draws: Draws = GLOBAL) -> torch.Tensor:
        """A crop of an image.

        Args:
            choose: Called with the image's size, once it is known.
            draws: What `choose` draws from. It is called again with the same draws, if the file
                turns out to be broken, and another decoder decides.

        Raises:
            DamagedImage: As for `decoder`.
        """
        library = self.native
        sizes = library.sizes([data], self.most_pixels) if library is not None else [None]
        if library is not None and sizes[0] is not None:
            before = draws.mark()
            crop = choose(*sizes[0])
            out = torch.empty(crop.size, crop.size, 3, dtype=torch.uint8)
            where = [out.data_ptr()]
            flags = [WHOLE]
            if all(library.crops([data], [crop], where, out.numel(), flags, self.most_pixels)):
                return out.permute(2, 0, 1)
            draws.back(before)
        image = self.whole(data)
        height, width = image.shape[-2:]
        return choose(height, width).apply(image)

    def squares(
        self,
        files: Sequence[bytes],
        choose: Sequence[Choose],
        known_whole: Sequence[bool],
        out: torch.Tensor,
    ) -> list[bool]:
        """The crops of a batch of files, each decoded to its place in `out`.

        Args:
            files: Encoded images; an empty one is left to others.
            choose: For each file, as in a call. It may be called in vain.
            known_whole: Whether these very bytes were decoded to their end before. Damage behind
                the crop is then not looked for.
            out: uint8 [B, S, S, 3], contiguous.

        Returns:
            For each file whether that worked. If not, a call must decide.
        """
        library = self.native
        done = [False] * len(files)
        if library is None:
            return done
        rows = []
        crops = []
        for row, size in enumerate(library.sizes(files, self.most_pixels)):
            if size is not None:
                with suppress(DamagedImage):  # it cannot be resized, as a call will say
                    crops.append(choose[row](*size))
                    rows.append(row)
        step = out[0].numel() if len(out) else 0
        start = out.data_ptr()
        decoded = library.crops(
            [files[row] for row in rows],
            crops,
            [start + row * step for row in rows],
            step,
            [0 if known_whole[row] else WHOLE for row in rows],
            self.most_pixels,
        )
        for row, worked in zip(rows, decoded, strict=True):
            done[row] = worked
        return done


def decode_pil(data: bytes, most_pixels: int = MOST_PIXELS) -> torch.Tensor:
    """Decodes with PIL, the reference."""
    return torch.from_numpy(np.array(load_image(data, "RGB", most_pixels))).permute(2, 0, 1)


def decode_simplejpeg(data: bytes, most_pixels: int = MOST_PIXELS) -> torch.Tensor:
    """Decodes with libjpeg-turbo, through https://gitlab.com/jfolz/simplejpeg."""
    import simplejpeg

    header = examine(data, most_pixels)
    if not is_plain(header):
        raw = pixels_of(data, header)
        return decode_pil(data, most_pixels) if raw is None else raw
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:  # PIL decides, since it corrects some errors
        return decode_pil(data, most_pixels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_torchcodec(data: bytes, most_pixels: int = MOST_PIXELS) -> torch.Tensor:
    """Decodes with libjpeg-turbo, through https://github.com/meta-pytorch/torchcodec."""
    from torchcodec.decoders import decode_jpeg

    header = examine(data, most_pixels)
    if not is_plain(header):
        raw = pixels_of(data, header)
        return decode_pil(data, most_pixels) if raw is None else raw
    try:
        pixels = decode_jpeg(torch.frombuffer(without_exif(data), dtype=torch.uint8), mode="RGB")
    except RuntimeError:
        return decode_pil(data, most_pixels)
    assert isinstance(pixels, torch.Tensor)  # a list is returned only for a list of files
    return pixels


def pixels_of(data: bytes, header: Header) -> torch.Tensor | None:
    """The pixels of a file that holds them as they are, as `prepare --raw-fraction` writes it: a
    binary PPM or PGM of 8 bits. None: it is another one, or too short."""
    shape = header.height, header.width
    for kind, channels in ((b"P6", 3), (b"P5", 1)):
        begins = b"%b\n%d %d\n255\n" % (kind, header.width, header.height)
        count = math.prod(shape) * channels
        if data.startswith(begins) and len(data) >= len(begins) + count:
            values = np.frombuffer(data, np.uint8, count, len(begins)).reshape(*shape, channels)
            pixels = np.repeat(values, 3, axis=2) if channels == 1 else values.copy()
            return torch.from_numpy(pixels).permute(2, 0, 1)
    return None


def without_exif(data: bytes) -> bytearray:
    """A copy that hides its EXIF from torchcodec, which would otherwise rotate the image."""
    copy = bytearray(data)
    exif = copy.find(b"Exif\0\0", 0, 1 << 16)
    if exif >= 4 and copy[exif - 4 : exif - 2] == b"\xff\xe1":
        copy[exif - 3] = 0xEF  # APP15 instead of APP1: a segment that no decoder reads
    return copy


def is_plain(header: Header) -> bool:
    """Whether a file is a JPEG in grey or in colour; PIL decodes all others."""
    return header.format == "JPEG" and header.components in (1, 3)
