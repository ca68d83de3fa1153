"""What `distdl plan` answers to a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from distdl.tools.measure.plan import StrategyPlan


@dataclass(frozen=True)
class NeededMemory:
    """What a strategy needs on the fullest device, in bytes."""

    strategy: str
    possible: bool
    """If not, `why_not` says why, and the numbers are 0."""
    why_not: str
    weights: float
    gradients: float
    optimizer: float
    activations: float
    other: float
    """Buckets, and weights that are gathered for a moment."""
    total: float
    fits: bool
    """Whether it fits into what a device can use of its memory."""
    host: float
    """In the host's memory, for each device."""
    sent: float
    """Bytes that the busiest device sends in a step."""
    seconds: float
    """Of a step."""


@dataclass(frozen=True)
class PlannedStrategies:
    """Each strategy at the same global batch, and which one is recommended."""

    SCHEMA: ClassVar[str] = "plan/1"

    devices: int
    device_memory: float
    """Bytes of each."""
    batch_size: int
    """Of each device."""
    flops: float
    """Operations of a step on each device."""
    strategies: Sequence[NeededMemory]
    advice: Sequence[str]
    """The overrides that are recommended; empty if nothing fits."""
    reason: str
    command: str
    """The run with the advice; empty without one."""
    notes: Sequence[str]


def answer(plan: StrategyPlan, command: str) -> PlannedStrategies:
    machine = plan.machine
    rows = [
        NeededMemory(
            strategy=row.name,
            possible=not row.missing,
            why_not=row.missing,
            weights=row.weights,
            gradients=row.gradients,
            optimizer=row.optimizer,
            activations=row.activations,
            other=row.other,
            total=row.total,
            fits=row.fits(machine),
            host=row.host,
            sent=row.sent,
            seconds=0.0 if row.missing else row.seconds(plan.measured, machine),
        )
        for row in plan.rows
    ]
    return PlannedStrategies(
        devices=machine.devices,
        device_memory=machine.memory,
        batch_size=plan.measured.batch_size,
        flops=plan.measured.flops,
        strategies=rows,
        advice=plan.advice.overrides,
        reason=plan.advice.reason,
        command=command,
        notes=plan.notes,
    )
