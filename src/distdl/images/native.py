"""Crops of JPEGs by `distdl-native`, a small library in C (`native/` in distdl's repository).

It decodes only the rows and columns that a crop needs, and resizes them, with the pixels that
simplejpeg's whole image and torch's antialiased resizing of uint8 give, bit by bit. While it works
the interpreter's lock is free. It takes usual JPEGs alone; all else, and what is broken,
goes the usual way.

The library is optional. `distdl.images.decoding` loads it, and trusts it once it has decoded the
example as the usual decoder does.
"""

from __future__ import annotations

import base64
import ctypes
import importlib
import importlib.util
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from distdl.images.crop import Crop

PACKAGE = "distdl_native"
VERSION = 1  # as in distdl_native.h
# Flags, as there.
WHOLE = 1
PLAIN_C = 2
ONLY_ENTROPY = 4
ONLY_PIXELS = 8
DONE = 0
# A JPEG of 28 x 20 pixels, a gradient under noise, with one colour for every four pixels.
EXAMPLE = base64.b64decode(
    b"/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAA0JCgsKCA0LCgsODg0PEyAVExISEyccHhcgLikxMC4pLSwzOko+MzZG"
    b"NywtQFdBRkxOUlNSMj5aYVpQYEpRUk//2wBDAQ4ODhMREyYVFSZPNS01T09PT09PT09PT09PT09PT09PT09PT09P"
    b"T09PT09PT09PT09PT09PT09PT09PT09PT0//wAARCAAUABwDASIAAhEBAxEB/8QAFwABAQEBAAAAAAAAAAAAAAAA"
    b"BQQABv/EACoQAAEDBAEBBgcAAAAAAAAAAAEAAhEDBCExQRIFExQycYFCUWGhwfDx/8QAGQEAAgMBAAAAAAAAAAAA"
    b"AAAABAYCAwUH/8QAHREAAQMFAQAAAAAAAAAAAAAAAAECBAMREiExUf/aAAwDAQACEQMRAD8A4u3seSIHPH76q2hZ"
    b"j4mHHJGkpRsZboOLgJEaSVOxJPlBwND2UGP9Kok0Jt7J3diZmf6rPBCT5sYw1M0rI4JbnRkK1vZrajQ4ua0/KEU2"
    b"rZLjHGna6SNpMbEDZE++VZQps6eoNAO8ek/lZZZjF0c4huXIRo0mdJxpod9pSNtRa+iCSZ+hWWRLVGKi5cen/9k="
)


class _Crop(ctypes.Structure):
    """`struct distdl_crop`."""

    _fields_: ClassVar = [
        ("top", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("to_height", ctypes.c_int32),
        ("to_width", ctypes.c_int32),
        ("keep_top", ctypes.c_int32),
        ("keep_left", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("flip", ctypes.c_int32),
    ]


class Library:
    """The library at a path, with the signatures of `distdl_native.h`.

    Its methods may be called by several threads at once.

    Raises:
        OSError: It does not load.
        ValueError: It is of another version, or no such library.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._c = ctypes.CDLL(str(path))
            version = self._c.distdl_native_version()
        except AttributeError as error:
            raise ValueError(f"{path} is another library") from error
        if version != VERSION:
            raise ValueError(f"{path} has version {version}, and {VERSION} is needed")
        size, number, address = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
        self._c.distdl_sizes.argtypes = [size, address, address, number, address, address]
        self._c.distdl_sizes.restype = None
        images = (address, size, address, address, number)
        self._c.distdl_crops.argtypes = [*images, address, address, address, size, address]
        self._c.distdl_crops.restype = None
        self._c.distdl_scratch_new.restype = address
        self._c.distdl_scratch_free.argtypes = [address]
        self._c.distdl_scratch_free.restype = None
        # An older build has no distdl_native_measures.
        measures = getattr(self._c, "distdl_native_measures", lambda: 0)()
        self.measures = measures == ONLY_ENTROPY + ONLY_PIXELS
        self._of_thread = threading.local()

    def sizes(self, files: Sequence[bytes], most_pixels: int) -> list[tuple[int, int] | None]:
        """Height and width of each file; None: another decoder must take it."""
        count = len(files)
        sizes = (ctypes.c_int32 * (2 * count))()
        outcomes = (ctypes.c_int32 * count)()
        self._c.distdl_sizes(count, *_addresses(files), most_pixels, sizes, outcomes)
        heights, widths = sizes[::2], sizes[1::2]
        found = zip(heights, widths, outcomes, strict=True)
        return [(h, w) if outcome == DONE else None for h, w, outcome in found]

    def crops(
        self,
        files: Sequence[bytes],
        crops: Sequence[Crop],
        outs: Sequence[int],
        room: int,
        flags: Sequence[int],
        most_pixels: int,
    ) -> list[bool]:
        """Decodes a crop of each file to an address, as uint8 [S, S, 3].

        Args:
            outs: Where the pixels go.
            room: How many bytes there are at each of these addresses.
            flags: `WHOLE`: the rest of a file is looked at as well, so that damage is found;
                `PLAIN_C`: without vector instructions.

        Returns:
            For each file whether that worked. If not, what is at its address is undefined.
        """
        count = len(files)
        cuts = (_Crop * count)(*[_crop(crop) for crop in crops])
        how = (ctypes.c_int32 * count)(*flags)
        to = (ctypes.c_void_p * count)(*outs)
        outcomes = (ctypes.c_int32 * count)()
        scratch = self._scratch()
        self._c.distdl_crops(
            scratch, count, *_addresses(files), most_pixels, cuts, how, to, room, outcomes
        )
        return [outcome == DONE for outcome in outcomes]

    def _scratch(self) -> int:
        """This thread's memory, which its end frees."""
        scratch = getattr(self._of_thread, "scratch", None)
        if scratch is None:
            scratch = self._of_thread.scratch = _Scratch(self._c)
        return scratch.address


class _Scratch:
    def __init__(self, library: ctypes.CDLL) -> None:
        self.address: int = library.distdl_scratch_new()
        self._free = library.distdl_scratch_free
        if not self.address:
            raise MemoryError("no memory for decoding")

    def __del__(self) -> None:
        self._free(self.address)


def _addresses(files: Sequence[bytes]) -> tuple[ctypes.Array[ctypes.c_char_p], object]:
    count = len(files)
    return (ctypes.c_char_p * count)(*files), (ctypes.c_size_t * count)(*map(len, files))


def _crop(crop: Crop) -> _Crop:
    return _Crop(*crop[:6], *crop.kept, crop.size, crop.flip)


def installed() -> Path | None:
    """Where the library is; None: `distdl-native` is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        return None
    path: Path = importlib.import_module(PACKAGE).LIBRARY
    return path
