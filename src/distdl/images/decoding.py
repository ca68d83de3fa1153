"""Decoders of images: fast ones, and PIL as the reference.

Where a fast decoder would fail or give other pixels than PIL (CMYK, PNG, WebP, files with errors),
PIL decodes the file. EXIF orientation is ignored, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from distdl.datasets.image_files import load_image
from distdl.datasets.image_headers import MOST_PIXELS, Header, examine

Decoder = Callable[[bytes], torch.Tensor]

# In the order in which `auto` tries them: fastest first (benchmarks/loader.py).
CPU_DECODERS = ("simplejpeg", "torchcodec", "pil")
# nvjpeg decodes on the GPU, in distdl.images.nvjpeg.
DECODERS = ("auto", *CPU_DECODERS, "nvjpeg")


def decoder(name: str = "auto", most_pixels: int = MOST_PIXELS) -> Decoder:
    """A function from a file's bytes to RGB pixels, uint8 [3, H, W].

    The memory layout is channels_last. The function can be pickled. It raises `DamagedImage` if the
    bytes are not an image or are truncated (it never returns an image with a grey bottom), and if
    `distdl.datasets.image_headers` refuses them.

    Args:
        name: One of `CPU_DECODERS`; "auto": the first that is installed and works.
        most_pixels: An image with more is refused.

    Raises:
        ImportError: The package of that name is missing, or does not load.
        ValueError: There is no such decoder.
    """
    if name == "auto":
        name = next(known for known in CPU_DECODERS if works(known))
    if name not in CPU_DECODERS:
        raise ValueError(f"unknown decoder {name!r}; known decoders: {', '.join(DECODERS)}")
    if name == "torchcodec":
        from torchcodec.decoders import decode_jpeg  # noqa: F401, new in torchcodec 0.16

        return partial(decode_torchcodec, most_pixels=most_pixels)
    if name == "pil":
        return partial(decode_pil, most_pixels=most_pixels)
    importlib.import_module(name)
    return partial(decode_simplejpeg, most_pixels=most_pixels)


def works(name: str) -> bool:
    """Whether a decoder's package is installed and loads (torchcodec must fit torch's build)."""
    if name != "pil" and importlib.util.find_spec(name) is None:
        return False
    try:
        decoder(name)
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def decode_pil(data: bytes, most_pixels: int = MOST_PIXELS) -> torch.Tensor:
    """Decodes with PIL, the reference."""
    return torch.from_numpy(np.array(load_image(data, "RGB", most_pixels))).permute(2, 0, 1)


def decode_simplejpeg(data: bytes, most_pixels: int = MOST_PIXELS) -> torch.Tensor:
    """Decodes with libjpeg-turbo, through https://gitlab.com/jfolz/simplejpeg."""
    import simplejpeg

    if not is_plain(examine(data, most_pixels)):
        return decode_pil(data, most_pixels)
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:  # PIL decides, since it corrects some errors
        return decode_pil(data, most_pixels)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def decode_torchcodec(data: bytes, most_pixels: int = MOST_PIXELS) -> torch.Tensor:
    """Decodes with libjpeg-turbo, through https://github.com/meta-pytorch/torchcodec."""
    from torchcodec.decoders import decode_jpeg

    if not is_plain(examine(data, most_pixels)):
        return decode_pil(data, most_pixels)
    try:
        pixels = decode_jpeg(torch.frombuffer(without_exif(data), dtype=torch.uint8), mode="RGB")
    except RuntimeError:
        return decode_pil(data, most_pixels)
    assert isinstance(pixels, torch.Tensor)  # a list is returned only for a list of files
    return pixels


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
