"""Which strategy, and why: DDP if it fits, then what partitions, then a pipeline.

On a link that makes DDP wait: whatever takes the least time, one device alone included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distdl.commands._plan_estimate import GIB, Estimate, Machine

if TYPE_CHECKING:
    from distdl.commands._plan_measure import Measured

# Sending that adds less to a step than this is no reason for anything.
SLOW = 0.25
# Seconds of work in a step, below which the latency of any link is longer.
LITTLE = 1e-3
# A batch may be cut into so many, which are accumulated, before devices are kept too idle by it.
MOST_PARTS = 16
# Steps alone, as in DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105).
MOST_APART = 512


@dataclass(frozen=True)
class Advice:
    """What to write, and why."""

    overrides: tuple[str, ...]
    reason: str


def advise(found: Measured, rows: Sequence[Estimate], machine: Machine) -> Advice:
    """The recommendation.

    Args:
        found: The measured step.
        rows: From `estimates`, for the same machine.
    """
    by_name = {row.name: row for row in rows}
    single, memory = by_name["single"], _gib(machine.memory)
    if machine.devices == 1:
        return _alone(found, single, by_name["deepspeed_offload"], machine)
    ddp, work = by_name["ddp"], found.flops / machine.flops
    if single.fits(machine) and work < LITTLE:
        return Advice(
            ("strategy=single", "trainer.devices=1"),
            f"a step is {1e6 * work:.2g} us of work: several devices would wait for each other. "
            "One of them, and a larger data.batch_size",
        )
    slow = _too_slow(found, by_name, machine)
    if slow is not None:
        return slow
    if ddp.fits(machine):
        return Advice(
            ("strategy=ddp",),
            f"{_gib(ddp.total)} of {memory} GiB hold everything, and the gradients travel while "
            "the backward goes on: nothing is faster, or simpler. If the batch may grow, a larger "
            "data.batch_size uses the devices better before more of them do",
        )
    parts = _parts(found, ddp, machine)
    if parts:
        return Advice(
            ("strategy=ddp", *_accumulated(found, parts)),
            f"weights, gradients and optimizer take {_gib(ddp.fixed)} of {memory} GiB, the rest is "
            "activations, of which ZeRO and FSDP save nothing: accumulate smaller batches",
        )
    for name, why in (
        ("fsdp", "weights, gradients and optimizer are shared out, for half as much traffic again"),
        ("deepspeed_offload", "the optimizer has to go to host memory, which slows each step"),
        ("pipeline", "each device has some layers, and only activations travel"),
    ):
        row = by_name[name]
        if row.missing:
            continue
        what = f"DDP would take {_gib(ddp.total)} of {memory} GiB; {why}"
        if row.fits(machine):
            return Advice((f"strategy={name}",), f"{what} ({_gib(row.total)} GiB)")
        parts = _parts(found, row, machine)
        if parts and name != "pipeline":
            return Advice((f"strategy={name}", *_accumulated(found, parts)), what)
    fsdp = by_name["fsdp"]
    return Advice(
        (),
        f"nothing fits {memory} GiB: fsdp, which shares most, takes {_gib(fsdp.total)}. More or "
        "larger devices, a smaller batch, or activation checkpointing in the model",
    )


def _alone(found: Measured, single: Estimate, offload: Estimate, machine: Machine) -> Advice:
    memory = _gib(machine.memory)
    if single.fits(machine):
        return Advice(("strategy=single",), f"{_gib(single.total)} of {memory} GiB hold everything")
    for row, name in ((single, "single"), (offload, "deepspeed_offload")):
        parts = _parts(found, row, machine)
        if parts:
            return Advice(
                (f"strategy={name}", *_accumulated(found, parts)),
                f"everything at once takes {_gib(single.total)} of {memory} GiB: smaller batches, "
                "accumulated" + (", and the optimizer in host memory" if row is offload else ""),
            )
    return Advice(
        (), f"{_gib(single.fixed)} GiB before the first sample: several devices, and strategy=fsdp"
    )


def _too_slow(found: Measured, by_name: dict[str, Estimate], machine: Machine) -> Advice | None:
    """For a link that makes DDP wait."""
    work = found.flops / machine.flops
    names = "single", "ddp", "ddp comm_hook=bf16", "pipeline"
    single, ddp, half, staged = (by_name[name] for name in names)
    parts = 1 if ddp.fits(machine) else _parts(found, ddp, machine)
    if not parts:
        return None  # what to do about memory comes first
    smaller = _accumulated(found, parts) if parts > 1 else ()
    seconds = ddp.seconds(found, machine)
    if seconds <= (1 + SLOW) * work:
        return None
    waits = f"on this link a DDP step takes {seconds:.2g} s, of which it works {work:.2g} s; "
    if half.seconds(found, machine) <= (1 + SLOW) * work:
        return Advice(
            ("strategy=ddp", "strategy.comm_hook=bf16", *smaller),
            waits + "half the bytes are few enough",
        )
    n = machine.devices
    alone = "strategy=single", "trainer.devices=1", f"trainer.accumulate_grad_batches={n}"
    choices = (
        (single, alone, "one device that accumulates the same global batch sends nothing"),
        (staged, ("strategy=pipeline",), "a pipeline sends activations only"),
        (half, ("strategy=ddp", "strategy.comm_hook=bf16", *smaller), "half the bytes are best"),
    )
    fitting = [choice for choice in choices if choice[0].fits(machine) or choice[0] is half]
    row, overrides, why = min(fitting, key=lambda choice: choice[0].seconds(found, machine))
    reason = f"{waits}{why}, and takes {row.seconds(found, machine):.2g} s"
    if row.idle:
        reason += f", its bubble of {100 * row.idle:.0f} % included"
    # As many steps alone as make the wait for one meeting small.
    every = max(2, _power_of_two(8 * ddp.sent / machine.link / (SLOW * work)))
    if every <= MOST_APART:
        reason += (
            ". If you accept another algorithm, whose accuracy you compare: strategy=local_sgd "
            f"strategy.sync_every={every}, about {(1 + SLOW) * work:.2g} s"
        )
    return Advice(overrides, reason)


def _parts(found: Measured, row: Estimate, machine: Machine) -> int:
    """Into how many batches, accumulated, a batch must be cut to fit; 0: it cannot be."""
    for parts in range(2, min(found.batch_size, MOST_PARTS) + 1):
        if found.batch_size % parts == 0 and row.fixed + row.activations / parts <= machine.usable:
            return parts
    return 0


def _accumulated(found: Measured, parts: int) -> tuple[str, ...]:
    return (
        f"data.batch_size={found.batch_size // parts}",
        f"trainer.accumulate_grad_batches={parts}",
    )


def _power_of_two(value: float) -> int:
    power = 1
    while power < value:
        power *= 2
    return power


def _gib(size: float) -> str:
    return f"{size / GIB:.3g}"
