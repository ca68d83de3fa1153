"""A small ImageNet: the two tars with their nesting, names and oddities, and what reads shards."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from distdl.cli.prepare import main
from distdl.datasets.format import Manifest, load_index
from tests.written import write

SUBSET = ("--subset", "--shard-mb", "0.02", "--workers", "1")

# Real ones, with real numbers of validation images (distdl/tools/prepare/imagenet_val.txt).
CLASSES = {
    "n01440764": (293, 2138, 3014, 6697),
    "n02102040": (665, 1968, 2294, 2315),
    "n03000684": (537, 4034, 4262, 5506),
}


def photograph(number: int, width: int = 64, height: int = 48) -> Image.Image:
    """A smooth image that no other number gives."""
    corners = np.random.default_rng(number).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "JPEG", **how: Any) -> bytes:
    memory = io.BytesIO()
    image.save(memory, form, **how)
    return memory.getvalue()


def tar(members: dict[str, bytes]) -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode="w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return memory.getvalue()


def images(per_class: int) -> dict[str, dict[str, bytes]]:
    """Training images by class and name. The first class has a PNG, a CMYK JPEG and a grey one."""
    classes: dict[str, dict[str, bytes]] = {}
    for label, wnid in enumerate(CLASSES):
        numbers = range(100 * label, 100 * label + per_class)
        classes[wnid] = {f"{wnid}_{n}.JPEG": encoded(photograph(n)) for n in numbers}
    classes["n01440764"] |= {
        "n01440764_1.JPEG": encoded(photograph(1), "PNG"),
        "n01440764_2.JPEG": encoded(photograph(2).convert("CMYK")),
        "n01440764_3.JPEG": encoded(photograph(3).convert("L")),
    }
    return classes


def val_images() -> dict[str, bytes]:
    numbers = [number for of_class in CLASSES.values() for number in of_class]
    return {f"ILSVRC2012_val_{n:08}.JPEG": encoded(photograph(n)) for n in sorted(numbers)}


def imagenet(folder: Path, per_class: int = 12) -> Path:
    """Writes ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar of 3 classes."""
    folder.mkdir(parents=True, exist_ok=True)
    # The order of the real tar is not that of the wnids either.
    inner = {f"{wnid}.tar": tar(members) for wnid, members in reversed(images(per_class).items())}
    (folder / "ILSVRC2012_img_train.tar").write_bytes(tar(inner))
    (folder / "ILSVRC2012_img_val.tar").write_bytes(tar(val_images()))
    return folder


def unpack(folder: Path, per_class: int, splits: Sequence[str] = ("train",)) -> Path:
    """Writes the training images into class folders of each split."""
    for split in splits:
        for wnid, members in images(per_class).items():
            write(folder / split / wnid, members)
    return folder


def prepare(kind: str, source: Path, to: Path, *options: str) -> int:
    return main([kind, "--source", str(source), "--to", str(to), *options]).exit_code


def stored(out: Path, split: str) -> dict[str, tuple[bytes, int]]:
    """Image and label by member name, by way of the index; compares it with the tars."""
    manifest = Manifest.from_json((out / "dataset.json").read_bytes(), "it")
    described = manifest.splits[split]
    rows = load_index((out / described.index.name).read_bytes(), "it")
    for file in (described.index, *described.shards):
        data = (out / file.name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file.bytes, file.sha256)
    assert len(rows) == described.samples == sum(shard.samples for shard in described.shards)
    samples = {}
    for number, shard in enumerate(described.shards):
        data = (out / shard.name).read_bytes()
        with tarfile.open(fileobj=io.BytesIO(data)) as members:
            pairs = list(members)
        of_shard = rows[rows["shard"] == number]
        for row, image, label in zip(of_shard, pairs[::2], pairs[1::2], strict=True):
            assert (row["offset"], row["bytes"]) == (image.offset_data, image.size)
            content = data[row["offset"] :][: row["bytes"]]
            assert hashlib.sha256(content).digest() == row["sha256"].tobytes()
            text = data[label.offset_data :][: label.size]
            assert label.name == image.name.rpartition(".")[0] + ".cls"
            assert int(text) == row["label"]
            samples[image.name] = content, int(text)
    return samples


def everything(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
