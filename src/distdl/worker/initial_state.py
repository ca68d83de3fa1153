"""What a task takes from a checkpoint: its own run's, another run's, Lightning's, or bare weights.

A new training restores all of its state if that fits, with the rates and settings of the new
config. Otherwise it takes only the weights, and one warning gives the reason.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from distdl.callbacks.checkpointer import KEY
from distdl.callbacks.resume_state import built_rates
from distdl.optim.optimizers import KERNELS
from distdl.runs.directory import shown
from distdl.util.errors import UserError
from distdl.worker.build import Built

log = logging.getLogger(__name__)

# What torch.compile, DistributedDataParallel and `convert --to weights` change in names.
AFFIX = re.compile(r"^(module|network)\.|_orig_mod\.")
# Keys that differ between versions of torch. All other keys of a schedule's state show its kind.
OF_VERSIONS = ("verbose", "default_min_lr")


def start(context: Built, path: str | None, loop: Callable[..., Any], **more: Any) -> Any:
    """Calls `fit`, `validate` or `test` of the Trainer, from a checkpoint if there is one."""
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
    """Installs `load` where the Trainer restores weights, and `restore` where it restores the rest.
    They raise a UserError if the weights do not fit, or if all of it fits but the checkpoint has
    already trained as long as this run shall. An evaluation logs at its step and epoch."""
    trainer, module, file = context.trainer, context.module, shown(Path(path))
    connector, strategy, loop = trainer._checkpoint_connector, trainer.strategy, trainer.fit_loop
    load_weights, restore_all = strategy.load_model_state_dict, connector.restore_training_state

    def load(checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        names = module.state_dict().keys()
        plain = {AFFIX.sub("", name): name for name in names}
        saved = checkpoint["state_dict"].items()
        named = {k if k in names else plain.get(AFFIX.sub("", k), k): v for k, v in saved}
        try:
            load_weights({**checkpoint, "state_dict": named}, strict=strict)
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            what = f"its weights are not those of {type(module).__name__} as configured: {error}"
            remedy = "the class and arguments that wrote it; strict_loading = False of the module"
            raise UserError.at(file, what, remedy) from None
        if trainer.state.fn != TrainerFn.FITTING:  # Lightning takes only the weights
            loop.epoch_loop._batches_that_stepped = int(checkpoint.get("global_step") or 0)
            loop.epoch_progress.current.completed = int(checkpoint.get("epoch") or 0)

    def restore() -> None:
        checkpoint = connector._loaded_checkpoint
        trains = trainer.state.fn == TrainerFn.FITTING and strategy.lightning_restore_optimizer
        if not trains or not checkpoint or Path(path).is_relative_to(context.run.path):
            return restore_all()
        foreign, why = KEY not in checkpoint, None
        asked = [[{**group} for group in each.param_groups] for each in trainer.optimizers]
        if foreign:
            loop._combined_loader = None  # the loaders may have started with another epoch's order
            if (why := misfit(checkpoint, trainer)) is None:
                try:
                    connector.restore_optimizers()
                except ValueError as error:  # their parameter groups differ
                    why = str(error)
        if why is not None:
            if len(trainer.optimizers) > 1:  # the first ones may have been restored
                strategy.setup_optimizers(trainer)
            message = "%s: its weights are taken alone, and the training begins anew: %s"
            return log.warning(message, file, why)
        longest, loop.max_epochs = loop.max_epochs, None  # Lightning's refusal names no file
        restore_all()
        loop.max_epochs = longest
        kept = checkpoint.get(KEY) or {}
        ask_again(trainer, asked, kept.get("rates"), file, context.checkpointer.batch_ratio(kept))
        context.checkpointer.rates = built_rates(asked)
        begun: Any = loop.epoch_progress.current
        batches = loop.epoch_loop.batch_progress
        complete = begun.processed == begun.ready or batches.is_last_batch
        epochs, steps = begun.ready - (not complete), trainer.global_step
        limits = (("epochs", epochs, longest), ("steps", steps, trainer.max_steps))
        for unit, done, limit in limits:
            if limit not in (None, -1) and done >= limit:
                what = f"is {limit}, and {file} was trained for {done} {unit}"
                more = f"trainer.max_{unit}={done + limit}, or with checkpoint.resume_from its "
                more += f"weights alone: python -m distdl convert {file} --to weights"
                raise UserError.at(f"trainer.max_{unit}", what, more)
        if foreign:
            context.checkpointer.position.epoch = epochs
        if foreign and not complete:
            message = "%s was saved after %d batches of an epoch, without a list of their samples: "
            message += "of that epoch some samples come again, and others not at all"
            log.warning(message, file, batches.current.ready)

    strategy.load_model_state_dict = load  # type: ignore[method-assign]
    connector.restore_training_state = restore  # type: ignore[method-assign]


def ask_again(
    trainer: Trainer, asked: list[Any], before: list[Any] | None, file: str, batch_ratio: float
) -> None:
    """Gives a new run its configured rates and settings, where the checkpoint's differ: `asked` has
    each optimizer's groups as built, `before` the rates with which the checkpoint's were built, if
    recorded; the rate will change with the global batch by `batch_ratio`."""
    schedules = [entry.scheduler for entry in trainer.lr_scheduler_configs]
    # Schedules that change the momentum as well keep it among their own settings.
    moved = {"momentum", "betas"} if any(hasattr(s, "cycle_momentum") for s in schedules) else set()
    differences: dict[str, str] = {}
    for number, (optimizer, groups) in enumerate(zip(trainer.optimizers, asked, strict=True)):
        settings = set(getattr(optimizer, "defaults", ())) - {"lr", *KERNELS, *moved}
        for index, (group, mine) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
            for name in sorted(settings & mine.keys()):
                if group.get(name) != mine[name]:
                    differences[name] = f"{name} {mine[name]} and not {group.get(name)}"
                    group[name] = mine[name]
            # Lightning's own checkpoints record the built rate only with a schedule. Without one,
            # the module may have set the rate.
            was, now = group.get("initial_lr"), mine.get("initial_lr", mine["lr"])
            with suppress(IndexError, TypeError):
                was = before[number][index]  # type: ignore[index]
            ratio = now / (was * batch_ratio) if was else 1.0
            if math.isclose(ratio, 1.0, rel_tol=1e-6):
                continue
            differences["lr"] = f"lr {now:.4g} and not {was:.4g}"
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
    """Why the state of optimizers and schedules does not fit this training; None: it may fit."""
    states, optimizers = checkpoint.get("optimizer_states"), trainer.optimizers
    if states is None or "lr_schedulers" not in checkpoint:
        return "it holds no state of optimizers"
    if len(states) != len(optimizers):
        return f"it has {len(states)} optimizers, not {len(optimizers)}"
    for state, optimizer in zip(states, optimizers, strict=True):
        kind: Any = getattr(optimizer, "optimizer", optimizer)  # DeepSpeed wraps it
        # Switches are left out: files from before a switch existed lack it, and it was off then.
        defaults = getattr(kind, "defaults", {})
        settings = {k for k, v in defaults.items() if not isinstance(v, bool | None)}
        if lacks := settings - state["param_groups"][0].keys():
            return f"its optimizer is not {type(kind).__name__}, without {', '.join(sorted(lacks))}"
    mine = [entry.scheduler.state_dict() for entry in trainer.lr_scheduler_configs]
    same = [*map(settings_of, mine)] == [*map(settings_of, checkpoint["lr_schedulers"])]
    return None if same else "its schedules are of another kind"


def settings_of(schedule: Mapping[str, Any]) -> set[str]:
    return {k for k in schedule if not k.startswith("_") and k not in OF_VERSIONS}
