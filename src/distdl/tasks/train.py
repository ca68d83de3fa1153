"""Trains, from the newest checkpoint if there is one."""

from __future__ import annotations

import logging

from lightning.pytorch.callbacks import Timer

from distdl.callbacks.metrics import steps_of
from distdl.config.recipe import max_time_text, twice_time
from distdl.runs.directory import shown
from distdl.worker.build import Built
from distdl.worker.initial_state import start
from distdl.worker.task import Metrics, Task

log = logging.getLogger(__name__)


class Train(Task[Built]):
    """Fits the module, from the newest checkpoint if there is one."""

    trains = True
    calls = ("training_step", "train_dataloader")

    def run(self, context: Built) -> Metrics:
        """Returns the last value of every metric."""
        start(context, context.checkpoint, context.trainer.fit)
        warn_of_time_limit(context)
        warn_of_nothing(context)
        metrics = {k: float(v) for k, v in context.trainer.callback_metrics.items()}
        speeds = sorted(context.metrics.images_per_second)
        if speeds:
            metrics["perf/images_per_second"] = speeds[len(speeds) // 2]
        latest = context.metrics.latest
        own = {k: v for k, v in latest.items() if k in ("train/loss", "perf/data_wait")}
        return {**own, **metrics}


def warn_of_nothing(context: Built) -> None:
    """Warns if this attempt has not trained a batch, which looks like any other end."""
    trainer = context.trainer
    if context.metrics.has_trained or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    why = (
        f"epoch {trainer.current_epoch}, step {trainer.global_step} of trainer.max_epochs="
        f"{trainer.max_epochs}, trainer.max_steps={trainer.max_steps}"
    )
    if trainer.num_training_batches == 0:
        why = "train_dataloader gave no batch"
    log.warning("nothing was trained: %s", why)


def warn_of_time_limit(context: Built) -> None:
    """Warns if a time limit has ended the training, which looks like any other end."""
    trainer = context.trainer
    limit = context.config.trainer.get("max_time")
    budget = context.checkpointer.budget
    used_up = budget if budget is not None and budget.is_over else None
    timers = [c for c in trainer.callbacks if isinstance(c, Timer)]  # type: ignore[attr-defined]
    others = any((timer.time_remaining() or 1) <= 0 for timer in timers)
    if not trainer.should_stop or not (used_up or others):
        return
    cause = "the Timer's time is used up"
    more = ""
    if used_up is not None:
        cause = f"trainer.max_time={max_time_text(limit)} is used up"
        # What an attempt without a limit has used may be more than twice this one.
        longer = twice_time(limit, least=used_up.seconds_used)
        resume = f"python -m distdl resume {shown(context.run.path)} trainer.max_time={longer}"
        more = f". To continue: {resume}"
    text = "%s, in all attempts together: the training ended at step %d, in epoch %d%s"
    log.warning(text, cause, steps_of(trainer), trainer.current_epoch, more)
