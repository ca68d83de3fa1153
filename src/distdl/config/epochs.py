"""How many batches an epoch has, and whether a training's settings fit that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from distdl.config import task_facts
from distdl.config.recipe import is_own
from distdl.config.resources import replicas
from distdl.util.errors import Problem
from distdl.util.wording import plural


def problems(config: Mapping[str, Any], samples: int, world_size: int) -> Iterator[Problem]:
    """What does not fit an epoch of distdl's own data.

    Args:
        config: A resolved config; values of the wrong type are left to the schema.
        samples: In the training split.
        world_size: The number of ranks.
    """
    trainer = config.get("trainer") or {}
    sizes = batch_sizes(config, world_size)
    if sizes is None:
        return
    batch, shares = sizes
    batches = samples // (batch * shares)
    if not batches:
        smaller = samples // shares
        yield Problem(
            "data.batch_size",
            what=(
                f"{samples} training samples are fewer than one global batch of "
                f"{batch} x {shares} = {batch * shares}"
            ),
            remedy=f"data.batch_size={smaller}" if smaller else "fewer devices, or more samples",
            code="not-enough",
        )
        return
    limits = [trainer.get("overfit_batches") or None, trainer.get("limit_train_batches")]
    trained = min([batches, *(limited(batches, limit) for limit in limits)])
    interval = trainer.get("val_check_interval")
    within_epochs = trainer.get("check_val_every_n_epoch", 1) is not None
    validates = trainer.get("limit_val_batches") != 0 and not trainer.get("fast_dev_run")
    if is_count(interval) and interval > trained > 0 and within_epochs and validates:
        yield Problem(
            "trainer.val_check_interval",
            what=f"is {interval}, and an epoch has {trained} batches",
            remedy=f"{trained} or less; to count over epochs: trainer.check_val_every_n_epoch=null",
            code="mismatch",
        )


def unreached(config: Mapping[str, Any]) -> Iterator[str]:
    """What a config asks for after its last epoch, in a sentence each: nothing of it happens."""
    trainer = config.get("trainer") or {}
    last = trainer.get("max_epochs")
    if not task_facts.of(config).trains or not is_count(last):
        return
    ends = f"the training ends after {last} {plural('epoch', last)}"
    model = config.get("model") or {}
    schedule = config.get("schedule") or {}
    unfreeze_at = model.get("unfreeze_at")
    if is_count(unfreeze_at) and unfreeze_at >= last:
        yield f"model.unfreeze_at={unfreeze_at}: {ends}, so nothing is unfrozen"
    every = trainer.get("check_val_every_n_epoch")
    if is_count(every) and every > last:
        yield f"trainer.check_val_every_n_epoch={every}: {ends}, so nothing is validated"
    if not is_own(schedule.get("_target_")):
        return
    warmup = schedule.get("warmup_epochs")
    if isinstance(warmup, int | float) and warmup >= last:
        yield f"schedule.warmup_epochs={warmup:g}: {ends}, so all of it is warm-up"
    milestones = schedule.get("milestones")
    late = [m for m in milestones or () if isinstance(m, int | float) and m >= last]
    if late:
        listed = ", ".join(f"{each:g}" for each in late)
        yield f"schedule.milestones: {ends}, so the rate does not fall at {listed}"


def batch_sizes(config: Mapping[str, Any], world_size: int) -> tuple[int, int] | None:
    """Samples of a rank's batch, and how many ranks take different samples. None: the run does not
    train, or its config names no such size."""
    batch = (config.get("data") or {}).get("batch_size")
    if not task_facts.of(config).trains or not is_count(batch):
        return None
    num_nodes = (config.get("trainer") or {}).get("num_nodes") or 1
    return batch, replicas(config.get("strategy"), world_size, num_nodes)


def limited(batches: int, limit: object) -> int:
    """The batches that one of Lightning's limits leaves: a number of them, or a share."""
    if isinstance(limit, float):
        return int(batches * limit)
    return limit if is_count(limit) else batches


def is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value > 0
