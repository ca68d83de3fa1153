"""The global batch: what it is, and how it stays the same when the number of ranks changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import DictConfig

from distdl.config.recipe import is_own
from distdl.config.resources import replicas
from distdl.job import Resources
from distdl.util.errors import UserError


@dataclass
class Kept:
    changes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Loaders:
    """The batches that an attempt's loaders really made.

    Args:
        batch_size: Samples per device (or pipeline) and batch.
        declared: `data.batch_size`, or None.
        shares: How many devices or pipelines took different data.
    """

    batch_size: int
    declared: int | None
    shares: int


def recorded(statuses: Iterable[Mapping[str, Any]]) -> Loaders | None:
    """The first that is on record. Values that are not numbers are ignored: nothing guarantees the
    content of a status file."""
    for status in statuses:
        found = status.get("loaders")
        found = found if isinstance(found, Mapping) else {}
        rows, declared, shares = (found.get(f.name) for f in fields(Loaders))
        if isinstance(rows, int) and isinstance(shares, int):
            return Loaders(rows, declared if isinstance(declared, int) else None, shares)
    return None


def factors(config: DictConfig, size: Resources) -> tuple[int | None, int, int]:
    """(samples per device or pipeline, number of devices or pipelines, accumulation).

    The first is None if the config has no `data.batch_size`.
    """
    data = config.get("data") or {}
    accumulate = int(config.trainer.get("accumulate_grad_batches") or 1)
    shares = replicas(config.get("strategy"), size.world_size)
    return data.get("batch_size"), shares, accumulate


def global_batch_size(config: DictConfig, size: Resources) -> int | None:
    """Samples per optimizer step over all ranks."""
    batch_size, shares, accumulate = factors(config, size)
    return None if batch_size is None else batch_size * shares * accumulate


def describe(config: DictConfig, size: Resources) -> str:
    """`256 x 8 devices x 2 accumulated = 4096 per step`, as far as the config says it.

    Only distdl's own data modules are known to pass `data.batch_size` to their loaders. For others
    the text says where the number comes from.
    """
    batch_size, _, _ = factors(config, size)
    if batch_size is None:
        return "as the loaders say when training starts (there is no data.batch_size)"
    sure = is_own(config.data.get("_target_", "distdl."))
    return product(batch_size, config, size) + ("" if sure else " (by data.batch_size)")


def product(batch_size: int, config: DictConfig, size: Resources) -> str:
    """`256 x 8 devices x 2 accumulated = 4096 per step`."""
    _, shares, accumulate = factors(config, size)
    more = f" x {accumulate} accumulated" if accumulate > 1 else ""
    total = batch_size * shares * accumulate
    return f"{batch_size} x {_shares(shares, size)}{more} = {total} per step"


def _shares(shares: int, size: Resources) -> str:
    kind = "device" if shares == size.world_size else "pipeline"
    return f"{shares} {kind}{'s' if shares > 1 else ''}"


def keep_global_batch(
    config: DictConfig,
    size: Resources,
    before: int | None,
    given: Sequence[str],
    loaders: Loaders | None = None,
) -> Kept:
    """Keeps the global batch of a run in an attempt that resumes it.

    Args:
        config: The attempt's config.
        size: The attempt's size.
        before: The global batch of the previous attempt, according to its config.
        given: Paths that the user set in this attempt: they are kept, with a note.
        loaders: What the loaders of an earlier attempt really gave, if that is on record.

    Raises:
        UserError: The world size changed, and the global batch is not divisible by it.
    """
    now = global_batch_size(config, size)
    if loaders is not None and loaders.batch_size != loaders.declared:
        # The data module has another argument for it, or divides it: the product cannot be kept.
        was, shares = loaders.declared, factors(config, size)[1]
        state = "is not set" if was is None else f"was {was}"
        note = (
            f"data.batch_size {state}, and the loaders gave {loaders.batch_size} x "
            f"{loaders.shares}: it is left as it is, and the global batch is what the loaders make"
        )
        return Kept(notes=[note] if shares != loaders.shares else [])
    if before is None or now is None or now == before:
        return Kept()
    if {"data.batch_size", "trainer.accumulate_grad_batches"} & set(given):
        return Kept(notes=[f"the global batch changes from {before} to {now}, as asked for"])
    _, shares, accumulate = factors(config, size)
    per_device, rest = divmod(before, shares * accumulate)
    if rest or per_device < 1:
        cut = f" x {accumulate} accumulated" if accumulate > 1 else ""
        shown = f"{_shares(shares, size)}{cut}"
        what = f"the run's global batch of {before} does not divide by {shown}"
        remedy = (
            "choose a number of devices that divides it, or say the new batch: "
            "data.batch_size=<per device>"
        )
        raise UserError.at("trainer.devices", what, remedy)
    return Kept(
        {"data.batch_size": per_device},
        [
            f"data.batch_size is {per_device} on {_shares(shares, size)}: "
            f"the global batch stays {before}"
        ],
    )
