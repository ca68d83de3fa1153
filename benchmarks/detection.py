"""Mask R-CNN: `+experiment=maskrcnn_coco` against the same recipe in a plain torchvision loop.

Both train the same network with random weights on two gloo ranks, on a drawn set in COCO's format:
shapes of five categories on photographs, with crowds, empty images, tiny and cut objects
(tests/drawn_coco.py). One validation at the end gives box and mask AP50: distdl's own, and that of
pycocotools in the loop (benchmarks/detection_loop.py). The two take turns, seed by seed. CPU time
is that of both ranks from their start to their end, so other work on the machine hardly changes it.

    python -m benchmarks.detection --seeds 1         # prints it; about 40 CPU minutes
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pair, photographs, runs
from benchmarks.ctrl_c import one_line
from benchmarks.table import Goal, Result, row, turned
from distdl.runs.directory import RunDirectory
from tests import drawn_coco

SEEDS = 3
EPOCHS, TRAIN, VAL = 13, 200, 100
BATCH = 2  # of a rank
RATE = 2e-4  # of AdamW, which learns from random weights in hundreds of steps, where SGD needs more
WARM_UP = 50  # steps
# Images are 64 to 128 pixels large.
NETWORK = {
    "min_size": 96,
    "max_size": 128,
    "rpn_pre_nms_top_n_train": 200,
    "rpn_pre_nms_top_n_test": 200,
    "rpn_post_nms_top_n_train": 100,
    "rpn_post_nms_top_n_test": 50,
    "rpn_batch_size_per_image": 64,
    "box_batch_size_per_image": 32,
    "box_positive_fraction": 0.125,
    "box_detections_per_img": 20,
}
OURS, LOOP = "distdl", "a torchvision loop"
NUMBERS = ("box_ap50", "mask_ap50")


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    epochs: int = EPOCHS
    train: int = TRAIN
    val: int = VAL
    seeds: int = SEEDS

    @property
    def milestones(self) -> list[int]:
        """As 16 and 22 of 26."""
        return [round(self.epochs * share / 26) for share in (16, 22)]


@dataclass(frozen=True)
class Trained:
    """The end of a training: CPU seconds of both ranks, and the numbers of its validation."""

    cpu: float
    numbers: dict[str, float]


def _cpu() -> float:
    """CPU seconds of the processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def by_hand(root: Path, folder: Path, size: Size, seed: int) -> Trained:
    plan: dict[str, Any] = {
        "root": str(root),
        "result": str(folder / f"loop-{seed}.json"),
        "seed": seed,
        "batch": BATCH,
        "epochs": size.epochs,
        "rate": RATE,
        "milestones": size.milestones,
        "warmup": WARM_UP,
        "network": NETWORK,
    }
    (port,) = pair.free_ports(1)
    code = (
        f"import os, sys; os.environ['MASTER_PORT'] = '{port}'; "
        "from benchmarks import detection_loop; detection_loop.rank_main(sys.argv[1])"
    )
    before = _cpu()
    pair.start(code, plan)
    return Trained(_cpu() - before, json.loads(Path(plan["result"]).read_text(encoding="utf-8")))


def overrides(root: Path, size: Size, seed: int) -> list[str]:
    steps = size.train // (BATCH * pair.RANKS)
    known = ("min_size", "max_size", "rpn_", "box_batch")  # in conf/model/maskrcnn.yaml
    options = {
        f"{'' if name.startswith(known) else '+'}model.network.{name}": value
        for name, value in NETWORK.items()
    }
    return [
        "+experiment=maskrcnn_coco",
        f"data.root={root}",
        f"data.num_classes={len(drawn_coco.CATEGORIES)}",
        f"data.batch_size={BATCH}",
        "data.num_workers=0",
        "model.network.backbone=resnet18",
        *(f"{name}={value}" for name, value in options.items()),
        "optimizer=adamw",
        "~optimizer.momentum",
        f"optimizer.lr={RATE}",
        "optimizer.weight_decay=1e-4",
        f"optimizer.lr_reference_batch={BATCH * pair.RANKS}",
        f"schedule.milestones=[{','.join(map(str, size.milestones))}]",
        f"schedule.warmup_epochs={WARM_UP / steps}",
        f"seed={seed}",
        "trainer.accelerator=cpu",
        f"trainer.devices={pair.RANKS}",
        f"trainer.max_epochs={size.epochs}",
        f"trainer.check_val_every_n_epoch={size.epochs}",
        f"checkpoint.every_n_epochs={size.epochs}",
        "tracking=none",
    ]


def ours(root: Path, folder: Path, size: Size, seed: int) -> Trained:
    run = runs.create_run(folder / "runs", *overrides(root, size, seed))
    before = _cpu()
    pair.work([run.path])
    used = _cpu() - before
    attempt = RunDirectory(run.path).last_attempt()
    assert attempt is not None
    metrics = attempt.status()["metrics"]
    return Trained(used, {name: metrics[f"val/{name}"] for name in NUMBERS})


ARMS = {LOOP: by_hand, OURS: ours}


def measured(size: Size) -> dict[str, list[Trained]]:
    done: dict[str, list[Trained]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "runs").mkdir()
        source = photographs.folder(folder / "photographs")
        root = drawn_coco.draw(folder / "coco", size.train, size.val, photographs=source)
        for seed in range(size.seeds):
            for arm in turned(list(ARMS), seed):
                done[arm].append(ARMS[arm](root, folder, size, seed))
                print(f"  seed {seed}, {arm}: {done[arm][-1]}", flush=True)
    return done


def ratio(done: dict[str, list[Trained]], name: str) -> float:
    """Of the means over the seeds."""
    means = [statistics.fmean(each.numbers[name] for each in done[arm]) for arm in (OURS, LOOP)]
    return means[0] / max(means[1], 1e-9)


def spread(values: Sequence[float]) -> str:
    text = ", ".join(f"{value:.3f}" for value in values)
    return f"{text} (sd {statistics.stdev(values):.3f})" if len(values) > 1 else text


def result(done: dict[str, list[Trained]], size: Size) -> Result:
    cpu = {arm: [each.cpu for each in done[arm]] for arm in ARMS}
    values = {
        f"{arm}, {name}": [each.numbers[name] for each in done[arm]]
        for name in NUMBERS
        for arm in ARMS
    }
    images = size.epochs * size.train
    seeds = f"{size.seeds} seeds" if size.seeds > 1 else "one seed, so the noise is not known"
    listed = "; ".join(f"{name}: {spread(each)}" for name, each in values.items())
    return Result(
        title=f"Mask R-CNN with resnet18 on a drawn set, {images:,} images (AP50)",
        what="Mask R-CNN of 2 gloo ranks on a drawn set, box AP50 against a torchvision loop",
        competitor="the same network and recipe in a DDP loop after torchvision's "
        "references/detection, evaluated by pycocotools",
        goal="at least 0.95",
        ratio=ratio(done, "box_ap50"),
        more=[
            Goal("the same, mask AP50", "at least 0.95", ratio(done, "mask_ap50")),
            Goal(
                "the same, CPU seconds",
                "at most 1.05",
                statistics.fmean(cpu[OURS]) / statistics.fmean(cpu[LOOP]),
            ),
        ],
        rows=[
            *(row(name, each, "AP50") for name, each in values.items()),
            *(row(arm, each, "CPU s") for arm, each in cpu.items()),
        ],
        command="python -m benchmarks.run detection",
        notes=f"{size.epochs} epochs of {size.train} images, {BATCH} a rank, {size.val} validated; "
        f"{seeds}. Ratios are those of the means. {listed}.",
    )


def main(size: Size | None = None) -> Result:
    size = size or Size()
    return result(measured(size), size)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, value in vars(Size()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    size = Size(**vars(parser.parse_args()))
    with one_line("detection"):
        print(main(size).markdown())
