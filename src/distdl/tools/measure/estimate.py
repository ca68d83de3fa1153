"""Memory and traffic of each strategy, by formula from one measured step.

Sources, by the letters used below:

- [Z] Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054: what each stage partitions
  (section 5). Stage 3 sends 1.5 times as much as plain data parallelism (section 7). So do stages 1
  and 2, since DeepSpeed all-reduces and then gathers the weights (`benchmarks/traffic.py`).
- [R] Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms", section 3: in an
  all-reduce of S bytes over n ranks, each sends 2 (n - 1) / n x S: one half in the reduce-scatter,
  the other in the all-gather.
- [P] Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
  https://arxiv.org/abs/2104.04473, section 2.2: 1F1B's bubble, and its micro-batches in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distdl.tools.measure.measured_step import MeasuredBlock, MeasuredStep

GIB = 2**30
# The rest is for kernel workspaces, fragmentation of the allocator and the CUDA context.
USABLE = 0.9
# The backward's share of forward and backward; gradients can be sent during it.
BACKWARD = 2 / 3
# The bucket size in conf/strategy/deepspeed_*.yaml, in bytes (elements of 4 bytes).
DEEPSPEED_BUCKET = 4 * 200_000_000
MICRO_BATCHES_PER_STAGE = 4  # as strategy=pipeline


@dataclass(frozen=True)
class Machine:
    """The hardware of the estimated run."""

    devices: int  # in total
    memory: float  # bytes per device
    link: float  # bits per second that a device sends
    flops: float  # sustained floating-point operations per second of a device

    @property
    def usable(self) -> float:
        return USABLE * self.memory


@dataclass(frozen=True)
class Estimate:
    """One strategy: bytes on the fullest device, and bytes that the busiest device sends per step.

    Args:
        batches: Batches of `MeasuredStep.batch_size` that a device computes in a step, in sequence.
        other: Buckets and temporarily gathered weights.
        overlap: The share of the computation that sending can overlap with.
        idle: The share of a step in which a device waits for another (a pipeline's bubble).
        host: Bytes in host memory, per device.
        missing: Why the strategy is not possible; the other fields are then meaningless.
    """

    name: str
    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    other: float = 0.0
    sent: float = 0.0
    overlap: float = BACKWARD
    idle: float = 0.0
    batches: int = 1
    host: float = 0.0
    missing: str = ""

    @property
    def fixed(self) -> float:
        """The bytes that do not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.other

    @property
    def total(self) -> float:
        return self.fixed + self.activations

    def fits(self, machine: Machine) -> bool:
        return not self.missing and self.total <= machine.usable

    def seconds(self, measured: MeasuredStep, machine: Machine) -> float:
        """The time of a step: computation, plus the sending that does not overlap with it."""
        work = measured.flops / machine.flops
        sending = 8 * self.sent / machine.link
        return self.batches * work / (1 - self.idle) + max(0.0, sending - self.overlap * work)


def by_strategy(rows: Sequence[Estimate]) -> dict[str, Estimate]:
    return {row.name: row for row in rows}


def estimates(measured: MeasuredStep, machine: Machine) -> list[Estimate]:
    """Estimates every strategy at the same global batch: each device computes a batch of
    `measured.batch_size`, and a single device accumulates as many."""
    n = machine.devices
    once = (n - 1) / n  # the share of S bytes that half a ring all-reduce sends [R]
    gradients, state = measured.gradients, measured.optimizer
    trained = gradients  # trainable weights have as many bytes as their gradients
    frozen = measured.weights - trained  # includes buffers; no strategy partitions them
    activations = measured.activations + measured.transient
    buckets = 2 * DEEPSPEED_BUCKET if gradients else 0.0  # `overlap_comm` needs two
    alone = activations if measured.alone is None else measured.alone
    complete = Estimate("single", measured.weights, gradients, state, alone, batches=n)
    partitioned: dict[str, Any] = {"other": buckets, "sent": once * (2 * trained + gradients)}
    # Optimizer state and gradients are on the host.
    offload = Estimate(
        "deepspeed_offload",
        measured.weights,
        activations=activations,
        host=(2 * gradients + state) / n,
        **partitioned,
    )
    if n == 1:
        return [complete, offload]
    ddp = replace(complete, name="ddp", activations=activations, batches=1)
    buffers = once * measured.buffers
    # DeepSpeed's optimizer steps on a copy of the rank's partition: count it as optimizer state.
    state_in_parts = (state + trained) / n
    zero1 = replace(ddp, name="deepspeed_zero1", optimizer=state_in_parts, **partitioned)
    gathered = 3 * measured.unit  # one in use, the next one, and a complete gradient
    parts: dict[str, Any] = {"weights": frozen + trained / n, "gradients": gradients / n}
    zero3 = replace(zero1, name="deepspeed_zero3", other=gathered + buckets / 2, **parts)
    return [
        complete,
        replace(ddp, sent=2 * once * gradients + buffers),
        replace(ddp, name="ddp comm_hook=bf16", sent=once * gradients + buffers),
        zero1,
        replace(zero1, name="deepspeed_zero2", gradients=gradients / n),
        offload,
        zero3,
        replace(zero3, name="fsdp", optimizer=state / n, other=gathered, overlap=1.0),
        pipeline(measured, n),
    ]


def pipeline(measured: MeasuredStep, n: int) -> Estimate:
    """Estimates one 1F1B pipeline over all devices, with stages of even forward cost.

    Stage s of n holds at most n - s micro-batches [P]. At each cut, a micro-batch sends its
    activation forward and its gradient back. torch receives each micro-batch of a batch into a
    buffer of its own. A weight's gradient is computed beside the sum to which it is added.
    """
    if measured.no_blocks or len(measured.blocks) < n:
        few = f"{len(measured.blocks)} blocks for {n} stages"
        return Estimate("pipeline", missing=measured.no_blocks or few)
    from distdl.strategies.pipeline.balance import bubble, partition

    costs = [block.flops or 1.0 for block in measured.blocks]
    stages = [measured.blocks[a:b] for a, b in itertools.pairwise(partition(costs, n))]
    micro_batches = MICRO_BATCHES_PER_STAGE * n
    # A pipeline's batch consists of the batches of all its devices.
    share = n / micro_batches
    ratio = measured.optimizer / measured.gradients if measured.gradients else 0.0

    def of_stage(number: int, stage: Sequence[MeasuredBlock]) -> Estimate:
        weights, gradients = (sum(getattr(b, k) for b in stage) for k in ("weights", "gradients"))
        each = [block.activations for block in stage]
        others = (min(n - number, micro_batches) - 1) * sum(each)
        # One micro-batch goes back: a block's backward comes when those after it are freed.
        going_back = [
            before + (measured.transient if block.transient is None else block.transient)
            for block, before in zip(stage, itertools.accumulate(each), strict=True)
        ]
        added = share * (others + sum(each)) + max(block.largest for block in stage)
        activations = max(share * (others + max(going_back)), added)
        activations += 0 if number else n * measured.inputs
        crossing = stage[-1].output if number + 1 < n else 0
        crossing += stages[number - 1][-1].output if number else 0
        received = sent = crossing * n
        return Estimate(
            "pipeline",
            weights=weights,
            gradients=gradients,
            optimizer=ratio * gradients,
            activations=activations,
            other=received,
            sent=sent,
            overlap=1.0,
        )

    rows = [of_stage(number, stage) for number, stage in enumerate(stages)]
    flops = [sum(block.flops or 1.0 for block in stage) for stage in stages]
    return replace(
        max(rows, key=lambda row: row.total),
        sent=max(row.sent for row in rows),
        idle=bubble("1f1b", flops, 1, micro_batches),
    )
