"""Measures how fast one core of this machine reads and decodes the images of a data set."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from distdl.data_check.sources import ImageReader
from distdl.datasets.images import Treatment

SECONDS = 1.0  # least CPU time of the measurement for each format
SHORT_SIDE = 256
SMALLER = Treatment(short_side=SHORT_SIDE, quality=90)


@dataclass(frozen=True)
class Rates:
    """Rates of one core.

    Args:
        reading: Images read per second of wall time, including waits for the disk.
        reading_bytes: The same in bytes per second.
        decoding: Images per second of CPU time: decoded, cropped, resized and put into a batch.
        smaller: Like `decoding`, for images scaled to a short side of 256; None: most images are
            no larger.
        decoder: Name of the fastest CPU decoder, which was used.
    """

    reading: float
    reading_bytes: float
    decoding: float
    smaller: float | None
    decoder: str


def measure(reader: ImageReader, indices: Sequence[int], image_size: int) -> Rates | None:
    """Reads some images from the disk (not from the page cache), then decodes them repeatedly.

    Returns:
        rates: None: none of the images can be decoded.
    """
    import torch

    from distdl.data import decoding
    from distdl.data.views import TrainView

    reader.forget(indices)
    start, images = time.perf_counter(), []
    for index in indices:
        with suppress(OSError):  # unreadable images are counted in `look`
            images.append(reader.read(int(index)))
    seconds = max(1e-9, time.perf_counter() - start)
    read, length = len(images), sum(map(len, images))

    view = TrainView(image_size)
    images = [data for data in images if _works(view, data)]
    if not images:
        return None
    smaller = [small for data in images if (small := shrunk(data)) is not None]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # Interleaved, so that other load on this machine slows both down equally.
        spent = _decode([images, smaller or images], view)
    finally:
        torch.set_num_threads(threads)
    name = next(name for name in decoding.CPU_DECODERS if decoding.works(name))
    return Rates(
        read / seconds,
        length / seconds,
        spent[0],
        spent[1] if len(smaller) > len(images) // 2 else None,
        name,
    )


def _works(view: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        view(data)
    except ValueError:  # damaged images are counted in `look`
        return False
    return True


def _decode(sets: Sequence[Sequence[bytes]], view: Callable[[bytes], Any]) -> list[float]:
    """Decodes each set of images repeatedly; returns images per second of CPU time for each."""
    import torch

    batch, place = 32, 0
    seconds, counts = [0.0] * len(sets), [0] * len(sets)
    while min(seconds) < SECONDS:
        for number, images in enumerate(sets):
            start = time.process_time()  # CPU time, since other processes may be running
            seen = [view(images[(place + i) % len(images)])["image"] for i in range(batch)]
            torch.stack(seen)
            seconds[number] += time.process_time() - start
            counts[number] += batch
        place += batch
    return [count / spent for count, spent in zip(counts, seconds, strict=True)]


def shrunk(data: bytes) -> bytes | None:
    """The image after `prepare --short-side 256 --quality 90`; None: it is not larger."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as file:
        larger = min(file.size) > SHORT_SIDE
    return SMALLER.apply(data, "")[0] if larger else None
