"""Loads a task's initial state: a checkpoint of this or another run, of Lightning, or bare weights.

A new training restores all of the state if it fits, with the learning rates and optimizer settings
of the new config. Otherwise it loads only the weights, and one warning gives the reason.
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from distdl.callbacks import module_state
from distdl.callbacks.checkpointer import KEY
from distdl.callbacks.resume_state import built_rates
from distdl.optim.optimizers import KERNELS
from distdl.runs.directory import shown
from distdl.util.errors import UserError
from distdl.worker.build import Built

log = logging.getLogger(__name__)

# What torch.compile, DistributedDataParallel and `convert --to weights` add to or drop from names.
AFFIX = re.compile(r"^(module|network)\.|_orig_mod\.")
# Keys that only some versions of torch have. All other keys of a schedule's state show its kind.
VERSION_KEYS = ("verbose", "default_min_lr")


def start(context: Built, path: str | None, loop: Callable[..., Any], **more: Any) -> Any:
    """Calls `loop`, the Trainer's `fit`, `validate` or `test`, with a checkpoint if any."""
    if path:
        prepare(context, path)
    return loop(
        context.module,
        datamodule=context.datamodule,
        ckpt_path=path,
        weights_only=not context.config.checkpoint.get("trust_pickle") if path else None,
        **more,
    )


def prepare(context: Built, path: str) -> None:
    """Replaces the Trainer's methods that restore weights (by `load`) and the rest (by `restore`).
    They raise a UserError if the weights do not fit, or if all state fits and the checkpoint has
    already reached this run's limits. An evaluation logs at the checkpoint's step and epoch."""
    trainer, module, file = context.trainer, context.module, shown(Path(path))
    connector, strategy, loop = trainer._checkpoint_connector, trainer.strategy, trainer.fit_loop
    load_weights = strategy.load_model_state_dict
    restore_all = functools.partial(with_loaders, loop, connector.restore_training_state)

    def load(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        names = module.state_dict().keys()
        plain = {AFFIX.sub("", name): name for name in names}
        if "state_dict" in checkpoint:  # else the strategy has read its weights itself
            saved = checkpoint["state_dict"].items()
            named = {k if k in names else plain.get(AFFIX.sub("", k), k): v for k, v in saved}
            checkpoint = {**checkpoint, "state_dict": named}
        try:
            load_weights(checkpoint, strict=strict)
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            what = f"its weights do not fit {type(module).__name__} as configured: {error}"
            remedy = "the class and arguments that wrote it, or strict_loading = False in the class"
            if late := module_state.late_in(checkpoint, names):
                what = f"{late} came into the model, or left it, after the training had started"
                remedy = module_state.REMEDY
            raise UserError.at(file, what, remedy) from None
        if trainer.state.fn != TrainerFn.FITTING:  # Lightning loads only the weights
            loop.epoch_loop._batches_that_stepped = int(checkpoint.get("global_step") or 0)
            loop.epoch_progress.current.completed = int(checkpoint.get("epoch") or 0)

    def restore() -> None:
        if strategy.restore_checkpoint_after_setup:
            # The optimizer's setup has made the loaders, before the position was known.
            loop._combined_loader = None
        checkpoint = connector._loaded_checkpoint
        trains = trainer.state.fn == TrainerFn.FITTING and strategy.lightning_restore_optimizer
        if not trains or not checkpoint or Path(path).is_relative_to(context.run.path):
            return restore_all()
        foreign, reason = KEY not in checkpoint, None
        configured = [[{**group} for group in each.param_groups] for each in trainer.optimizers]
        if foreign:
            loop._combined_loader = None  # the loaders may hold another epoch's order
            if (reason := misfit(checkpoint, trainer)) is None:
                try:
                    connector.restore_optimizers()
                except ValueError as error:  # their parameter groups differ
                    reason = str(error)
        if reason is not None:
            if len(trainer.optimizers) > 1:  # some may have been restored
                strategy.setup_optimizers(trainer)
            message = "%s: only its weights are loaded, and the training starts at step 0: %s"
            return log.warning(message, file, reason)
        longest, loop.max_epochs = loop.max_epochs, None  # Lightning's error names no file
        restore_all()
        loop.max_epochs = longest
        ours = checkpoint.get(KEY) or {}
        ratio = context.checkpointer.batch_ratio(ours)
        apply_settings(trainer, configured, ours.get("rates"), file, ratio)
        context.checkpointer.rates = built_rates(configured)
        progress: Any = loop.epoch_progress.current
        batches = loop.epoch_loop.batch_progress
        complete = progress.processed == progress.ready or batches.is_last_batch
        epochs, steps = progress.ready - (not complete), trainer.global_step
        limits = (("epochs", epochs, longest), ("steps", steps, trainer.max_steps))
        for unit, done, limit in limits:
            if limit not in (None, -1) and done >= limit:
                what = f"is {limit}, but {file} was already trained for {done} {unit}"
                remedy = (
                    f"trainer.max_{unit}={done + limit}, or resume_from a file with its weights "
                )
                remedy += f"alone: python -m distdl convert {file} --to weights"
                raise UserError.at(f"trainer.max_{unit}", what, remedy)
        if foreign:
            context.checkpointer.position.epoch = epochs
        if foreign and not complete:
            message = "%s was saved after %d batches of an epoch, and does not list their samples: "
            message += "in the rest of that epoch some samples are repeated and others are missing"
            log.warning(message, file, batches.current.ready)

    strategy.load_model_state_dict = load  # type: ignore[method-assign]
    connector.restore_training_state = restore  # type: ignore[method-assign]


def with_loaders(loop: Any, restore: Callable[[], None]) -> None:
    """Restores the training. If `configure_optimizers` has built the loaders already, those that
    save their own state are built again, since Lightning restores it as it builds them."""
    restore()
    if loop._combined_loader_states_to_load and loop._combined_loader is not None:
        loop._data_fetcher.teardown()
        loop._combined_loader = None


def apply_settings(
    trainer: Trainer, configured: list[Any], before: list[Any] | None, file: str, batch_ratio: float
) -> None:
    """Applies the new run's learning rates and optimizer settings where the checkpoint's differ.
    `configured` has each optimizer's groups as built now, `before` the rates with which the
    checkpoint's were built, if recorded. The new global batch will change them by `batch_ratio`."""
    schedules = [entry.scheduler for entry in trainer.lr_scheduler_configs]
    # Schedules that also change the momentum keep it among their own settings.
    moved = {"momentum", "betas"} if any(hasattr(s, "cycle_momentum") for s in schedules) else set()
    differences: dict[str, str] = {}
    for number, (optimizer, groups) in enumerate(zip(trainer.optimizers, configured, strict=True)):
        settings = set(getattr(optimizer, "defaults", ())) - {"lr", *KERNELS, *moved}
        for index, (group, new) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
            for name in sorted(settings & new.keys()):
                if group.get(name) != new[name]:
                    differences[name] = f"{name} {new[name]} instead of {group.get(name)}"
                    group[name] = new[name]
            # Lightning records the built rate only with a schedule; a module may have set another.
            was, now = group.get("initial_lr"), new.get("initial_lr", new["lr"])
            with suppress(IndexError, TypeError):
                was = before[number][index]  # type: ignore[index]
            ratio = now / (was * batch_ratio) if was else 1.0
            if math.isclose(ratio, 1.0, rel_tol=1e-6):
                continue
            differences["lr"] = f"lr {now:.4g} instead of {was:.4g}"
            for name in ("initial_lr", "reference_lr", "lr", "max_lr", "min_lr"):
                if name in group:
                    group[name] *= ratio
            for schedule in schedules:
                moves = getattr(schedule, "optimizer", None) is optimizer
                if moves and index < len(getattr(schedule, "base_lrs", ())):
                    schedule.base_lrs[index] *= ratio
                    schedule._last_lr[index] *= ratio
    if differences:
        log.info("%s: this run continues with %s", file, ", ".join(differences.values()))


def misfit(checkpoint: Mapping[str, Any], trainer: Trainer) -> str | None:
    """The reason why a file's optimizers and schedules do not fit this training; None: they may."""
    states, optimizers = checkpoint.get("optimizer_states"), trainer.optimizers
    if states is None or "lr_schedulers" not in checkpoint:
        return "it has no optimizer state"
    if len(states) != len(optimizers):
        return f"the number of its optimizers is {len(states)}, not {len(optimizers)}"
    for state, optimizer in zip(states, optimizers, strict=True):
        kind: Any = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed wraps it
        # Switches are left out: an older file may lack one that torch added later, off by default.
        defaults = getattr(kind, "defaults", {})
        settings = {k for k, v in defaults.items() if not isinstance(v, bool | None)}
        if lacks := settings - state["param_groups"][0].keys():
            return (
                f"its optimizer is not {type(kind).__name__}: it lacks {', '.join(sorted(lacks))}"
            )
    configured = [entry.scheduler.state_dict() for entry in trainer.lr_scheduler_configs]
    same = [*map(settings_of, configured)] == [*map(settings_of, checkpoint["lr_schedulers"])]
    return None if same else "its schedules are of another kind"


def settings_of(schedule: Mapping[str, Any]) -> set[str]:
    return {k for k in schedule if not k.startswith("_") and k not in VERSION_KEYS}
