"""The CPU time of each stage from a file to a batch of crops, one stage at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

import numpy as np
import torch
from torch.utils.data import default_collate

from distdl.datasets.image_headers import examine
from distdl.images.crop import Crop
from distdl.images.native import ONLY_ENTROPY, ONLY_PIXELS, WHOLE, Library
from distdl.images.views import TrainView, View

# In their order. Where distdl-native decodes a file, "entropy" and "IDCT" take the place of
# "decode", which is of the whole image.
STAGES = (
    "read",
    "header",
    "entropy",
    "IDCT",
    "decode",
    "resize",
    "augment",
    "assemble",
    "transfer",
)
BATCH = 32

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class StageClock:
    """Adds up the CPU seconds of this thread, by stage."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(STAGES, 0.0)

    def __call__(
        self, stage: str, work: Callable[[*Arguments], Result], *args: *Arguments
    ) -> Result:
        """`work(*args)`."""
        began = time.thread_time()
        result = work(*args)
        self.spent[stage] += time.thread_time() - began
        return result


def measure(
    read: Callable[[int], bytes], indices: Sequence[int], view: TrainView, seconds: float
) -> dict[str, float]:
    """CPU seconds of one image, by stage; stages that take no time are left out.

    Args:
        read: The file of an index; it can be decoded.
        seconds: How long to measure, of CPU time.
    """
    clock = StageClock()
    count = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while sum(clock.spent.values()) < seconds:
            rows = [indices[(count + row) % len(indices)] for row in range(BATCH)]
            _batch(clock, [clock("read", read, index) for index in rows], view, count)
            count += BATCH
    finally:
        torch.set_num_threads(threads)
    return {stage: spent / count for stage, spent in clock.spent.items() if spent}


def _batch(clock: StageClock, files: Sequence[bytes], view: TrainView, key: int) -> None:
    """One batch, as a loader makes it."""
    views = [view.of_sample(key + row) for row in range(len(files))]
    side = view.side(0)
    images = torch.empty(len(files), side, side, 3, dtype=torch.uint8)
    native: list[int] = []
    library = view.decode.native
    if library is not None and library.measures:
        native = _decode_crops(clock, library, files, views, images)
    for row in sorted({*range(len(files))} - {*native}):
        header = clock("header", examine, files[row], view.max_pixels)
        crop = clock("assemble", views[row].crop, header.height, header.width, 0)
        image = clock("decode", view.decode.whole, files[row])
        square = clock("resize", crop.apply, image)
        clock("assemble", images[row].permute(2, 0, 1).copy_, square)
    for row, of_sample in enumerate(views):
        place = images[row].permute(2, 0, 1)
        changed = clock("augment", of_sample.changed, place)
        if changed is not place:
            clock("assemble", place.copy_, changed)
    clock("assemble", default_collate, [{"label": 0, "weight": np.float32(1)}] * len(files))
    if torch.cuda.is_available():
        pinned = clock("assemble", images.pin_memory)
        clock("transfer", pinned.to, "cuda")


def _decode_crops(
    clock: StageClock,
    library: Library,
    files: Sequence[bytes],
    views: Sequence[View],
    images: torch.Tensor,
) -> list[int]:
    """Decodes what the library does, and returns which files these are. It is asked three times:
    for the numbers of the file, for the pixels as well, and for all."""
    most = views[0].max_pixels
    sizes = clock("header", library.sizes, files, most)
    rows = [row for row, size in enumerate(sizes) if size is not None]
    crops = [clock("assemble", _crop, views[row], sizes[row]) for row in rows]
    room = images[0].numel()
    outs = [images.data_ptr() + row * room for row in rows]
    some = [files[row] for row in rows]

    def seconds(flags: int) -> float:
        began = time.thread_time()
        library.crops(some, crops, outs, room, [WHOLE | flags] * len(rows), most)
        return time.thread_time() - began

    entropy = seconds(ONLY_ENTROPY)
    pixels = seconds(ONLY_PIXELS)
    clock.spent["entropy"] += entropy
    clock.spent["IDCT"] += max(pixels - entropy, 0.0)
    clock.spent["resize"] += max(seconds(0) - pixels, 0.0)
    return rows


def _crop(view: View, size: tuple[int, int] | None) -> Crop:
    assert size is not None
    return view.crop(*size, 0)
