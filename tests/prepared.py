"""A small prepared data set of known content, and what fails or does harm on purpose."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from distdl.datasets.cache import Cache
from distdl.datasets.format import MANIFEST, Manifest, ShardFile, write_index
from distdl.stores.files import FileStore
from distdl.stores.remote import RemoteStore
from distdl.util.errors import UserError
from tests import limits
from tests.miniature import encoded, photograph

PER_SHARD = 8  # samples


def refusal(action, *arguments, **options):
    """The problem of the UserError that a call raises."""
    with pytest.raises(UserError) as error:
        action(*arguments, **options)
    return error.value.problems[0]


def jpeg(number):
    """An image that no other number gives."""
    return encoded(photograph(number, 32, 24), quality=95)


def quiet_trainer(path, **options):
    """distdl's Trainer on CPUs, which shows and writes nothing."""
    from distdl.loops.trainer import Trainer

    off = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys((*off, "use_distributed_sampler", "logger"), False)
    options = {**quiet, "num_sanity_val_steps": 0, "devices": 1, **options}
    return Trainer(accelerator="cpu", default_root_dir=path, **options)


def prepare(folder, train=40, val=7, per_shard=PER_SHARD, padding=0):
    """Writes `train` and `val` samples; sample i of a split is jpeg(i), with label i % 10.

    `padding` bytes follow each JPEG in its file, to make shards large. Returns the manifest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    splits = {}
    for split, count in (("train", train), ("val", val)):
        shards, rows = [], []
        for number, start in enumerate(range(0, count, per_shard)):
            name = f"{split}-{number:05d}.tar"
            with (folder / name).open("wb") as file:
                tar = ShardFile(file, number)
                for i in range(start, min(count, start + per_shard)):
                    data = jpeg(i) + np.random.default_rng(i).bytes(padding)
                    tar.add(f"image_{i}", ".jpg", data, i % 10)
                shard, of_shard = tar.close(name)
            shards.append(shard)
            rows.append(of_shard)
        splits[split] = write_index(folder, split, shards, np.concatenate(rows))
    manifest = Manifest(tuple(f"class {i}" for i in range(10)), splits)
    (folder / MANIFEST).write_text(manifest.to_json())
    return manifest


def flip(path, position, keep_times=False):
    """Changes one byte of a file."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    with path.open("r+b") as file:  # the same inode
        file.write(data)
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


class Gadget(str):
    """Unpickled, it makes the file of this name."""

    def __reduce__(self):
        return os.system, (f"touch {self}",)


@dataclass(frozen=True)
class Faulty(FileStore):
    """A folder whose first downloads go wrong: "cut", "flip" or "slow". `log` lists each."""

    log: Path = Path()
    faults: tuple[str, ...] = ()

    def download(self, name, to, progress=None):
        with self.log.open("a") as log:
            log.write(f"{name}\n")
        number = len(self.downloads)
        fault = self.faults[number - 1] if number <= len(self.faults) else ""
        super().download(name, to, progress)
        if fault == "cut":
            os.truncate(to, to.stat().st_size // 2)
        elif fault == "flip":
            flip(to, 3000)
        elif fault == "slow":
            time.sleep(60)

    @property
    def downloads(self):
        return self.log.read_text().split() if self.log.exists() else []


class Unreliable(RemoteStore):
    """A network store over a folder; `answer` is called before each request, and may raise."""

    def __init__(self, folder, answer, patience=120):
        super().__init__("box://data", "", patience=patience)
        self.folder = folder
        self.answer = answer

    def _connect(self):
        return None

    def _server(self):
        return "server"

    def _size(self, key):
        self.answer()
        return (self.folder / key).stat().st_size

    def _range(self, key, start, count):
        return (self.folder / key).read_bytes()[start : start + count]

    def _is_transient(self, error):
        return isinstance(error, ConnectionError)

    _put = _list = _delete = None  # nobody writes or lists here


def open_cache(tmp_path, *faults, limit=None, root="cache"):
    store = Faulty(tmp_path / "far", tmp_path / "log", faults)
    return Cache(store, tmp_path / root, "0123456789abcdef0123", limit)


def files(cache):
    return sorted(path.name for path in cache.folder.iterdir() if path.is_file())


@pytest.fixture
def made(tmp_path):
    return prepare(tmp_path / "far")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MiB."""
    with limits.small_disk(tmp_path / "disk"):
        yield tmp_path / "disk"
