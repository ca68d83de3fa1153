"""The metrics that a module logs over an epoch of training, in a checkpoint from inside that epoch.

Without them a run that resumes there has at the epoch's end the mean of the rest alone, and after
its last batch none: EarlyStopping or a plateau schedule that monitors one would fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

STATES = ("value", "cumulated_batch_size")  # of Lightning's metric; the second one of means alone
SETTINGS = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
)


def epoch_metrics(trainer: Trainer) -> list[dict[str, Any]]:
    """What this rank has added up so far, of numbers that were logged with `on_epoch=True`. Not of
    torchmetrics' metrics, whose state is the module's."""
    return [
        {
            **{name: getattr(metric.meta, name) for name in SETTINGS},
            "reduce_fx": metric.meta.reduce_fx.__name__,
            "sync_dist": metric.meta.sync.should,
            "rank_zero_only": metric.meta.sync.rank_zero_only,
            "states": {k: getattr(metric, k).cpu() for k in STATES if hasattr(metric, k)},
        }
        for metric in trainer.fit_loop.epoch_loop._results.result_metrics
        if metric.is_tensor
        and metric.meta.on_epoch
        and not metric.has_reset
        and metric.meta.sync.group is None
    ]


def restore_epoch_metrics(trainer: Trainer, saved: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Continues the sums in a resumed epoch.

    Args:
        saved: Of each rank. On another number of ranks, each gets an equal part of all.
    """
    own, ranks = trainer.global_rank, trainer.world_size
    results = trainer.fit_loop.epoch_loop._results
    device = trainer.lightning_module.device
    entries = saved[own] if len(saved) == ranks else _of_all(saved, ranks)
    for entry in entries:
        settings = {name: value for name, value in entry.items() if name != "states"}
        first = torch.zeros((), device=device)
        results.log(value=first, batch_size=1, sync_dist_fn=trainer.strategy.reduce, **settings)
        metric = results[f"{entry['fx']}.{entry['name']}"]
        for name, value in entry["states"].items():
            setattr(metric, name, value.to(device))
        metric._forward_cache = None
        # Else the first batch begins new sums.
        trainer._logger_connector._first_loop_iter = False


def _of_all(saved: Sequence[Sequence[Mapping[str, Any]]], ranks: int) -> list[Mapping[str, Any]]:
    entries: list[Mapping[str, Any]] = []
    for same in zip(*saved, strict=False):  # a rank that has logged less decides
        total = {}
        for name in same[0]["states"]:
            values = torch.stack([entry["states"][name] for entry in same])
            extreme = {"max": values.amax, "min": values.amin}.get(same[0]["reduce_fx"])
            total[name] = extreme() if extreme else values.sum(0) / ranks
        entries.append({**same[0], "states": total})
    return entries
