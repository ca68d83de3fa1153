"""Operations and bytes per sample of a training step.

`distdl.tools.measure.step_profile` counts them in one training step of the run's own config on fake
tensors: matrix products, convolutions and attention, forward and backward. A multiplication and an
addition are two operations. The result is the same under every strategy and with torch.compile.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from omegaconf import DictConfig

from distdl.util.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counted:
    """Counts per sample, or of the whole model.

    Args:
        flops_per_sample: Forward and backward.
        least_bytes_per_sample: Lower bound of the traffic to the device's memory, without weights:
            everything that the backward needs is written once and read once. None: not known.
        gradient_bytes: Of all gradients, which data parallelism sends.
        weight_bytes: Parameters and buffers.
        activation_bytes_per_sample: Memory kept for the backward. None: not known.
    """

    flops_per_sample: float
    least_bytes_per_sample: float | None
    gradient_bytes: int
    weight_bytes: int
    activation_bytes_per_sample: float | None


def from_a_live_step(
    module: LightningModule, flops: float | None, batch: int
) -> tuple[Counted | None, str]:
    """The counts of a trained module with manual optimization, whose step runs only inside its
    trainer. `flops` are those of one of this rank's steps, with `batch` samples."""
    if not flops:
        return None, "no matrix product, convolution or attention in the step"
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    weights = sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))
    return Counted(flops / batch, None, trained, weights, None), "counted in a step of this rank"


def count(config: DictConfig, global_batch: int) -> tuple[Counted | None, str]:
    """The counts, or (None, why) where the step runs neither on fake tensors nor on the CPU."""
    from distdl.tools.measure import step_profile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            measured = step_profile.measure(config, global_batch)
    except UserError as error:
        return None, error.problems[0].what
    except Exception as error:  # the user's step, outside its trainer
        return None, f"{type(error).__name__}: {error}".split("\n")[0][:200]
    if not measured.flops:
        return None, "no matrix product, convolution or attention in the step"
    per_sample = measured.activations / measured.batch_size
    flops = measured.flops / measured.batch_size
    counted = Counted(flops, 2 * per_sample, measured.gradients, measured.weights, per_sample)
    return counted, "; ".join(measured.notes)
