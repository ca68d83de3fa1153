"""Measures how fast one core of this machine reads and decodes the images of a data set."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from distdl.datasets.image_headers import examine
from distdl.tools.data_check.sources import ImageReader
from distdl.tools.prepare.images import Treatment

SECONDS = 1.0  # least CPU time of the measurement for each format
SHORT_SIDE = 256
SMALLER = Treatment(short_side=SHORT_SIDE, quality=90)


@dataclass(frozen=True)
class Rates:
    """Rates of one core."""

    reading: float  # images per second of wall time, including waits for the disk
    reading_bytes: float  # the same in bytes per second
    decoding: float  # images per second of CPU time: decoded, cropped, resized, in a batch
    smaller: float | None  # the same at a short side of 256 pixels; None: most images are smaller
    decoder: str  # the fastest CPU decoder, which was measured


def measure(reader: ImageReader, indices: Sequence[int], image_size: int) -> Rates | None:
    """Reads some images from the disk (not from the page cache), then decodes them repeatedly.

    Returns None if none of the images can be decoded.
    """
    import torch

    from distdl.images import decoding
    from distdl.images.views import TrainView

    reader.forget(indices)
    start = time.perf_counter()
    files = []
    for index in indices:
        with suppress(OSError, ValueError):  # unreadable images are counted in `inspect_images`
            files.append(reader.read(int(index)))
    seconds = max(1e-9, time.perf_counter() - start)

    view = TrainView(image_size, max_pixels=reader.max_pixels)
    images = []
    for data in files:
        with suppress(ValueError):  # damaged images are counted in `inspect_images`
            view(data)
            images.append(data)
    if not images:
        return None
    most = reader.max_pixels
    smaller = [small for small in (shrunk(data, most) for data in images) if small is not None]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        decoding_rate, smaller_rate = _decode([images, smaller or images], view)
    finally:
        torch.set_num_threads(threads)
    usual = len(smaller) > len(images) // 2
    return Rates(
        len(files) / seconds,
        sum(map(len, files)) / seconds,
        decoding_rate,
        smaller_rate if usual else None,
        next(name for name in decoding.CPU_DECODERS if decoding.works(name)),
    )


def _decode(sets: Sequence[Sequence[bytes]], view: Callable[[bytes], Any]) -> list[float]:
    """Images per second of CPU time for each set, decoded repeatedly.

    Sets are interleaved, so that other load on this machine slows all down equally.
    """
    import torch

    batch, rounds = 32, 0
    seconds = [0.0] * len(sets)
    cycles = [itertools.cycle(images) for images in sets]
    while min(seconds) < SECONDS:
        for number, images in enumerate(cycles):
            start = time.process_time()  # CPU time, since other processes may be running
            torch.stack([view(data)["image"] for data in itertools.islice(images, batch)])
            seconds[number] += time.process_time() - start
        rounds += 1
    return [rounds * batch / spent for spent in seconds]


def shrunk(data: bytes, most_pixels: int) -> bytes | None:
    """The image after `prepare --short-side 256 --quality 90`; None: it is not larger."""
    header = examine(data, most_pixels)
    if min(header.height, header.width) <= SHORT_SIDE:
        return None
    return replace(SMALLER, max_pixels=most_pixels).apply(data, "")[0]
