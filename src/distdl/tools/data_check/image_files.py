"""Inspects images one by one: whether they are intact, their sizes and their colours."""

from __future__ import annotations

import hashlib
import multiprocessing
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distdl.datasets.image_files import load_image
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.record import DetectionRecord, ObjectFindings
from distdl.tools.data_check.sources import DataAtUri, ImageReader, SplitImages
from distdl.util.orphans import end_with_parent

CHUNK = 64  # images per task of a process


@dataclass
class Findings:
    """The findings about `count` images.

    `mean` and `std` add up each image's mean and std of red, green and blue (values from 0 to 1).
    """

    count: int = 0
    damaged: list[str] = field(default_factory=list)  # location and reason
    sizes: list[tuple[int, int]] = field(default_factory=list)  # pixels, of intact images
    objects: ObjectFindings = field(default_factory=ObjectFindings)  # of records, if there are some
    mean: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(3))
    std: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(3))

    def add(self, other: Findings) -> None:
        self.count += other.count
        self.damaged += other.damaged
        self.sizes += other.sizes
        self.objects.add(other.objects)
        self.mean = self.mean + other.mean
        self.std = self.std + other.std

    def average(self) -> tuple[list[float], list[float]]:
        """Mean and std per channel; each image has the same weight.

        The std is the mean of the images' stds, so that it can be compared with torchvision's
        usual constants, computed in this way (https://github.com/pytorch/vision/pull/1965).
        """
        count = max(1, len(self.sizes))
        return (self.mean / count).tolist(), (self.std / count).tolist()


def inspect_images(reader: ImageReader, indices: Sequence[int]) -> Findings:
    """Reads the images of some indices, compares their sha256, and decodes them with PIL."""
    seen = Findings()
    values = np.arange(256) / 255
    for index in map(int, indices):
        seen.count += 1
        if reader.categories is not None:
            _look_at_record(reader, index, reader.categories, seen)
        try:
            data = reader.read(index)
            expected = reader.sha256(index)
            if expected is not None and hashlib.sha256(data).digest() != expected:
                raise ValueError("its bytes are not those of the index (sha256)")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # broken EXIF data is not damage
                image = load_image(data, "RGB", reader.max_pixels)
        except (ValueError, OSError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:  # its text would repeat the path
                reason = f"cannot be read: {error.strerror}"
            seen.damaged.append(f"{reader.name(index)}: {reason}")
            continue
        seen.sizes.append(image.size)
        # Mean and std from a histogram, which takes PIL a third of a millisecond.
        counts = np.array(image.histogram(), dtype=np.float64).reshape(3, 256)
        shares = counts / counts[0].sum()
        mean = shares @ values
        seen.mean += mean
        seen.std += np.sqrt(np.maximum(shares @ values**2 - mean**2, 0))
    return seen


def _look_at_record(
    reader: ImageReader, index: int, categories: Categories, seen: Findings
) -> None:
    name = reader.name(index)
    try:
        seen.objects.look(name, DetectionRecord().decode(reader.record(index)), categories)
    except (ValueError, OSError) as error:
        seen.damaged.append(f"{name}: its record: {error}")


def inspect_all_images(
    data: DataAtUri, processes: int, progress: Callable[[int], None]
) -> dict[str, Findings]:
    """Inspects every image of every split, in several processes.

    Shards in a store are downloaded one by one, and removed again. `progress` is called with the
    number of images inspected so far.

    Raises:
        StoreError: A shard cannot be downloaded.
    """
    result: dict[str, Findings] = {}
    # Not forked: this process has threads (torch's, the bar's), whose locks a child would inherit.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, end_with_parent) as pool:
        for name, images in data.splits.items():
            seen = result[name] = Findings()
            for shard, rows in _parts(data, images):
                with data.reading(images, shard) as reader:
                    chunks = (rows[i : i + CHUNK] for i in range(0, len(rows), CHUNK))
                    for part in pool.map(_inspect_part, map(reader.part, chunks)):
                        seen.add(part)
                        progress(sum(each.count for each in result.values()))
    return result


def _inspect_part(reader: ImageReader) -> Findings:
    return inspect_images(reader, range(len(reader.images.where)))


def _parts(data: DataAtUri, images: SplitImages) -> Iterator[tuple[int | None, Any]]:
    """A split's images: shard by shard from a store, all at once (shard None) on this machine."""
    if data.store is None:
        yield None, np.arange(len(images.labels))
        return
    for shard in range(len(images.names)):
        yield shard, np.flatnonzero(images.where["shard"] == shard)
