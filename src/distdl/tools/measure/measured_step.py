"""Memory and operations of one training step, as `step_profile` has measured them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class MeasuredBlock:
    """A part of the model that a pipeline does not cut: bytes, and FLOPs of its forward."""

    weights: int  # parameters and buffers
    gradients: int
    activations: int = 0  # kept for the backward, for the whole batch
    output: int = 0  # passed to the next block, for the whole batch
    flops: float = 0.0
    largest: int = 0  # the gradient of one parameter
    transient: int | None = None  # as of a step, in its own backward; None: unknown


@dataclass
class MeasuredStep:
    """One training step of `batch_size` samples on one device, in bytes.

    Args:
        weights: Parameters and buffers; `buffers`: the buffers alone.
        gradients, optimizer: Of the trained parameters.
        activations: Memory at the end of the forward besides weights: what the backward needs, and
            the batch.
        transient: Additional memory at the peak, without gradients.
        inputs: The batch alone.
        alone: The same two where no buckets hold the gradients: those of the last step stay until
            the backward begins, which makes new ones while it frees activations. None: unknown,
            both at once.
        flops: Floating-point operations of forward and backward.
        unit: Weights of the largest part that FSDP gathers at once.
        blocks: Between which a pipeline can cut; if it cannot, `no_blocks` gives the reason.
        notes: Where the measurement differs from what `step_profile` describes.
    """

    batch_size: int
    weights: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    transient: int = 0
    inputs: int = 0
    alone: int | None = None
    flops: float = 0.0
    unit: int = 0
    blocks: list[MeasuredBlock] = field(default_factory=list)
    no_blocks: str = ""
    notes: list[str] = field(default_factory=list)
