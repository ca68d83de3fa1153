"""Files on disk to uint8 batches: distdl's loader against others, in CPU time per image.

    python -m benchmarks.run loader

One process trains nothing and takes batches of 100 as fast as one worker makes them. Every arm does
the same: a random crop to 224 pixels (torchvision's RandomResizedCrop), a flip, a batch of uint8.
After two epochs to warm up the arms take turns, three times each. CPU time, user and system, is
that of the process and its workers, so that other programs on the machine change it little.

Two kinds of photographs, in the page cache: those of $DISTDL_PHOTOGRAPHS (without it, 100 generated
JPEGs of ImageNet's median size), copied to 1,600 files, and the same cut to squares of 224
pixels. DALI, FFCV, litdata and SPDL are measured where they are installed:

    make .servers/loaders && .servers/loaders/bin/python -m benchmarks.run loader
    .servers/loaders/bin/python -m benchmarks.loader --files 400 --workers 1     # a quarter of it
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import photographs
from benchmarks.ctrl_c import one_line
from benchmarks.loader_arms import (
    ARMS,
    AUGMENTED,
    FLOORS,
    OURS,
    SIZE,
    TORCHVISION,
    Arm,
    installed,
)
from benchmarks.table import Goal, Result, row
from distdl.util.wording import plural

# Goals: distdl's CPU time as a share of the other's, on photographs as they are and on small ones.
OF_FFCV, OF_FFCV_SMALL, OF_DALI, OF_TORCHVISION = 0.70, 0.65, 0.65, 0.35

KINDS = {"full": "photographs", "small": "photographs of 224 x 224 pixels"}


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        files: Of each kind of photographs.
        repeats: Epochs of each arm, after two to warm up.
        workers: One to so many.
        augmented: Whether RandAugment is measured as well (0: no).
    """

    files: int = 1600
    repeats: int = 3
    workers: int = 2
    augmented: int = 1


def create_data(folder: Path, files: int) -> None:
    """Creates jpeg/{train,val} and shards/ in folder/full and folder/small."""
    originals = sorted(photographs.folder(folder / "generated").rglob("*.jpg"))
    for split, count in (("train", files), ("val", len(originals))):
        for number in range(count):
            photograph = originals[number % len(originals)]
            name = f"jpeg/{split}/{photograph.parent.name}/{number:04d}.jpg"
            for kind in KINDS:
                (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(photograph, folder / "full" / name)
            (folder / "small" / name).write_bytes(small(photograph))
    for kind in KINDS:
        prepare(folder / kind / "jpeg", folder / kind / "shards")


def small(photograph: Path) -> bytes:
    """Its centre, as a JPEG of 224 x 224 pixels."""
    from PIL import Image, ImageOps

    file = io.BytesIO()
    with Image.open(photograph) as image:
        ImageOps.fit(image.convert("RGB"), (SIZE, SIZE)).save(file, "JPEG", quality=90)
    return file.getvalue()


def prepare(source: Path, to: Path, *options: str) -> None:
    from distdl.cli import prepare

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = prepare.main(
            ["folder", "--source", str(source), "--to", str(to), *options]
        ).exit_code
    assert code == 0, f"prepare {' '.join(options)} ended with {code}"


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


Values = dict[str, list[tuple[float, float]]]  # arm -> what `epoch` gives, in each turn


def measured(
    folder: Path, workers: int, repeats: int, arms: Mapping[str, Arm], floors: Mapping[str, Arm]
) -> Values:
    loaders = {name: arm(folder, workers) for name, arm in arms.items() if installed(name)}
    values: Values = {}
    for turn in range(2 + repeats):  # the first start workers, and find what is intact
        once = {name: arm(folder, workers) for name, arm in floors.items()}
        for name, loader in {**loaders, **once}.items():
            value = epoch(loader)
            if turn > 1:
                values.setdefault(name, []).append(value)
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
    return (
        "Mean absolute difference from PIL's pixels (0 to 255), on average (in brackets: of the "
        f"worst of {len(crops)} images): training crops {statistics.mean(crops):.3f} "
        f"({max(crops):.3f}), validation {statistics.mean(centres):.3f} ({max(centres):.3f})."
    )


def absent() -> dict[str, str]:
    """The arms that are not installed, each with what installs it."""
    return {arm: "make .servers/loaders" for arm in ARMS if not installed(arm)}


def main(size: Size | None = None) -> Result:
    size = size or Size()
    warnings.filterwarnings("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    results: dict[tuple[str, int], Values] = {}
    augmented: Values = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_data(folder, size.files)
        for kind in KINDS:
            for workers in range(1, size.workers + 1):
                results[kind, workers] = measured(
                    folder / kind, workers, size.repeats, ARMS, FLOORS
                )
        if size.augmented:
            augmented = measured(folder / "full", 1, size.repeats, AUGMENTED, {})
        pixels = differences(folder / "full")
    rows = []
    for (kind, workers), arms in results.items():
        rows += rows_of(arms, f"{KINDS[kind]}, {workers} {plural('worker', workers)}")
    rows += rows_of(augmented, "photographs, RandAugment, 1 worker")

    def share(kind: str, other: str) -> float | None:
        """distdl's CPU time of the other's, with one worker: the median of the turns' ratios."""
        arms = results[kind, 1]
        if other not in arms:
            return None
        turns = zip(arms[OURS], arms[other], strict=True)
        return statistics.median(ours[1] / its[1] for ours, its in turns)

    goals = [
        Goal(f"loader, CPU time of {other}'s, {KINDS[kind]}", f"at most {goal}", share(kind, other))
        for kind, other, goal in (
            ("full", "FFCV", OF_FFCV),
            ("small", "FFCV", OF_FFCV_SMALL),
            ("full", "DALI, CPU", OF_DALI),
            ("small", "DALI, CPU", OF_DALI),
            ("small", TORCHVISION, OF_TORCHVISION),
        )
    ]
    of = "photographs" if "DISTDL_PHOTOGRAPHS" in os.environ else "generated JPEGs, 110 kB each"
    notes = [pixels, f"The images: {size.files} files of {of}."]
    if augmented:
        notes.append("FFCV and SPDL have no RandAugment; that has no goal.")
    ratio = share("full", TORCHVISION)
    assert ratio is not None
    return Result(
        "Loader: photographs to batches",
        f"{TORCHVISION}: its reference in a DataLoader; CPU time, 1 worker",
        f"at most {OF_TORCHVISION}",
        ratio,
        rows,
        "python -m benchmarks.run loader",
        what=f"loader, CPU time of {TORCHVISION}'s, photographs",
        more=goals,
        notes="\n\n".join(notes),
    )


def rows_of(arms: Values, what: str) -> list[str]:
    rows = []
    for arm, values in arms.items():
        rows.append(row(f"{arm}; {what}", [v[1] for v in values], "CPU ms/img"))
        rows.append(row(f"{arm}; {what}", [v[0] for v in values], "img/s"))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    size = Size(**vars(parser.parse_args()))
    with one_line("loader"):
        print(main(size).markdown())
