"""How many batches an epoch has, and whether a training's settings fit that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from distdl.config import task_facts
from distdl.config.resources import replicas
from distdl.util.errors import Problem


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
        what = (
            f"{samples} training samples are fewer than one global batch of "
            f"{batch} x {shares} = {batch * shares}"
        )
        smaller = samples // shares
        remedy = f"data.batch_size={smaller}" if smaller else "fewer devices, or more samples"
        yield Problem("data.batch_size", what, remedy, code="not-enough")
        return
    limits = [trainer.get("overfit_batches") or None, trainer.get("limit_train_batches")]
    trained = min([batches, *(limited(batches, limit) for limit in limits)])
    interval = trainer.get("val_check_interval")
    within_epochs = trainer.get("check_val_every_n_epoch", 1) is not None
    validates = trainer.get("limit_val_batches") != 0 and not trainer.get("fast_dev_run")
    if is_count(interval) and interval > trained > 0 and within_epochs and validates:
        what = f"is {interval}, and an epoch has {trained} batches"
        remedy = f"{trained} or less; to count over epochs: trainer.check_val_every_n_epoch=null"
        yield Problem("trainer.val_check_interval", what, remedy, code="mismatch")


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
