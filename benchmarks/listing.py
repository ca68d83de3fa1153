"""Lists 100,000 images in 100 class folders, as before the first batch, against torchvision's
ImageFolder. The files are empty, and the kernel has cached their names.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.table import Result, paired, row, turned

CLASSES, FILES, REPEATS = 100, 1000, 7


def create_files(folder: Path, classes: int, files: int) -> None:
    for number in range(classes):
        inside = folder / f"class_{number:03d}"
        inside.mkdir()
        for file in range(files):
            (inside / f"{file:06d}.jpg").touch()


def main(classes: int = CLASSES, files: int = FILES, repeats: int = REPEATS) -> Result:
    from torchvision.datasets import ImageFolder

    from distdl.data.folder import FolderImages
    from distdl.images.views import EvalView

    arms: dict[str, Callable[[Path], Any]] = {
        "torchvision ImageFolder": ImageFolder,
        "distdl": lambda folder: FolderImages(folder, EvalView(224)),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    with tempfile.TemporaryDirectory() as name:
        create_files(Path(name), classes, files)
        for repeat in range(repeats + 1):
            for arm in turned(list(arms), repeat):
                started = time.perf_counter()
                images = arms[arm](Path(name))
                if repeat:
                    times[arm].append(time.perf_counter() - started)
                assert len(images) == classes * files
    theirs, ours = times.values()
    return Result(
        title="Listing a folder of images (s)",
        what=f"listing {classes * files:,} images in folders against torchvision's ImageFolder",
        competitor="torchvision.datasets.ImageFolder",
        goal="at most 1.0",
        ratio=paired(ours, theirs),
        rows=[row(name, values, "s") for name, values in times.items()],
        command="python -m benchmarks.run listing",
        notes=f"{1e6 * statistics.median(ours) / (classes * files):.2f} us for each file",
    )
