"""The memory of a rank's loading workers, threads and processes: PSS, in which pages that processes
share are divided among them.

    python -m benchmarks.loader_memory

Each arm is a process that trains nothing: it takes all batches of 50 images of 224 pixels, and of
the validation, three times over (generated JPEGs of ImageNet's median size, or those of
$DISTDL_PHOTOGRAPHS). Two numbers of each: after the first epoch, and after the last. The workers of
training and of validation stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from benchmarks import photographs
from benchmarks.ctrl_c import one_line
from distdl.util import table

BATCH, EPOCHS, TURNS = 50, 3, 3
WORKERS = (1, 2, 4)
KINDS = ("threads", "processes")


def create(folder: Path) -> None:
    """Class folders of 400 training images and 100 for the validation."""
    originals = sorted(photographs.folder(folder / "generated").rglob("*.jpg"))
    for split, count in (("train", 400), ("val", 100)):
        for number in range(count):
            original = originals[number % len(originals)]
            target = folder / "images" / split / original.parent.name / f"{number:04d}.jpg"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(original.read_bytes())


def measured(folder: Path, kind: str, workers: int) -> list[float]:
    """MB of this process and its workers after each epoch."""
    from distdl.data import StoredImages, TrainPosition
    from distdl.data.loading import distribute

    root = folder / "images"
    data = StoredImages(
        str(root),
        BATCH,
        num_classes=len([*(root / "train").iterdir()]),
        num_workers=workers,
        worker_kind="threads" if kind == "threads" else "processes",
        draws="counter",
    )
    data.setup()
    distribute(data, rank=0, world_size=1, seed=0, position=TrainPosition())
    loaders = data.train_dataloader(), data.val_dataloader()
    after = []
    for _ in range(EPOCHS):
        for loader in loaders:
            for batch in loader:
                assert len(batch["label"]) == BATCH
        here = psutil.Process()
        tree = [here, *here.children(recursive=True)]
        after.append(sum(each.memory_full_info().pss for each in tree) / 1e6)
    return after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arm", nargs=3, metavar=("FOLDER", "KIND", "WORKERS"))
    arm = parser.parse_args().arm
    if arm:
        print(json.dumps(measured(Path(arm[0]), arm[1], int(arm[2]))))
        return
    with tempfile.TemporaryDirectory() as name:
        create(Path(name))

        def run(kind: str, workers: int) -> list[float]:
            command = [sys.executable, "-m", "benchmarks.loader_memory", "--arm", name, kind]
            done = subprocess.run([*command, str(workers)], stdout=subprocess.PIPE, check=True)
            return json.loads(done.stdout.splitlines()[-1])

        arms = [("none", 0), *((kind, number) for kind in KINDS for number in WORKERS)]
        # In turns, and the median of each: the memory of a process varies by some 30 MB.
        turns = [{arm: run(*arm) for arm in arms} for _ in range(TURNS)]
        alone = statistics.median(turn["none", 0][-1] for turn in turns)
        rows = []
        for kind, workers in arms:
            first, last = (
                statistics.median(turn[kind, workers][epoch] for turn in turns) for epoch in (0, -1)
            )
            each = f"{(last - alone) / workers:.0f}" if workers else ""
            rows.append((f"{workers} {kind}", f"{first:.0f}", f"{last:.0f}", each))
        table.show(("workers", "MB after 1 epoch", f"after {EPOCHS}", "per worker"), rows)


if __name__ == "__main__":
    with one_line("loader_memory"):
        main()
