"""The global batch: what it is, and how it stays the same when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig

from distdl.config import choices
from distdl.config.recipe import is_own
from distdl.config.resources import replicas, share_kind
from distdl.config.schema import TrainerArguments
from distdl.job import Resources
from distdl.util.errors import UserError


@dataclass
class Kept:
    """Overrides that keep the global batch, and notes for the user."""

    changes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Loaders:
    """The batches that an attempt's loaders really made."""

    batch_size: int  # samples in a batch of one device (or pipeline)
    declared: int | None  # `data.batch_size`
    shares: int  # how many devices or pipelines took different data


def recorded(statuses: Iterable[Mapping[str, Any]]) -> Loaders | None:
    """The first valid record in status files, which may hold anything."""
    for status in statuses:
        loaders = status.get("loaders")
        if isinstance(loaders, Mapping):
            rows, declared, shares = (loaders.get(field.name) for field in fields(Loaders))
            if isinstance(rows, int) and isinstance(shares, int):
                return Loaders(rows, declared if isinstance(declared, int) else None, shares)
    return None


def factors(config: DictConfig, size: Resources) -> tuple[int | None, int, int]:
    """(`data.batch_size`, number of shares of the data, accumulation). The first is None if there
    is none, or none yet (auto)."""
    shares = replicas(config.get("strategy"), size.world_size, size.num_nodes)
    accumulate = TrainerArguments.of(config.trainer).accumulate_grad_batches
    batch_size = (config.get("data") or {}).get("batch_size")
    return None if choices.asks(config, "batch_size") else batch_size, shares, accumulate


def global_batch_size(config: DictConfig, size: Resources) -> int | None:
    """Samples per optimizer step over all ranks."""
    batch_size, shares, accumulate = factors(config, size)
    return None if batch_size is None else batch_size * shares * accumulate


def describe(config: DictConfig, size: Resources) -> str:
    """`256 x 8 devices x 2 accumulated = 4096 per step`, as far as the config shows it.

    Only distdl's own data modules are known to pass `data.batch_size` to their loaders.
    """
    if choices.asks(config, "batch_size"):
        return f"auto x {_parts(config, size)}: chosen before the training starts"
    batch_size = factors(config, size)[0]
    if batch_size is None:
        return "shown when training starts (there is no data.batch_size)"
    sure = is_own(config.data.get("_target_", "distdl."))
    return product(batch_size, config, size) + ("" if sure else " (by data.batch_size)")


def product(batch_size: int, config: DictConfig, size: Resources) -> str:
    """`256 x 8 devices x 2 accumulated = 4096 per step`."""
    _, shares, accumulate = factors(config, size)
    total = batch_size * shares * accumulate
    return f"{batch_size} x {_parts(config, size)} = {total} per step"


def _parts(config: DictConfig, size: Resources) -> str:
    accumulate = factors(config, size)[2]
    more = f" x {accumulate} accumulated" if accumulate > 1 else ""
    return _shares(config, size) + more


def _shares(config: DictConfig, size: Resources) -> str:
    shares = factors(config, size)[1]
    kind = share_kind(config.get("strategy"), shares, size.world_size)
    return f"{shares} {kind}{'s' if shares > 1 else ''}"


def keep_global_batch(
    config: DictConfig,
    size: Resources,
    before: int | None,
    chosen: Sequence[str],
    loaders: Loaders | None = None,
) -> Kept:
    """Keeps the global batch of a run in an attempt that resumes it.

    Args:
        config, size: The config and the size of the attempt.
        before: The global batch of the previous attempt, according to its config.
        chosen: Paths of the values that the user set in this attempt; these values are kept.
        loaders: The batches of an earlier attempt's loaders, if they are recorded.

    Raises:
        UserError: The world size changed, and the global batch is not divisible by it.
    """
    now = global_batch_size(config, size)
    _, shares, accumulate = factors(config, size)
    if loaders is not None and loaders.batch_size != loaders.declared:
        # The data module has another argument for the batch size, or divides it.
        state = "is not set" if loaders.declared is None else f"was {loaders.declared}"
        note = (
            f"data.batch_size {state}, and the loaders gave {loaders.batch_size} x "
            f"{loaders.shares}: it stays as it is, and the loaders decide the global batch"
        )
        return Kept(notes=[note] if shares != loaders.shares else [])
    if before is None or now is None or now == before:
        return Kept()
    if {"data.batch_size", "trainer.accumulate_grad_batches"} & set(chosen):
        return Kept(notes=[f"the global batch changes from {before} to {now}, as asked for"])
    per_device, rest = divmod(before, shares * accumulate)
    if rest or per_device < 1:
        raise UserError.at(
            "trainer.devices",
            what=f"the run's global batch of {before} is not divisible by {_parts(config, size)}",
            remedy=(
                "choose a number of devices that divides it, or set the new batch: "
                "data.batch_size=N, of each device"
            ),
            code="indivisible",
        )
    note = f"data.batch_size is {per_device} on {_shares(config, size)}: "
    return Kept({"data.batch_size": per_device}, [f"{note}the global batch stays {before}"])
