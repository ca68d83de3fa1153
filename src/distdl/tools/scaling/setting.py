"""The input of a prediction: one device's step, the bytes sent, and the links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal, get_args

from distdl.strategies.pipeline.balance import SEVERAL_PIECES
from distdl.tools.scaling.links import Links
from distdl.util.errors import Problem, UserError
from distdl.util.typed import Above0, Checked, From0, FromOne, Share

# The backward has two matrix products for each one of the forward.
BACKWARD_SHARE = 2 / 3
Strategy = Literal[
    "ddp", "fsdp", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "pipeline"
]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
OF_A_PIPELINE = ("stages", "micro_batches", "schedule", "pieces_per_stage", "activation_bytes")


@dataclass(frozen=True)
class Setting(Checked):
    """What was measured on one device, and the hardware to predict for.

    Args:
        step_seconds: Time of an optimizer step of one device alone.
        gradient_bytes: Of all gradients, as they are sent.
        links: Inside a node and between nodes.
        devices_per_node: Of a full node.
        strategy: One of STRATEGIES.
        backward_share: Share of the step in which gradients are computed; by default two thirds.
        bucket_bytes: Gradients (with FSDP and ZeRO-3 also weights) are sent in pieces of about this
            size; by default DDP's 25 MiB.
        weight_bytes: Bytes that FSDP and ZeRO gather; by default equal to the gradients.
        algorithm: One of `links.ALGORITHMS`, or "fastest".
        overhead_seconds: Of any step with several devices: hooks, copies, kernels that delay each
            other. `fit` finds it.
        spread_seconds: Standard deviation of one device's step; all devices wait for the slowest.
        stages: Of a pipeline: devices that share one copy of the model, divided evenly.
        micro_batches: Of a pipeline, per step; by default 4 per stage.
        schedule: Of a pipeline.
        pieces_per_stage: Of an interleaved or zero-bubble pipeline; the others use 1.
        activation_bytes: Of a pipeline: for one device's batch, at one cut, in one direction.

    Raises:
        UserError: A value is invalid, alone or in combination (a pipeline's value with another
            strategy).
    """

    step_seconds: Above0
    gradient_bytes: From0
    links: Links
    devices_per_node: FromOne
    strategy: Strategy = "ddp"
    backward_share: Share = BACKWARD_SHARE
    bucket_bytes: Above0 = 25 * 2**20
    weight_bytes: From0 | None = None
    algorithm: Literal["ring", "hierarchical", "tree", "fastest"] = "fastest"
    overhead_seconds: From0 = 0.0
    spread_seconds: From0 = 0.0
    stages: FromOne = 1
    micro_batches: FromOne | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    pieces_per_stage: FromOne = 1
    activation_bytes: From0 = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if problems := list(self._unused()):
            raise UserError(*problems)

    @property
    def buckets(self) -> int:
        return max(1, math.ceil(self.gradient_bytes / self.bucket_bytes))

    def _unused(self) -> Iterator[Problem]:
        """Values that would have no effect."""
        if self.strategy == "pipeline":
            if self.pieces_per_stage > 1 and self.schedule not in SEVERAL_PIECES:
                what = f"{self.pieces_per_stage} pieces need a schedule that interleaves them"
                yield Problem(
                    "pieces_per_stage",
                    what=f"{what}, not {self.schedule}",
                    remedy=" or ".join(f"schedule='{name}'" for name in SEVERAL_PIECES),
                    code="conflict",
                )
            return
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in OF_A_PIPELINE and value != field.default:
                yield Problem(
                    field.name,
                    what=f"{value} belongs to a pipeline, and {self.strategy} has none",
                    remedy=f"strategy='pipeline', or omit {field.name}",
                    code="incomplete",
                )
