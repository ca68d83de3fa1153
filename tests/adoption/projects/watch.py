"""Records what each batch was and what it did; ends the process at a given batch."""

import json
import os
import signal
from pathlib import Path

import torch
from lightning.pytorch import Callback


def number(trainer):
    """Of the batch, from 1, over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


class Watch(Callback):
    """Appends a line for each training batch to `$SEEN/rank<r>.jsonl`.

    `$KILL_AT="RANK BATCH"`: that rank is killed when that batch begins.
    """

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if os.environ.get("KILL_AT") == f"{trainer.global_rank} {number(trainer)}":
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if "SEEN" not in os.environ:
            return
        loss = outputs["loss"] if isinstance(outputs, dict) and "loss" in outputs else outputs
        logged = trainer.callback_metrics.items()
        weights = torch.cat([p.detach().flatten().double() for p in pl_module.parameters()])
        line = {
            "epoch": trainer.current_epoch,
            "batch": number(trainer),
            "ids": batch["id"].tolist(),
            "loss": float(loss) if isinstance(loss, torch.Tensor) else None,
            "logged": {k: float(v) for k, v in logged if not k.startswith(("val", "lr-"))},
            # One number that hardly two different sets of weights share.
            "weights": float(weights @ torch.arange(1.0, len(weights) + 1, dtype=torch.double)),
            "rates": [g["lr"] for o in trainer.optimizers for g in o.param_groups],
        }
        with Path(os.environ["SEEN"], f"rank{trainer.global_rank}.jsonl").open(
            "a", encoding="utf-8"
        ) as file:
            file.write(json.dumps(line) + "\n")
