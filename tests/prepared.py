"""A small prepared data set of known content, and a store that fails as told."""

from __future__ import annotations

import io
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Trainer
from PIL import Image

from distdl.datasets.cache import Cache
from distdl.datasets.format import MANIFEST, Manifest, Shard
from distdl.datasets.writing import ShardFile, write_index
from distdl.stores.files import FileStore

PER_SHARD = 8  # samples


def jpeg(number: int, side: int = 24) -> bytes:
    """An image that tells its number: smooth, so that a pixel's brightness survives."""
    rng = np.random.default_rng(number)
    pixels = np.full((side, side + 8, 3), number % 200 + 20, np.uint8)
    pixels[::4] += rng.integers(0, 20, 3, dtype=np.uint8)
    memory = io.BytesIO()
    Image.fromarray(pixels).save(memory, "JPEG", quality=95)
    return memory.getvalue()


def quiet_trainer(path: Path, **options: Any) -> Trainer:
    """Lightning's, on one CPU, which shows and writes nothing."""
    options = {"logger": False, "num_sanity_val_steps": 0, **options}
    return Trainer(
        accelerator="cpu",
        devices=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=path,
        **options,
    )


def prepare(
    folder: Path, train: int = 40, val: int = 7, per_shard: int = PER_SHARD, padding: int = 0
) -> Manifest:
    """Writes `train` and `val` samples; sample i of a split is jpeg(i), with label i % 10.

    Args:
        padding: Bytes that follow each JPEG in its file, to make shards large.
    """
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, count in (("train", train), ("val", val)):
        shards: list[Shard] = []
        rows = []
        for number, start in enumerate(range(0, count, per_shard)):
            name = f"{split}-{number:05d}.tar"
            with (folder / name).open("wb") as file:
                shard = ShardFile(file, number)
                for i in range(start, min(count, start + per_shard)):
                    data = jpeg(i) + np.random.default_rng(i).bytes(padding)
                    shard.add(f"image_{i}", ".jpg", data, i % 10)
                described, its_rows = shard.close(name)
            shards.append(described)
            rows.append(its_rows)
        splits[split] = write_index(folder, split, shards, np.concatenate(rows))
    manifest = Manifest(tuple(f"class {i}" for i in range(10)), splits)
    (folder / MANIFEST).write_text(manifest.to_json())
    return manifest


def flip(path: Path, place: int, keep_times: bool = False) -> None:
    """Changes one byte of a file."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0xFF]))
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@dataclass(frozen=True)
class Faulty(FileStore):
    """A real store whose downloads go wrong as told, each written down in `log`."""

    log: Path = Path()
    faults: tuple[str, ...] = ()  # of the first downloads: "cut", "flip", "slow"

    def download(self, name, to, progress=None):
        with self.log.open("a") as log:
            log.write(f"{name}\n")
        count = len(self.log.read_text().split())
        fault = self.faults[count - 1] if count <= len(self.faults) else ""
        super().download(name, to, progress)
        if fault == "cut":
            os.truncate(to, to.stat().st_size // 2)
        elif fault == "flip":
            flip(to, 3000)
        elif fault == "slow":
            time.sleep(60)

    @property
    def downloads(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


def open_cache(
    tmp_path: Path, *faults: str, limit: int | None = None, root: str = "cache"
) -> Cache:
    store = Faulty(tmp_path / "far", tmp_path / "log", faults)
    return Cache(store, tmp_path / root, "0123456789abcdef0123", limit)


def files(cache: Cache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir() if path.is_file())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def made(tmp_path) -> Manifest:
    return prepare(tmp_path / "far", per_shard=PER_SHARD)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 600 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs: run as root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)
