"""State that an exact resume needs and Lightning (2.6) does not save."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch import callbacks as lightnings
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from distdl.data.held_generators import HeldGenerators
from distdl.distributed import process_group
from distdl.loops.generators import set_rng_state
from distdl.optim import learning_rates
from distdl.optim import optimizers as optim
from distdl.optim.budget import MICRO
from distdl.optim.parameter_groups import plain_name

log = logging.getLogger(__name__)

# Callbacks whose `on_train_epoch_start` sets up the epoch and may run twice. Lightning skips this
# hook when it resumes inside an epoch.
SET_UP_THE_EPOCH = (lightnings.GradientAccumulationScheduler, lightnings.StochasticWeightAveraging)


def used_by_timer(checkpoint: Mapping[str, Any]) -> int:
    """Microseconds that a training has used by Lightning's Timer, which counted `trainer.max_time`
    before distdl did."""
    timer = checkpoint.get("callbacks", {}).get("Timer", {})
    return round(timer.get("time_elapsed", {}).get("train", 0.0) * MICRO)


def restart_validation(fit_loop: dict[str, Any]) -> None:
    """For a save before a validation, which the resumed run begins with. `total` counts the batches
    of the validations in this epoch."""
    progress = fit_loop["epoch_loop.val_loop.batch_progress"]
    done = progress["total"]["completed"]
    progress["total"].update(ready=done + 1, started=done + 1, processed=done, completed=done)
    progress["current"].update(ready=1, started=1, processed=0, completed=0)
    progress["is_last_batch"] = False


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """For a save after an epoch that was cut short, which Lightning counts as processed."""
    for part in ("total", "current"):
        fit_loop["epoch_progress"][part]["processed"] -= 1


def recount_batches(trainer: Trainer, saved: dict[str, Any], samples_per_batch: int) -> None:
    """Converts Lightning's batch counts if a batch has another size than before; rounds
    up, so that the remaining batches never need more samples than the epoch has left.

    Args:
        saved: Our part of the checkpoint.
        samples_per_batch: In this run; 0 if unknown.
    """
    if not samples_per_batch or saved["samples_per_batch"] == samples_per_batch:
        return
    progress: Any = trainer.fit_loop.epoch_loop.batch_progress
    # 1 if the save came before Lightning increments `completed` (on_train_batch_end); else 0.
    open_batches = progress.current.processed - progress.current.completed
    shift = math.ceil(saved["consumed"] / samples_per_batch) - progress.current.processed
    for part in (progress.current, progress.total):
        for count in ("ready", "started", "processed"):
            setattr(part, count, getattr(part, count) + shift)
        part.completed = part.processed - open_batches


def give_loader_states(checkpoint: dict[str, Any], states: list[list[Any]], rank: int) -> bool:
    """Puts this rank's states where Lightning takes them from; none at another world size. Returns
    whether there are any."""
    mine = states[rank] if len(states) == process_group.world_size() else []
    checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = mine
    return bool(mine)


def rescale(
    trainer: Trainer, optimizer: dict[str, Any] | None, before: int | None, now: int | None
) -> None:
    """Adapts to another number of samples per step (None: unknown). The rate follows the scaling
    rule of the config's `optimizer` (None: it is left alone), and the schedule keeps its epoch."""
    if not before or not now or before == now:
        return
    if not optimizer:
        log.warning("the global batch was %d and is %d: the rate does not change", before, now)
        return
    old, new = learning_rates.rate_of(optimizer, before), learning_rates.rate_of(optimizer, now)
    for schedule in (entry.scheduler for entry in trainer.lr_scheduler_configs):
        optim.rescale_schedule(
            schedule, schedule.optimizer, old_lr=old, new_lr=new, step_ratio=before / now
        )
    log.warning(
        "the global batch was %d and is %d: the learning rate goes from %.4g to %.4g (%s)",
        before,
        now,
        old,
        new,
        learning_rates.RateScaling.of(optimizer).rule,
    )


def built_rates(optimizers: list[Any]) -> list[list[float]]:
    """The rates of new optimizers, without the first factor of the schedule."""
    return [[float(g.get("initial_lr", g["lr"])) for g in groups] for groups in optimizers]


def shares_of(trainer: Trainer) -> tuple[int, int]:
    """This rank's share of the samples, and how many there are: ranks that work on the same
    samples have one."""
    shares = trainer.distributed_sampler_kwargs or {}
    rank = shares.get("rank", trainer.global_rank)
    return rank, shares.get("num_replicas", trainer.world_size)


def restore_rng(
    states: list[dict[str, Any]], held: HeldGenerators, seed: int, own: int | None, share: int
) -> None:
    """Restores the state of rank `own`. At another world size, or if None (ranks share samples in
    other groups), reseeds from `seed` and the `share` of the samples: ranks with the same samples
    must drop the same activations."""
    from lightning.pytorch import seed_everything

    if own is None or len(states) != process_group.world_size():
        seed_everything(seed + 1000 * share, verbose=False)
        held.restore_shared([each.get("held") or {} for each in states], seed, share)
        return
    set_rng_state(states[own], held)


def of_parameters(trainer: Trainer, waiting: Sequence[Optimizer]) -> dict[str, Any]:
    """The state of parameters beyond weights and optimizer state. Collective.

    Args:
        waiting: Optimizers whose gradients, accumulated since their last step, wait for the next.
    """
    named = list(trainer.lightning_module.named_parameters())
    frozen = process_group.gather([name for name, p in named if not p.requires_grad])
    groups = [group for optimizer in waiting for group in optimizer.param_groups]
    wanted = {id(parameter) for group in groups for parameter in group["params"]}
    gradients = {name: p.grad for name, p in named if id(p) in wanted and p.grad is not None}
    by_hand = not trainer.lightning_module.automatic_optimization
    if wanted and not by_hand and isinstance(trainer.strategy.model, DistributedDataParallel):
        # Between batches that are accumulated for it, DDP's ranks have sent nothing.
        gradients = _means(gradients, dict(named))
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}
    return {"frozen": sorted({n for names in frozen for n in names}), "gradients": whole}


def _means(
    gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.Tensor]:
    """The means over the ranks, of which some may have no gradient. Collective."""
    means = {}
    for name in sorted({n for names in process_group.gather([*gradients]) for n in names}):
        mean = gradients[name].clone() if name in gradients else torch.zeros_like(parameters[name])
        dist.all_reduce(mean)
        means[name] = mean / process_group.world_size()
    return means


def restore_parameters(module: nn.Module, saved: dict[str, Any]) -> None:
    """Restores accumulated gradients, and freezes the same parameters (BackboneFinetuning), but for
    those that the module itself trains from some epoch on."""
    own = getattr(module, "trained_later", ())
    for name, parameter in module.named_parameters() if "frozen" in saved else ():
        if parameter.requires_grad == (name in saved["frozen"]) and plain_name(name) not in own:
            parameter.requires_grad_(name not in saved["frozen"])
        if name not in saved["gradients"]:
            continue
        gradient = saved["gradients"][name].to(device=parameter.device, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            gradient = distribute_tensor(gradient, mesh, placements, src_data_rank=None)
        parameter.grad = gradient.clone()


def set_up_epoch_again(trainer: Trainer) -> None:
    """After a resume inside an epoch, runs the SET_UP_THE_EPOCH callbacks and keeps the rates."""
    if not trainer.fit_loop.restarted_mid_epoch:
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, SET_UP_THE_EPOCH):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, rate in zip(
        groups, rates, strict=True
    ):  # a callback's new scheduler has set its first rate
        group["lr"] = rate


def remove_rate_finder(trainer: Trainer) -> None:
    """Removes LearningRateFinder: a resumed run has its rate and must not search for one."""
    others = [c for c in trainer.callbacks if not isinstance(c, lightnings.LearningRateFinder)]  # type: ignore[attr-defined]
    trainer.callbacks = others  # type: ignore[attr-defined]
