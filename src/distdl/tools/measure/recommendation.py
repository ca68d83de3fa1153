"""Recommends a strategy: DDP if it fits, else one that partitions, else a pipeline.

If the link makes DDP wait, it recommends the fastest alternative, which may be a single device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from distdl.tools.measure.estimate import GIB, Estimate, Machine, by_strategy
from distdl.tools.measure.measured_step import MeasuredStep

# A link is too slow if communication adds more than this share to a step's time.
SLOW = 0.25
# Seconds of computation per step; with less, the latency of any link dominates.
LITTLE = 1e-3
# A batch is accumulated from at most this many parts: smaller parts would idle the devices.
MOST_PARTS = 16
# The most local steps, about as in DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105).
MOST_APART = 512
# Tried in this order if DDP does not fit.
INSTEAD_OF_DDP = {
    "fsdp": "weights, gradients and optimizer are shared out, for half as much traffic again",
    "deepspeed_offload": "the optimizer has to go to host memory, which slows each step",
    "pipeline": "each device has some layers, and only activations travel",
}


@dataclass(frozen=True)
class StrategyAdvice:
    """The recommended overrides, and the reason."""

    overrides: tuple[str, ...]
    reason: str


def advise(measured: MeasuredStep, rows: Sequence[Estimate], machine: Machine) -> StrategyAdvice:
    """The recommendation, by the `estimates` for the same machine."""
    by_name = by_strategy(rows)
    single = by_name["single"]
    memory = f"of {gib(machine.memory)} GiB"
    if machine.devices == 1:
        return _alone(measured, single, by_name["deepspeed_offload"], machine)
    ddp = by_name["ddp"]
    work = measured.flops / machine.flops
    if single.fits(machine) and work < LITTLE:
        reason = (
            f"a step is {1e6 * work:.2g} us of work: several devices would mostly wait for "
            "each other. Use one device and a larger data.batch_size"
        )
        return StrategyAdvice(("strategy=single", "trainer.devices=1"), reason)
    if slow := _too_slow(measured, by_name, machine):
        return slow
    if ddp.fits(machine):
        reason = (
            f"all of it takes {gib(ddp.total)} {memory}, and gradients are sent during the "
            "backward: no strategy is faster or simpler. If the batch may grow, try a larger "
            "data.batch_size before more devices"
        )
        return StrategyAdvice(("strategy=ddp",), reason)
    if smaller := accumulated(measured, ddp, machine):
        reason = (
            f"weights, gradients and optimizer take {gib(ddp.fixed)} {memory}, the rest is "
            "activations, of which ZeRO and FSDP save nothing: accumulate smaller batches"
        )
        return StrategyAdvice(("strategy=ddp", *smaller), reason)
    for name, why in INSTEAD_OF_DDP.items():
        row = by_name[name]
        reason = f"DDP would take {gib(ddp.total)} {memory}; {why}"
        if row.fits(machine):
            return StrategyAdvice((f"strategy={name}",), f"{reason} ({gib(row.total)} GiB)")
        if name != "pipeline" and (smaller := accumulated(measured, row, machine)):
            return StrategyAdvice((f"strategy={name}", *smaller), reason)
    reason = (
        f"no strategy fits {gib(machine.memory)} GiB: fsdp, which partitions most, takes "
        f"{gib(by_name['fsdp'].total)}. Use more or larger devices, a smaller batch, or "
    )
    return StrategyAdvice((), f"{reason}model.recompute=blocks, if it is off")


def _alone(
    measured: MeasuredStep, single: Estimate, offload: Estimate, machine: Machine
) -> StrategyAdvice:
    needed = f"takes {gib(single.total)} of {gib(machine.memory)} GiB"
    if single.fits(machine):
        return StrategyAdvice(("strategy=single",), f"all of it {needed}")
    reason = f"the whole batch {needed}: accumulate smaller batches"
    if smaller := accumulated(measured, single, machine):
        return StrategyAdvice(("strategy=single", *smaller), reason)
    if smaller := accumulated(measured, offload, machine):
        reason += ", and keep the optimizer in host memory"
        return StrategyAdvice(("strategy=deepspeed_offload", *smaller), reason)
    reason = f"the model takes {gib(single.fixed)} GiB before the first sample: use several "
    return StrategyAdvice((), f"{reason}devices and strategy=fsdp")


def _too_slow(
    measured: MeasuredStep, by_name: dict[str, Estimate], machine: Machine
) -> StrategyAdvice | None:
    """The advice for a link that makes DDP wait; None if DDP is fast enough."""
    ddp, half = by_name["ddp"], by_name["ddp comm_hook=bf16"]
    smaller = () if ddp.fits(machine) else accumulated(measured, ddp, machine)
    if smaller is None:
        return None  # memory is the first problem to solve

    def seconds(row: Estimate) -> float:
        return row.seconds(measured, machine)

    work = measured.flops / machine.flops
    acceptable = (1 + SLOW) * work
    if seconds(ddp) <= acceptable:
        return None
    hooked = ("strategy=ddp", "strategy.comm_hook=bf16", *smaller)
    waits = f"on this link a DDP step takes {seconds(ddp):.2g} s, {work:.2g} s of it computation; "
    if seconds(half) <= acceptable:
        return StrategyAdvice(hooked, waits + "half the bytes are few enough")
    accumulate = f"trainer.accumulate_grad_batches={machine.devices}"
    alone = ("strategy=single", "trainer.devices=1", accumulate)
    single, pipeline = by_name["single"], by_name["pipeline"]
    choices = [
        (single, alone, "one device that accumulates the same global batch sends nothing"),
        (half, hooked, "DDP with half the bytes is fastest"),
        (pipeline, ("strategy=pipeline",), "a pipeline sends activations only"),
    ]
    possible = [choice for choice in choices if choice[0] is half or choice[0].fits(machine)]
    row, overrides, why = min(possible, key=lambda choice: seconds(choice[0]))
    reason = f"{waits}{why}, and takes {seconds(row):.2g} s"
    if row.idle:
        reason += f", its bubble of {100 * row.idle:.0f} % included"
    # Enough local steps to make the exchange acceptable, rounded up to a power of two.
    needed = 8 * ddp.sent / machine.link / (SLOW * work)
    every = max(2, 1 << (math.ceil(needed) - 1).bit_length())
    if every <= MOST_APART:
        reason += ". If you accept another algorithm and compare its accuracy: "
        reason += f"strategy=local_sgd strategy.sync_every={every}, about {acceptable:.2g} s"
    return StrategyAdvice(overrides, reason)


def accumulated(measured: MeasuredStep, row: Estimate, machine: Machine) -> tuple[str, ...] | None:
    """The overrides that accumulate a batch from parts that fit; None if that is impossible."""
    size = measured.batch_size
    for parts in range(2, min(size, MOST_PARTS) + 1):
        if size % parts == 0 and row.fixed + row.activations / parts <= machine.usable:
            return f"data.batch_size={size // parts}", f"trainer.accumulate_grad_batches={parts}"
    return None


def gib(size: float) -> str:
    return f"{size / GIB:.3g}"
