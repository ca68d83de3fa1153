"""Whether blocks have to recompute so that a batch fits the memory, by the numbers of `plan`."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from distdl.config import recipe as configs
from distdl.config.heaviest import heaviest
from distdl.tools.measure.estimate import Estimate, Machine
from distdl.tools.measure.largest_batch import row_name
from distdl.tools.measure.measured_step import MeasuredStep
from distdl.tools.measure.mesh import rows_of
from distdl.tools.measure.recommendation import gib
from distdl.tools.measure.step_profile import measure
from distdl.util.errors import UserError

KEY = "model.recompute"


@dataclass(frozen=True)
class RecomputeVerdict:
    """A value of `model.recompute`, and the numbers that say so."""

    value: str
    reason: str


def recompute_for(
    config: DictConfig, global_batch: int, devices: int, memory: float
) -> RecomputeVerdict:
    """See `distdl.worker.named_tools.RecomputePlanner`. Without recomputing the step must fit
    `estimate.USABLE` of the memory, and with it all of the memory."""
    config = heaviest(config)
    machine = Machine(devices, memory, link=1.0, flops=1.0)
    name = row_name(config.get("strategy"), devices)

    def taken(value: str) -> tuple[MeasuredStep, Estimate]:
        changed = configs.merge(config, OmegaConf.create({}), {KEY: value})
        measured = measure(changed, global_batch)
        return measured, rows_of(changed, measured, machine, [name])[name]

    plain, before = taken("none")
    needs = f"{name} takes {gib(before.total)} of {gib(memory)} GiB"
    if before.missing or before.fits(machine):
        return RecomputeVerdict("none", before.missing or needs)
    remedy = "docs/memory.md says what to try"
    try:
        recomputed, after = taken("blocks")
    except UserError as error:
        raise UserError.at(
            KEY, what=f"{needs}, and {error.problems[0].what}", remedy=remedy, code="not-enough"
        ) from error
    if after.total > memory:
        raise UserError.at(
            KEY,
            what=f"{needs}, and {gib(after.total)} if all blocks recompute",
            remedy=remedy,
            code="not-enough",
        )
    work = recomputed.flops / plain.flops - 1 if plain.flops else 0.0
    rest = "" if after.fits(machine) else ", which leaves little for the allocator"
    reason = f"{needs} without it, and {gib(after.total)} with {100 * work:.0f}% more operations"
    return RecomputeVerdict("blocks", reason + rest)
