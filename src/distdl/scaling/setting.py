"""What a prediction starts from: one device's step, what travels, and on which links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from distdl.errors import Problem, UserError
from distdl.scaling.links import ALGORITHMS, Links
from distdl.strategies.pipeline.balance import FILLING
from distdl.suggest import closest

FASTEST = "fastest"
# Of forward and backward, the backward takes two thirds (two products of matrices for each one).
BACKWARD_SHARE = 2 / 3
STRATEGIES = ("ddp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "pipeline")
# Of these nothing could be said: told apart from misspelt names.
NOT_PREDICTED = ("single", "local_sgd", "deepspeed_offload")


@dataclass(frozen=True)
class Setting:
    """What was measured on one device, and on what it would run.

    Args:
        step_seconds: Of an optimizer step of one device alone.
        gradient_bytes: Of all gradients, as they travel.
        links: Inside a node and between nodes.
        devices_per_node: Of a full node.
        strategy: One of STRATEGIES.
        backward_share: Of the step, in which gradients are made; by default two thirds.
        bucket_bytes: Gradients (of FSDP and ZeRO-3 also weights) travel in pieces of about this
            size; by default DDP's 25 MiB.
        weight_bytes: That FSDP and ZeRO gather; by default as many as gradients.
        algorithm: Of `links.ALGORITHMS`, or "fastest".
        overhead_seconds: Of any step with several devices: hooks, copies, kernels that get in each
            other's way. `fit` finds it.
        spread_seconds: Standard deviation of one device's step; all wait for the slowest.
        stages: Of a pipeline: devices that share one copy of the model, cut evenly.
        micro_batches: Of a pipeline and step; by default 4 per stage.
        schedule: "gpipe", "1f1b", "interleaved" or "zero_bubble".
        pieces_per_stage: Of the latter two.
        activation_bytes: Of a pipeline: of one device's batch, at a cut, in one direction.

    Raises:
        UserError: A value makes no sense.
    """

    step_seconds: float
    gradient_bytes: float
    links: Links
    devices_per_node: int
    strategy: str = "ddp"
    backward_share: float = BACKWARD_SHARE
    bucket_bytes: float = 25 * 2**20
    weight_bytes: float | None = None
    algorithm: str = FASTEST
    overhead_seconds: float = 0.0
    spread_seconds: float = 0.0
    stages: int = 1
    micro_batches: int | None = None
    schedule: str = "1f1b"
    pieces_per_stage: int = 1
    activation_bytes: float = 0.0

    def __post_init__(self) -> None:
        problems = [*_numbers(self), *_names(self)]
        if problems:
            raise UserError(*problems)

    @property
    def buckets(self) -> int:
        return max(1, math.ceil(self.gradient_bytes / self.bucket_bytes))


def _numbers(setting: Setting) -> Iterator[Problem]:
    links = setting.links
    # The sizes of what travels may be 0, latencies and overheads too.
    positive = {
        "step_seconds": setting.step_seconds,
        "bucket_bytes": setting.bucket_bytes,
        "devices_per_node": setting.devices_per_node,
        "stages": setting.stages,
        "micro_batches": 1 if setting.micro_batches is None else setting.micro_batches,
        "pieces_per_stage": setting.pieces_per_stage,
        "links.inside.bandwidth": links.inside.bandwidth,
        "links.between.bandwidth": links.between.bandwidth,
    }
    either = {
        "links.inside.latency": links.inside.latency,
        "links.between.latency": links.between.latency,
        "backward_share": setting.backward_share,
        "weight_bytes": setting.weight_bytes or 0.0,
        "gradient_bytes": setting.gradient_bytes,
        "overhead_seconds": setting.overhead_seconds,
        "spread_seconds": setting.spread_seconds,
        "activation_bytes": setting.activation_bytes,
    }
    for name, value in positive.items():
        if not (value > 0 and math.isfinite(value)):
            yield Problem(name, f"must be more than 0, not {value}")
    for name, value in either.items():
        if not (value >= 0 and math.isfinite(value)):
            yield Problem(name, f"must be 0 or more, not {value}")
    if setting.backward_share > 1:
        yield Problem("backward_share", f"is a share of the step, not {setting.backward_share}")


def _names(setting: Setting) -> Iterator[Problem]:
    for path, value, known in (
        ("strategy", setting.strategy, STRATEGIES),
        ("algorithm", setting.algorithm, (*ALGORITHMS, FASTEST)),
        ("schedule", setting.schedule, tuple(FILLING)),
    ):
        if value in NOT_PREDICTED and path == "strategy":
            yield Problem(path, f"{value} is not predicted", f"one of {', '.join(known)}")
        elif value not in known:
            near = closest(value, known)
            remedy = f"did you mean {near}?" if near else f"one of {', '.join(known)}"
            yield Problem(path, f"there is no {value!r}", remedy)
