"""`data.order=auto`: whether the storage gives samples at random as fast as they are decoded.

A full shuffle reads samples at random, which disks that turn and mounts over a network are slow at.
Windows of shards are read in order, and then from memory. The choice is made once, before a run
trains, since it decides which sample comes next.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from distdl.data.images import default_workers
from distdl.datasets.cache import Cache
from distdl.datasets.format import Split
from distdl.datasets.image_headers import DamagedImage
from distdl.datasets.read_rates import Extent, at_random, in_order
from distdl.datasets.reading import DataSet, open_data_set
from distdl.images.crop import central_crop
from distdl.images.decoding import CropDecoder
from distdl.stores import is_remote, open_store
from distdl.util.cache_folder import default_root

SAMPLES = 2000  # that are read at random, at most
DECODED = 64
# Reading in order must be faster by this factor: a window needs memory, and mixes fewer samples.
LEAST_GAIN = 1.5
# Two windows may fill this share of the memory that is free.
SHARE = 0.5


@dataclass(frozen=True)
class NodeRates:
    """What a node can do, in images per second, and how many shards a window may have there.
    `why` says why nothing was measured, or is ""."""

    at_random: float = 0.0
    in_order: float = 0.0
    decoded: float = 0.0
    window: int = 0
    why: str = ""


@dataclass(frozen=True)
class Choice:
    """An order, its window in shards, and the reason."""

    order: str
    window: int
    reason: str


def measure(node: Mapping[str, Any], ranks: int) -> NodeRates:
    """The rates of this node.

    Args:
        node: The data node of a config.
        ranks: That load on this node.

    Raises:
        UserError: The data set cannot be opened.
    """
    root = str(node["root"])
    if not (is_remote(root) or open_store(root).size("dataset.json")):
        return NodeRates(why="the images are files of their own, not shards")
    cache_dir = node.get("cache_dir")
    cache_root = Path(cache_dir).expanduser() if cache_dir else default_root()
    data = open_data_set(root, cache_root=cache_root)
    if "train" not in data.manifest.splits:
        return NodeRates(why="there are no training images")
    train = data.split("train")
    in_place = not is_remote(root) and cache_dir is None
    cache = None if in_place else Cache(data.store, cache_root, data.key)
    folder = Path(open_store(root).uri) if cache is None else cache.folder
    here = [n for n, shard in enumerate(train.shards) if (folder / shard.name).exists()]
    if not here:
        return NodeRates(why="no shard is in the cache of this node yet")
    workers = node.get("num_workers")
    readers = max(1, ranks * (default_workers() if workers is None else int(workers)))
    places = _places(data, train, folder, here, cache)
    per_second, read = at_random(places, readers)
    largest = max(shard.bytes for shard in train.shards)
    fits = int(SHARE * psutil.virtual_memory().available / (2 * largest))
    paths = [folder / train.shards[n].name for n in here[: max(1, len(here) // 2)]]
    mean = train.bytes / max(train.samples, 1)
    decoded = readers / _seconds_to_decode(read, str(node.get("decoder", "auto")))
    window = max(1, min(int(node.get("shuffle_window", 32)), fits))
    return NodeRates(per_second, in_order(paths) / mean, decoded, window)


def _places(
    data: DataSet, train: Split, folder: Path, here: Sequence[int], cache: Cache | None
) -> list[Extent]:
    """Where samples are that a shuffle might read next, all in shards that are here."""
    rows = data.index("train", cache)
    rows = rows[np.isin(rows["shard"], here)]
    chosen = np.random.default_rng(0).permutation(len(rows))[:SAMPLES]
    return [
        Extent(folder / train.shards[row["shard"]].name, int(row["offset"]), int(row["bytes"]))
        for row in rows[chosen]
    ]


def _seconds_to_decode(files: Sequence[bytes], decoder: str) -> float:
    """CPU seconds of one image, about: a crop of its centre."""
    decode = CropDecoder("pil" if decoder == "nvjpeg" else decoder)
    began = time.thread_time()
    count = 0
    for file in files[:DECODED]:
        try:
            decode(file, lambda height, width: central_crop(height, width, 256, 224))
            count += 1
        except DamagedImage:  # the training reports it
            continue
    return max(time.thread_time() - began, 1e-6) / max(count, 1)


def choose(nodes: Sequence[NodeRates]) -> Choice:
    """The order for all nodes, by what each of them measured."""
    window = min((each.window for each in nodes if not each.why), default=0)
    if unknown := next((each.why for each in nodes if each.why), ""):
        return Choice("shuffled", window, unknown)
    slowest = min(nodes, key=lambda each: each.at_random / each.decoded)
    said = (
        f"at random {slowest.at_random:,.0f} img/s are read, in order {slowest.in_order:,.0f}, "
        f"and the workers of a node decode {slowest.decoded:,.0f}"
    )
    enough = slowest.at_random >= slowest.decoded
    gains = slowest.in_order >= LEAST_GAIN * slowest.at_random
    if enough or not gains:
        return Choice("shuffled", window, said)
    return Choice("windows", window, f"{said}: windows of {window} shards")
