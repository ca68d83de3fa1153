"""The largest batch of a device that fits its memory, by the numbers of `plan`.

The memory of a step grows by the same bytes with each sample. So two measured steps give the batch,
and a third one, with it, checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf

from distdl.config import recipe as configs
from distdl.config.degrees import MESH
from distdl.config.heaviest import heaviest
from distdl.tools.measure.estimate import Estimate, Machine
from distdl.tools.measure.mesh import NAME, rows_of
from distdl.tools.measure.recommendation import gib
from distdl.tools.measure.step_profile import measure
from distdl.util.errors import UserError

KEY = "data.batch_size"
FEW = 8  # samples of the first measured step; the second has twice as many


@dataclass(frozen=True)
class Largest:
    """A batch of a device, and the numbers that say so."""

    batch: int
    reason: str


def row_name(strategy: Mapping[str, object] | None, devices: int) -> str:
    """The row of `estimates` for a run's strategy."""
    node = strategy or {}
    kind = str(node.get("_target_")).rpartition(".")[2]
    if kind == "DeepSpeedStrategy":
        if node.get("offload_optimizer"):
            return "deepspeed_offload"
        return "single" if devices == 1 else f"deepspeed_zero{node.get('stage')}"
    if devices == 1:
        return "single"
    rows = {"FSDPStrategy": "fsdp", "PipelineStrategy": "pipeline", MESH.target: NAME}
    return rows.get(kind, "ddp")


def largest_batch(config: DictConfig, devices: int, memory: float) -> Largest:
    """See `distdl.worker.named_tools.Planner`. `estimate.USABLE` of the memory counts."""
    config = heaviest(config)
    machine = Machine(devices, memory, link=1.0, flops=1.0)
    name = row_name(config.get("strategy"), devices)

    def taken(batch: int) -> Estimate:
        sized = configs.merge(config, OmegaConf.create({}), {KEY: batch})
        return rows_of(sized, measure(sized, batch * devices), machine, [name])[name]

    batch = _solved(taken, machine.usable)
    if batch is None:
        needed = taken(1)
        raise UserError.at(
            KEY,
            what=f"not one sample fits: {name} takes {gib(needed.total)} of {gib(memory)} GiB",
            remedy="docs/memory.md says what to try",
            code="not-enough",
        )
    found = taken(batch)
    return Largest(batch, f"{name} takes {gib(found.total)} of {gib(memory)} GiB")


def _solved(taken: Callable[[int], Estimate], usable: float) -> int | None:
    """The largest batch within so many bytes; None if it is less than 1."""
    few, more = taken(FEW), taken(2 * FEW)
    each = max((more.total - few.total) / FEW, 1.0)
    batch = int(FEW + (usable - few.total) / each)
    while batch >= 1 and (over := taken(batch).total - usable) > 0:
        batch -= max(1, int(over / each))
    return batch if batch >= 1 else None
