"""Files on disk to uint8 batches: distdl's loader against usual ones, on photographs.

    python -m benchmarks.run loader

One process trains nothing and takes batches of 100 as fast as 1 or 2 workers make them. After an
epoch to warm up, the arms take turns, five times each. CPU time is that of the process and its
workers. A hundred photographs of $DISTDL_PHOTOGRAPHS (without it, generated JPEGs of ImageNet's
median size) are copied to four hundred files, which stay in the page cache: the benchmark measures
decoding and its surroundings, not the disk.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import photographs
from benchmarks.table import Goal, Result, row
from distdl.util.wording import plural

FILES, BATCH, SIZE, REPEATS = 400, 100, 224, 5
PLAIN, SHORT = 1.5, 3.5  # the goals

Arm = Callable[[Path, int], Any]


def create_data(folder: Path) -> None:
    """Creates folder/jpeg/{train,val}, and prepares folder/shards and folder/short from it."""
    originals = sorted(photographs.folder(folder / "generated").rglob("*.jpg"))
    for split, count in (("train", FILES), ("val", len(originals))):
        for number in range(count):
            photograph = originals[number % len(originals)]
            target = folder / "jpeg" / split / photograph.parent.name / f"{number:04d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(photograph, target)
    for name, options in (
        ("shards", []),
        ("short", ["--short-side", "256", "--quality", "90"]),
    ):
        prepare(folder / "jpeg", folder / name, *options)


def prepare(source: Path, to: Path, *options: str) -> None:
    from distdl.cli import prepare

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = prepare.main(["folder", "--source", str(source), "--to", str(to), *options])
    assert code == 0, f"prepare {' '.join(options)} ended with {code}"


# The arms: each returns a loader of (almost) all images.


def image_folder(floats: bool) -> Arm:
    """torchvision's reference (references/classification/presets.py, backend PIL) in a DataLoader.

    Args:
        floats: Normalise on the CPU, as the reference does. False: uint8, which is faster.
    """

    def arm(folder: Path, workers: int) -> Any:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        ops = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()]
        if floats:
            normalize = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
            ops += [v2.ToDtype(torch.float, scale=True), normalize, v2.ToPureTensor()]
        dataset = ImageFolder(str(folder / "jpeg" / "train"), v2.Compose(ops))
        return torch.utils.data.DataLoader(
            dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True
        )

    return arm


def webdataset(folder: Path, workers: int) -> Any:
    """webdataset's usual form: decoded by PIL, shuffled in a buffer; uint8."""
    import webdataset
    from torchvision.transforms import v2

    crop = [v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    shards = sorted(map(str, (folder / "shards").glob("train-*.tar")))
    # webdataset needs as many shards as workers: each worker reads a part of the same shard.
    shards *= max(1, -(-workers // len(shards)))
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None)
        .shuffle(1000)
        .decode("pilrgb")
        .to_tuple("jpg", "cls")
        .map_tuple(v2.Compose(crop))
        .batched(BATCH, partial=False)
        .with_epoch(FILES // BATCH // workers)
    )
    return webdataset.WebLoader(
        dataset, batch_size=None, num_workers=workers, persistent_workers=True
    )


def timm(folder: Path, workers: int) -> Any:
    """timm's create_loader without auto-augment: its uint8 batches, before the copy to a device."""
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=str(folder / "jpeg" / "train"))
    loader = create_loader(
        dataset,
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        color_jitter=None,
        interpolation="bilinear",
        num_workers=workers,
        pin_memory=False,
        persistent_workers=True,
        device=torch.device("cpu"),
    )
    return loader.loader


def distdl(kind: str, decoder: str = "auto") -> Arm:
    """`data=imagenet`, as a run builds it."""

    def arm(folder: Path, workers: int) -> Any:
        from distdl.data import StoredImages, TrainPosition
        from distdl.data.loading import distribute

        classes = len([*(folder / "jpeg/train").iterdir()])
        data = StoredImages(
            str(folder / kind), BATCH, num_classes=classes, num_workers=workers, decoder=decoder
        )
        data.setup()
        distribute(data, rank=0, world_size=1, seed=0, position=TrainPosition())
        return data.train_dataloader()

    return arm


ARMS: dict[str, Arm] = {
    "(a) ImageFolder + v2 PIL, normalised": image_folder(floats=True),
    "(a') the same, uint8": image_folder(floats=False),
    "(b) webdataset, uint8": webdataset,
    "(c) timm create_loader, uint8": timm,
    "distdl, folder": distdl("jpeg"),
    "distdl, shards": distdl("shards"),
    "distdl, shards, PIL": distdl("shards", "pil"),
    "distdl, shards of short side 256": distdl("short"),
}


def epoch(loader: Any) -> tuple[float, float]:
    """Images per second and CPU milliseconds per image, of one pass."""
    cpu = cpu_seconds()
    start = time.perf_counter()
    images = 0
    for batch in loader:
        images += len(batch["label"] if isinstance(batch, dict) else batch[1])
    seconds = time.perf_counter() - start
    used = cpu_seconds() - cpu
    return images / seconds, 1000 * used / images


def cpu_seconds() -> float:
    """CPU time of this process and its living children."""
    parent = psutil.Process()
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def measured(folder: Path, workers: int) -> dict[str, list[tuple[float, float]]]:
    loaders = {name: arm(folder, workers) for name, arm in ARMS.items()}
    for loader in loaders.values():
        epoch(loader)  # starts its workers, which stay
    values: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
    for _ in range(REPEATS):
        for name, loader in loaders.items():
            values[name].append(epoch(loader))
    return values


def differences(folder: Path) -> str:
    """Text on how much the pixels differ from those that PIL decodes and resizes."""
    from PIL import Image
    from torchvision.transforms.v2 import functional as v2

    from distdl.images.views import EvalView, TrainView

    def mean(left: torch.Tensor, right: torch.Tensor) -> float:
        return float((left.float() - right.float()).abs().mean())

    train = TrainView(SIZE)
    ours = EvalView(SIZE)
    crops = []
    centres = []
    shrunk = []
    # prepare puts the class before a name: n01440764_0000.jpg.
    smaller = {path.name.rpartition("_")[2]: path for path in shorter(folder)}
    for path in sorted((folder / "jpeg" / "val").rglob("*.jpg")):
        data = path.read_bytes()
        image = Image.open(path).convert("RGB")
        random.seed(0)
        seen = train(data)["image"]
        random.seed(0)
        drawn = train.crop(image.height, image.width, 0)
        box = (drawn.top, drawn.left, drawn.height, drawn.width)
        crop = v2.pil_to_tensor(v2.resized_crop(image, *box, [SIZE, SIZE]))
        crops.append(mean(seen, crop.flip(-1) if drawn.flip else crop))
        centre = v2.center_crop(v2.resize(image, [256]), [SIZE])
        reference = v2.pil_to_tensor(centre)
        centres.append(mean(ours(data)["image"], reference))
        shrunk.append(mean(ours(smaller[path.name].read_bytes())["image"], reference))
    return (
        "Mean absolute difference from PIL's pixels (0 to 255), on average (in brackets: of the "
        f"worst of {len(crops)} images): training crops {statistics.mean(crops):.3f} "
        f"({max(crops):.3f}), validation {statistics.mean(centres):.3f} ({max(centres):.3f}). A "
        "short side of 256 at quality 90 is lossy: it changes validation images by "
        f"{statistics.mean(shrunk):.2f} ({max(shrunk):.2f})."
    )


def shorter(folder: Path) -> Iterator[Path]:
    """The validation files, prepared to a short side of 256."""
    to = folder / "short-files"
    prepare(folder / "jpeg", to, "--short-side", "256", "--quality", "90", "--format", "folder")
    yield from (to / "val").rglob("*.jpg")


def main() -> Result:
    warnings.filterwarnings("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_data(folder)
        results = {workers: measured(folder, workers) for workers in (1, 2)}
        pixels = differences(folder)
    rows = []
    for workers, arms in results.items():
        for arm, values in arms.items():
            label = f"{arm}, {workers} {plural('worker', workers)}"
            rows.append(row(label, [v[0] for v in values], "img/s"))
            rows.append(row(label, [v[1] for v in values], "CPU ms/img"))

    def ratio(arm: str, base: str) -> list[float]:
        def speed(workers: int, name: str) -> float:
            return statistics.median(v[0] for v in results[workers][name])

        return [speed(workers, arm) / speed(workers, base) for workers in results]

    lines = []
    for arm in ARMS:
        if arm.startswith("distdl"):
            ratios = [f"{r:.2f}" for base in list(ARMS)[:2] for r in ratio(arm, base)]
            lines.append(f"| {arm} | " + " | ".join(ratios) + " |")
    table = "| | (a), 1 worker | (a), 2 | (a'), 1 | (a'), 2 |\n|---|---|---|---|---|\n"
    of = "photographs" if "DISTDL_PHOTOGRAPHS" in os.environ else "generated JPEGs, 110 kB each"
    missing = (
        f"The images: {of}. (d) FFCV 1.0.2 could not be installed: its build finds no OpenCV "
        "by pkg-config."
    )
    reference = next(iter(ARMS))
    short = "distdl, shards of short side 256"
    return Result(
        "Loader: photographs to batches",
        "(a) torchvision's reference in a DataLoader; the ratio is distdl's on shards, 1 worker",
        f"at least {PLAIN}",
        ratio("distdl, shards", reference)[0],
        rows,
        "python -m benchmarks.run loader",
        what="loader, unchanged JPEGs, against torchvision's ImageFolder, 1 worker (img/s)",
        more=[
            Goal(
                "the same, images prepared to a short side of 256",
                f"at least {SHORT}",
                ratio(short, reference)[0],
            )
        ],
        notes="\n\n".join((table + "\n".join(lines), pixels, missing)),
    )
