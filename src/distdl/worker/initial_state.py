"""Loads a task's initial state: a checkpoint of this or another run, of Lightning, or bare weights.

A new training restores all of the state if it fits, with the learning rates and optimizer settings
of the new config. Otherwise it loads only the weights, and one warning gives the reason.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from distdl.callbacks import module_state
from distdl.callbacks.adapters import adapters_of
from distdl.callbacks.resume_state import built_rates
from distdl.callbacks.training_state import KEY
from distdl.checkpoint.settled import refuse_unsettled
from distdl.config.recipe import max_time_text, time_text, twice_time
from distdl.models import lora
from distdl.optim.optimizers import KERNELS
from distdl.runs.directory import shown
from distdl.util.errors import UserError
from distdl.worker.build import Built

Result = TypeVar("Result")
log = logging.getLogger(__name__)

# What torch.compile, DistributedDataParallel and `convert --to weights` add to or drop from names.
AFFIX = re.compile(r"^(module|network)\.|_orig_mod\.")
# Keys that only some versions of torch have. All other keys of a schedule's state show its kind.
VERSION_KEYS = ("verbose", "default_min_lr")


def start(context: Built, path: str | None, loop: Callable[..., Result], **more: object) -> Result:
    """Calls `loop`, the Trainer's `fit`, `validate` or `test`, with a checkpoint if any."""
    if path:
        context.trainer.restore_by(InitialState(context, path))
    return loop(
        context.module,
        datamodule=context.datamodule,
        ckpt_path=path,
        weights_only=not context.checkpointer.settings.trust_pickle if path else None,
        **more,
    )


class InitialState:
    """What a run takes from a checkpoint: `distdl.loops.connectors.Restores`.

    Args:
        context: The run that starts.
        path: Of the checkpoint.
    """

    def __init__(self, context: Built, path: str) -> None:
        self.context = context
        self.trainer = context.trainer
        self.file = shown(Path(path))
        self.own = Path(path).is_relative_to(context.run.path)

    def weights(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Loads the weights under the names that they have in the module. An evaluation then logs
        at the checkpoint's step and epoch.

        Raises:
            UserError: They do not fit.
        """
        if self.trainer.state.fn != TrainerFn.FITTING:
            refuse_unsettled(checkpoint, self.file)
        adapters = adapters_of(self.trainer)
        lora.refuse_others(checkpoint, self.file, adapters.beside if adapters else "")
        module = self.context.module
        names = module.state_dict().keys()
        plain = {AFFIX.sub("", name): name for name in names}
        if "state_dict" in checkpoint:  # else the strategy has read its weights itself
            saved = checkpoint["state_dict"].items()
            named = {k if k in names else plain.get(AFFIX.sub("", k), k): v for k, v in saved}
            checkpoint = {**checkpoint, "state_dict": named}
            if adapters:
                lora.refuse_missing(adapters.trained, named, self.file)
                strict = False  # what is beside them is there already
        try:
            self.trainer.strategy.load_model_state_dict(checkpoint, strict=strict)
        except RuntimeError as error:
            if "Error(s) in loading state_dict" not in str(error):
                raise
            what = f"its weights do not fit {type(module).__name__} as configured: {error}"
            remedy = "the class and arguments that wrote it, or strict_loading = False in the class"
            if late := module_state.late_in(checkpoint, names):
                what = f"{late} came into the model, or left it, after the training had started"
                remedy = module_state.REMEDY
            raise UserError.at(self.file, what=what, remedy=remedy, code="mismatch") from None
        if self.trainer.state.fn != TrainerFn.FITTING:  # Lightning loads only the weights
            step, epoch = checkpoint.get("global_step"), checkpoint.get("epoch")
            self.trainer.fit_loop.stand_at(int(step or 0), int(epoch or 0))
            if adapters:
                lora.merge(module)

    def training(self, checkpoint: Mapping[str, Any]) -> None:
        """Restores all of the state if it fits, with the rates and settings of the new config.

        Raises:
            UserError: It fits, and the training has reached this run's limits already.
        """
        trainer = self.trainer
        if trainer.strategy.restore_checkpoint_after_setup:
            # The optimizer's setup has made the loaders, before the position was known.
            trainer.fit_loop.forget_loaders()
        trains = trainer.state.fn == TrainerFn.FITTING
        if self.own or not (trains and trainer.strategy.lightning_restore_optimizer):
            return trainer.restore_everything()
        foreign = KEY not in checkpoint
        reason = None
        configured = [[{**group} for group in each.param_groups] for each in trainer.optimizers]
        if foreign:
            trainer.fit_loop.forget_loaders()
            reason = self._misfit(checkpoint)
        if reason is not None:
            if len(trainer.optimizers) > 1:  # some may have been restored
                trainer.strategy.setup_optimizers(trainer)
            message = "%s: only its weights are loaded, and the training starts at step 0: %s"
            return log.warning(message, self.file, reason)
        longest = trainer.fit_loop.max_epochs
        trainer.fit_loop.max_epochs = None
        trainer.restore_everything()  # without a limit, as Lightning's error names no file
        trainer.fit_loop.max_epochs = longest
        ours = checkpoint.get(KEY) or {}
        ratio = self.context.checkpointer.state.batch_ratio(ours)
        apply_settings(trainer, configured, ours.get("rates"), self.file, ratio)
        self.context.checkpointer.state.rates = built_rates(configured)
        self._refuse_finished()
        if foreign:
            self._take_position()

    def _misfit(self, checkpoint: Mapping[str, Any]) -> str | None:
        if (reason := misfit(checkpoint, self.trainer)) is not None:
            return reason
        try:
            self.trainer.restore_optimizers()
        except ValueError as error:  # their parameter groups differ
            return str(error)
        return None

    def _epochs(self) -> tuple[int, bool]:
        """How many epochs are complete, and whether the last one is complete."""
        loop = self.trainer.fit_loop
        progress: Any = loop.epoch_progress.current
        ended = progress.processed == progress.ready
        complete = ended or loop.epoch_loop.batch_progress.is_last_batch
        return progress.ready - (not complete), complete

    def _refuse_finished(self) -> None:
        trainer, file = self.trainer, self.file
        epochs, _ = self._epochs()
        alone = (
            "resume_from a file with its weights alone: "
            f"python -m distdl convert {file} --to weights"
        )
        limits = (
            ("epochs", epochs, trainer.fit_loop.max_epochs),
            ("steps", trainer.global_step, trainer.max_steps),
        )
        for unit, done, limit in limits:
            if limit not in (None, -1) and done >= limit:
                raise UserError.at(
                    f"trainer.max_{unit}",
                    what=f"is {limit}, but {file} was already trained for {done} {unit}",
                    remedy=f"trainer.max_{unit}={done + limit}, or {alone}",
                    code="mismatch",
                )
        budget = self.context.checkpointer.budget
        if budget is not None and budget.is_over:
            limit = self.context.config.trainer.max_time
            used = time_text(round(budget.seconds_used))
            longer = twice_time(limit, least=budget.seconds_used)
            raise UserError.at(
                "trainer.max_time",
                what=f"is {max_time_text(limit)}, but {file} was already trained for {used}",
                remedy=f"trainer.max_time={longer}, or {alone}",
                code="mismatch",
            )

    def _take_position(self) -> None:
        """The position in the data, of a checkpoint that does not list it."""
        epochs, complete = self._epochs()
        self.context.checkpointer.position.epoch = epochs
        if not complete:
            log.warning(
                "%s was saved after %d batches of an epoch, and does not list their samples: in "
                "the rest of that epoch some samples are repeated and others are missing",
                self.file,
                self.trainer.fit_loop.epoch_loop.batch_progress.current.ready,
            )


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
        # Defaults that no argument sets are counts, as those of schedule-free optimizers.
        arguments = inspect.signature(type(optimizer)).parameters
        settings = set(getattr(optimizer, "defaults", ())) - {"lr", *KERNELS, *moved}
        settings &= arguments.keys()
        for index, (group, new) in enumerate(zip(optimizer.param_groups, groups, strict=False)):
            for name in sorted(settings & new.keys()):
                if group.get(name) != new[name]:
                    differences[name] = f"{name} {new[name]} instead of {group.get(name)}"
                    group[name] = new[name]
            # Lightning records the built rate only with a schedule; a module may have set another.
            was = group.get("initial_lr")
            now = new.get("initial_lr", new["lr"])
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
    states = checkpoint.get("optimizer_states")
    optimizers = trainer.optimizers
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
