"""`task=predict` on JPEGs, against the validation of the same images by the same network.

Both are the real worker in this process. A run that only validates takes turns with one that
predicts; the time is that of Lightning's loop, from its first batch to its last row on the disk,
without the start, which is the same. With one thread and no loader's worker, CPU seconds hardly
depend on what else runs on the machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import runs
from benchmarks.overhead import alone_and_silent
from benchmarks.table import Goal, Result, against_itself, paired, row, turned

CLASSES, IMAGES, SIDE, REPEATS = 10, 1000, 32, 15
ARMS = {"validation": "validate", "validation again": "validate", "task=predict": "predict"}


def create_images(folder: Path, count: int) -> None:
    """Class folders of JPEGs: noise that was enlarged, which takes as long as a photograph."""
    import numpy as np
    from PIL import Image

    draw = np.random.default_rng(0)
    for split, images in (("train", CLASSES), ("val", count)):
        for number in range(images):
            path = folder / split / f"class{number % CLASSES}" / f"{number:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            noise = Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8))
            noise.resize((SIDE, SIDE)).save(path, quality=90)


def seconds(folder: Path, task: str, options: Sequence[str]) -> tuple[float, float]:
    """Of the loop of one run: on the wall, and of this process's CPU time."""
    from lightning.pytorch.loops import _EvaluationLoop, _PredictionLoop

    loop: Any = _PredictionLoop if task == "predict" else _EvaluationLoop
    taken = []
    inner = loop.run

    def timed(self: Any) -> Any:
        started = time.perf_counter()
        used = time.process_time()
        result = inner(self)
        taken.append((time.perf_counter() - started, time.process_time() - used))
        return result

    loop.run = timed
    try:
        runs.work(runs.create_run(folder, *options, f"task={task}", "task.checkpoint=none"))
    finally:
        loop.run = inner
    return taken[0]


def main(images: int = IMAGES, repeats: int = REPEATS) -> Result:
    speeds: dict[str, list[float]] = {name: [] for name in ARMS}
    per_cpu: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as name, alone_and_silent():
        folder = Path(name)
        create_images(folder / "images", images)
        (folder / "runs").mkdir()
        options = (
            "data=imagenet",
            f"data.root={folder / 'images'}",
            f"data.num_classes={CLASSES}",
            f"data.image_size={SIDE}",
            "data.batch_size=50",
            "data.num_workers=0",
            "model=resnet18",
            "tracking=none",
            "trainer.accelerator=cpu",
        )
        for repeat in range(repeats + 1):  # the first is to warm up
            for arm in turned(list(ARMS), repeat):
                taken, used = seconds(folder / "runs", ARMS[arm], options)
                if repeat:
                    speeds[arm].append(images / taken)
                    per_cpu[arm].append(images / used)
    theirs, again, ours = speeds.values()
    cpu = paired(per_cpu["task=predict"], per_cpu["validation"])
    return Result(
        title=f"Predictions of {images:,} JPEGs of {SIDE} pixels, resnet18 (img/s)",
        what="task=predict, resnet18, img/s against the validation",
        competitor="task=validate of the same images and weights",
        goal="at least 0.95",
        ratio=paired(ours, theirs),
        same=against_itself(theirs, again),
        rows=[
            *(row(name, values, "img/s") for name, values in speeds.items()),
            *(row(name, values, "img/CPU s") for name, values in per_cpu.items()),
        ],
        more=[Goal("the same, images per CPU second", "at least 0.95", cpu)],
        command="python -m benchmarks.run predict",
    )
