"""Memory and traffic of each strategy, by formula from one measured step.

Sources, by the letters used below:

- [Z] Rajbhandari et al. 2020, "ZeRO", https://arxiv.org/abs/1910.02054: what is partitioned
  (section 5), and that stage 3 sends half as much again as plain data parallelism (section 7).
  Stages 1 and 2 could send as little as that, but DeepSpeed all-reduces its buckets and then
  gathers the weights: counted by `benchmarks/traffic.py`, they send as much as stage 3.
- [R] Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms", section 3: an all-reduce
  of S bytes over n ranks sends 2 (n - 1) / n x S from each, its halves (reduce-scatter, all-gather)
  one half each.
- [P] Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters",
  https://arxiv.org/abs/2104.04473, section 2.2: the bubble of 1F1B, its micro-batches under way.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from distdl.benchmark.step_profile import MeasuredBlock, MeasuredStep

GIB = 2**30
# The rest is for kernels' workspaces, the allocator's fragments and the CUDA context.
USABLE = 0.9
# Of forward and backward, the backward takes two thirds: gradients can travel meanwhile.
BACKWARD = 2 / 3
# What conf/strategy/deepspeed_*.yaml sets, in elements of 4 bytes.
DEEPSPEED_BUCKET = 4 * 200_000_000
MICRO_BATCHES_PER_STAGE = 4  # as strategy=pipeline


@dataclass(frozen=True)
class Machine:
    """What it would run on.

    Args:
        devices: All together.
        memory: Of one, in bytes.
        link: Bits per second that a device sends.
        flops: Floating-point operations per second that it sustains.
    """

    devices: int
    memory: float
    link: float
    flops: float

    @property
    def usable(self) -> float:
        return USABLE * self.memory


@dataclass(frozen=True)
class Estimate:
    """One strategy: bytes on the fullest device, bytes that the busiest one sends per step.

    Args:
        batches: Of `MeasuredStep.batch_size`, that a device works through in a step, one by one.
        other: Buckets and weights that are gathered for a while.
        overlap: The share of the computation behind which sending can hide.
        idle: The share of a step in which a device waits for another (a pipeline's bubble).
        host: Bytes in host memory, per device.
        missing: Why it is not possible; then the rest says nothing.
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
        """What does not depend on the batch."""
        return self.weights + self.gradients + self.optimizer + self.other

    @property
    def total(self) -> float:
        return self.fixed + self.activations

    def fits(self, machine: Machine) -> bool:
        return not self.missing and self.total <= machine.usable

    def seconds(self, measured: MeasuredStep, machine: Machine) -> float:
        """A step, of which only what cannot hide behind the computation adds to it."""
        work = measured.flops / machine.flops
        sending = 8 * self.sent / machine.link
        return self.batches * work / (1 - self.idle) + max(0.0, sending - self.overlap * work)


def estimates(measured: MeasuredStep, machine: Machine) -> list[Estimate]:
    """Every strategy at the same global batch: `measured.batch_size` on each device, or one device
    that accumulates as many of them."""
    n = machine.devices
    once = (n - 1) / n  # what a ring's half sends of S bytes [R]
    gradients, state = measured.gradients, measured.optimizer
    trained = gradients  # weights that are trained: as many bytes as their gradients
    frozen = measured.weights - trained  # and buffers: nobody partitions those
    activations = measured.activations + measured.transient
    buckets = 2 * DEEPSPEED_BUCKET if gradients else 0.0  # two, as `overlap_comm` needs
    complete = Estimate(
        "single", measured.weights, gradients, state, activations=activations, batches=n
    )
    # Optimizer and gradients of the step are on the host.
    offload = Estimate(
        "deepspeed_offload",
        measured.weights,
        activations=activations,
        other=buckets,
        sent=once * (2 * trained + gradients),
        host=(2 * gradients + state) / n,
    )
    if n == 1:
        return [complete, offload]
    ddp = replace(complete, name="ddp", batches=1)
    buffers = once * measured.buffers
    # DeepSpeed steps on a copy of a rank's partition, which counts as optimizer state here.
    zero1 = replace(
        ddp,
        name="deepspeed_zero1",
        optimizer=(state + trained) / n,
        other=buckets,
        sent=offload.sent,
    )
    gathered = 3 * measured.unit  # one in use, the next one, and a complete gradient
    zero3 = replace(
        zero1,
        name="deepspeed_zero3",
        weights=frozen + trained / n,
        gradients=gradients / n,
        other=gathered + buckets / 2,
    )
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
    """One pipeline of all devices with 1F1B, cut so that forward costs are even.

    Stage s of n holds at most n - s micro-batches [P]; each crosses a cut as an activation and
    comes back as its gradient.
    """
    if measured.no_blocks or len(measured.blocks) < n:
        few = f"{len(measured.blocks)} blocks for {n} stages"
        return Estimate("pipeline", missing=measured.no_blocks or few)
    from distdl.strategies.pipeline.balance import bubble, partition

    costs = [block.flops or 1.0 for block in measured.blocks]
    stages = [measured.blocks[a:b] for a, b in itertools.pairwise(partition(costs, n))]
    micro_batches = MICRO_BATCHES_PER_STAGE * n
    # A pipeline is given what all its devices would be given.
    share = n / micro_batches
    ratio = measured.optimizer / measured.gradients if measured.gradients else 0.0

    def of_stage(number: int, stage: Sequence[MeasuredBlock]) -> Estimate:
        gradients = sum(block.gradients for block in stage)
        waiting = min(n - number, micro_batches) * share
        crossing = stage[-1].output if number + 1 < n else 0
        crossing += stages[number - 1][-1].output if number else 0
        return Estimate(
            "pipeline",
            weights=sum(block.weights for block in stage),
            gradients=gradients,
            optimizer=ratio * gradients,
            activations=waiting * sum(block.activations for block in stage)
            + share * measured.transient,
            sent=crossing * n,
            overlap=1.0,
        )

    each = [of_stage(number, stage) for number, stage in enumerate(stages)]
    flops = [sum(block.flops or 1.0 for block in stage) for stage in stages]
    return replace(
        max(each, key=lambda stage: stage.total),
        sent=max(stage.sent for stage in each),
        idle=bubble("1f1b", flops, 1, micro_batches),
    )
