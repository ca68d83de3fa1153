"""Bytes that a rank sends per step, counted in real runs of two gloo ranks, for every strategy.

They train a ResNet-18 with batch norm at 32 pixels. The competitor is DDP with plain gradients,
which Lightning's own DDPStrategy sends.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import pair, runs
from benchmarks.table import Goal
from distdl.distributed.traffic import in_words

SKIPPED, STEPS = 2, 8
COMMON = (
    "model=resnet18",
    "data=synthetic",
    "data.image_size=32",
    "data.num_classes=10",
    "data.batch_size=8",
    "data.train_samples=1600",
    "schedule.warmup_epochs=0",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "trainer.max_epochs=1",
    f"trainer.limit_train_batches={SKIPPED + STEPS}",
    "trainer.limit_val_batches=0",
    # Reading the loss at a log step sends four bytes.
    "trainer.log_every_n_steps=1000",
    "tracking=none",
    "callbacks=[traffic]",
)
# Smaller buckets for DeepSpeed, because of the small model and a laptop's memory.
SMALL = ("strategy.reduce_bucket_size=5_000_000", "strategy.allgather_bucket_size=5_000_000")
ARMS: dict[str, tuple[str, ...]] = {
    "ddp": ("strategy=ddp",),
    "ddp, bf16": ("strategy=ddp", "strategy.comm_hook=bf16"),
    "ddp, fp16": ("strategy=ddp", "strategy.comm_hook=fp16"),
    "ddp, powersgd of rank 1": (
        "strategy=ddp",
        "strategy.comm_hook=powersgd",
        "strategy.hook_start_step=2",
    ),
    "ddp, powersgd of rank 4": (
        "strategy=ddp",
        "strategy.comm_hook=powersgd",
        "strategy.hook_start_step=2",
        "strategy.powersgd_rank=4",
    ),
    "ddp, post_local_sgd every 4": (
        "strategy=ddp",
        "strategy.comm_hook=post_local_sgd",
        "strategy.hook_start_step=2",
    ),
    "local_sgd every 8": ("strategy=local_sgd", "strategy.sync_every=8"),
    "local_sgd every 8, nesterov": (
        "strategy=local_sgd",
        "strategy.sync_every=8",
        "strategy.outer=nesterov",
    ),
    "deepspeed_zero1": ("strategy=deepspeed_zero1", *SMALL),
    "deepspeed_zero2": ("strategy=deepspeed_zero2", *SMALL),
    "deepspeed_zero3": ("strategy=deepspeed_zero3", *SMALL),
    "fsdp": ("strategy=fsdp",),
    # For the same global batch, the one pipeline gets the batches of both devices.
    "pipeline of 2": ("strategy=pipeline", "strategy.balance=parameters", "data.batch_size=16"),
}


@dataclass(frozen=True)
class Table:
    """The bytes that the ranks sent, as Markdown."""

    rows: list[str]
    goals: tuple[Goal, ...] = ()

    def markdown(self) -> str:
        header = (
            "| | given to collectives | sent by the busiest rank | of ddp | collectives |\n"
            "|---|---|---|---|---|\n"
        )
        return "\n\n".join(
            (
                "## Bytes per step, two ranks",
                "Competitor: DDP with plain gradients. ResNet-18 (11.2 million parameters, batch "
                f"norm) at 32 px, mean of {STEPS} steps, counted at torch's dispatcher; the bytes "
                "that leave a rank are computed for the ring algorithm. A test compares them with "
                "the bytes that the kernel saw the ranks write. A pipeline sends activations, "
                "which are small at 32 px.",
                header + "\n".join(self.rows),
                "`python -m benchmarks.run traffic`",
            )
        )


def count(run: Path) -> dict[str, Any]:
    """The busiest rank's counts per step of one run."""
    result = json.loads((run / "logs" / "traffic.json").read_text())
    assert result["steps"] == STEPS, result["steps"]
    return max(result["ranks"], key=lambda rank: rank["sent"])


def main(arms: dict[str, tuple[str, ...]] = ARMS) -> Table:
    rows = []
    ddp = 0.0
    with tempfile.TemporaryDirectory() as folder:
        paths = {n: runs.create_run(Path(folder), *COMMON, *o).path for n, o in arms.items()}
        # One pair of ranks executes all runs, except DeepSpeed's, which need fresh processes.
        alone = [name for name in arms if name.startswith("deepspeed")]
        for group in ([n for n in arms if n not in alone], *([name] for name in alone)):
            if group:
                pair.work([paths[name] for name in group])
        counts = {name: count(path) for name, path in paths.items()}
    for name, sums in counts.items():
        ddp = ddp or sums["sent"]
        collectives = ", ".join(
            f"{tally['calls']:g} {kind.strip('_')}" for kind, tally in sums["collectives"].items()
        )
        payload, sent = in_words(sums["payload"]), in_words(sums["sent"])
        rows.append(f"| {name} | {payload} | {sent} | {sums['sent'] / ddp:.3f} | {collectives} |")
    return Table(rows)
