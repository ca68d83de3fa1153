"""Memory and traffic of each strategy, by formula from one measured step, and which to take.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distdl.commands._plan_measure import Block, Measured

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
        batches: Of `Measured.batch_size`, that a device works through in a step, one by one.
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

    def seconds(self, found: Measured, machine: Machine) -> float:
        """A step, of which only what cannot hide behind the computation adds to it."""
        work = found.flops / machine.flops
        sending = 8 * self.sent / machine.link
        return self.batches * work / (1 - self.idle) + max(0.0, sending - self.overlap * work)


def estimates(found: Measured, machine: Machine) -> list[Estimate]:
    """Every strategy at the same global batch: `found.batch_size` on each device, or one device
    that accumulates as many of them."""
    n = machine.devices
    once = (n - 1) / n  # what a ring's half sends of S bytes [R]
    weights, gradients, state = found.weights, found.gradients, found.optimizer
    buffers, acts = found.buffers, found.activations + found.transient
    trained = gradients  # weights that are trained: as many bytes as their gradients
    frozen = weights - trained  # and buffers: nobody partitions those
    whole: dict[str, Any] = {"weights": weights, "activations": acts}
    both: dict[str, Any] = {
        "weights": frozen + trained / n,
        "gradients": gradients / n,
        "activations": acts,
    }
    rows = [Estimate("single", gradients=gradients, optimizer=state, batches=n, **whole)]
    if n == 1:
        # Alone, DeepSpeed's offload still takes the optimizer to the host.
        return [*rows, _offload(found, 1, 0.0)]
    all_reduce = 2 * once * gradients + once * buffers
    ddp = Estimate("ddp", gradients=gradients, optimizer=state, sent=all_reduce, **whole)
    bf16 = Estimate(
        "ddp comm_hook=bf16",
        gradients=gradients,
        optimizer=state,
        sent=once * gradients + once * buffers,
        **whole,
    )
    thrice = once * (2 * trained + gradients)
    # DeepSpeed steps on a copy of a rank's partition, which counts as optimizer state here.
    zero: dict[str, Any] = {"optimizer": (state + trained) / n, "sent": thrice}
    zero1 = Estimate("deepspeed_zero1", gradients=gradients, **whole, **zero, other=_buckets(found))
    zero2 = Estimate(
        "deepspeed_zero2", gradients=gradients / n, **whole, **zero, other=_buckets(found)
    )
    gathered = 2 * found.unit + found.unit  # one in use, the next one, and a whole gradient
    zero3 = Estimate(
        "deepspeed_zero3",
        optimizer=(state + trained) / n,
        other=gathered + _buckets(found) / 2,
        sent=thrice,
        **both,
    )
    fsdp = Estimate(
        "fsdp",
        optimizer=state / n,
        other=gathered,
        sent=thrice,
        overlap=1.0,
        **both,
    )
    rows += [ddp, bf16, zero1, zero2, _offload(found, n, thrice), zero3, fsdp]
    return [*rows, pipeline(found, n)]


def _buckets(found: Measured) -> float:
    """Two, as `overlap_comm` needs; DeepSpeed makes them as large as it is told, full or not."""
    return 2 * DEEPSPEED_BUCKET if found.gradients else 0.0


def _offload(found: Measured, n: int, sent: float) -> Estimate:
    """ZeRO-2 with optimizer and gradients of the step on the host."""
    return Estimate(
        "deepspeed_offload",
        weights=found.weights,
        activations=found.activations + found.transient,
        other=_buckets(found),
        sent=sent,
        host=(2 * found.gradients + found.optimizer) / n,
    )


def pipeline(found: Measured, n: int) -> Estimate:
    """One pipeline of all devices with 1F1B, cut so that forward costs are even.

    Stage s of n holds at most n - s micro-batches [P]; each crosses a cut as an activation and
    comes back as its gradient.
    """
    if found.no_blocks or len(found.blocks) < n:
        few = f"{len(found.blocks)} blocks for {n} stages"
        return Estimate("pipeline", missing=found.no_blocks or few)
    from distdl.strategies.pipeline.balance import bubble, partition

    costs = [block.flops or 1.0 for block in found.blocks]
    cuts = partition(costs, n)
    stages = [found.blocks[a:b] for a, b in itertools.pairwise(cuts)]
    micro_batches = MICRO_BATCHES_PER_STAGE * n
    # A pipeline is given what all its devices would be given.
    share = n / micro_batches
    ratio = found.optimizer / found.gradients if found.gradients else 0.0

    def of_stage(number: int, stage: Sequence[Block]) -> Estimate:
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
            + share * found.transient,
            sent=crossing * n,
        )

    each = [of_stage(number, stage) for number, stage in enumerate(stages)]
    fullest = max(each, key=lambda stage: stage.total)
    flops = [sum(block.flops or 1.0 for block in stage) for stage in stages]
    return Estimate(
        "pipeline",
        weights=fullest.weights,
        gradients=fullest.gradients,
        optimizer=fullest.optimizer,
        activations=fullest.activations,
        sent=max(stage.sent for stage in each),
        overlap=1.0,
        idle=bubble("1f1b", flops, 1, micro_batches),
    )
