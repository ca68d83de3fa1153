"""Memory and operations of one training step, measured without a GPU or the step's memory.

The model is built without memory, and its step runs on fake tensors (torch's FakeTensorMode), which
have shapes, types and lifetimes, but no values. So the counted bytes are those that the real step
would allocate at the full batch, in the run's precision. A step that reads values runs on the CPU
with a few samples instead, and the result is scaled.

Not counted: kernels' own memory (cuDNN's workspaces), the allocator's fragmentation, and the CUDA
context. `distdl.tools.measure.estimate.USABLE` leaves room for them.
"""

from __future__ import annotations

from contextlib import ExitStack

from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from distdl.config.recipe import plain
from distdl.optim import optimizers as optim
from distdl.tools.measure.block_watch import blocks_watched
from distdl.tools.measure.live_bytes import LiveBytes, bytes_of, tensors_in
from distdl.tools.measure.measured_step import MeasuredStep
from distdl.tools.measure.step_parts import (
    a_batch,
    as_fake,
    batch_in_precision,
    in_precision,
    loss_in_precision,
    stretched,
    without_memory,
)
from distdl.util.errors import UserError
from distdl.worker.build import configures_optimizers, make_module

# What grows with the samples.
SCALED = {"activations", "transient", "inputs", "alone", "output", "flops"}


def measure(config: DictConfig, global_batch: int) -> MeasuredStep:
    """Measures one training step of a validated config at `data.batch_size`.

    Args:
        global_batch: For optimizers whose rate depends on it. It affects no byte count.

    Raises:
        UserError: The data gives no batch here, or the step fails on the CPU as well.
    """
    samples, batch = a_batch(config)
    size = int((config.get("data") or {}).get("batch_size") or samples)

    try:
        module = without_memory(config)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = tree_map_only(Tensor, stretched(samples, size), batch)
            return _step(as_fake(module), fake, size, config, global_batch)
    except Exception as error:  # the step reads values, or the model is built in an unusual way
        why = _short(error)
    try:
        measured = _extrapolated(batch, samples, size, config, global_batch)
    except Exception as error:  # the user's module and data run
        raise UserError.at(
            "model", what=f"a training step fails here: {_short(error)}", code="failed"
        ) from error
    measured.notes.append(f"measured on the CPU with {samples} samples and scaled ({why})")
    return measured


def _extrapolated(
    batch: object, samples: int, size: int, config: DictConfig, global_batch: int
) -> MeasuredStep:
    """Extrapolates from a real step with few samples and one with half of them, since only some
    bytes depend on the number of samples."""
    few = max(1, samples // 2)

    def first(tensor: Tensor) -> Tensor:
        # A view would keep all samples in memory, and they would be counted.
        return tensor[:few].clone() if tensor.dim() and len(tensor) == samples else tensor

    less, more = (
        _step(in_precision(make_module(config.model), config), part, count, config, global_batch)
        for part, count in ((tree_map_only(Tensor, first, batch), few), (batch, samples))
    )
    steps = (size - samples) / (samples - few) if samples > few else 0.0
    for small, large in zip((less, *less.blocks), (more, *more.blocks), strict=True):
        for name in SCALED & vars(large).keys():
            value, less_value = getattr(large, name), getattr(small, name)
            if value is not None and less_value is not None:
                setattr(large, name, round(value + steps * (value - less_value)))
    more.batch_size = size
    return more


def _step(
    module: LightningModule, batch: object, size: int, config: DictConfig, global_batch: int
) -> MeasuredStep:
    """Forward, backward and optimizer step of a module, real or fake."""
    batch = batch_in_precision(batch, config)
    module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    tensors = [*module.parameters(), *module.buffers()]
    measured = MeasuredStep(
        size,
        weights=bytes_of(tensors),
        buffers=bytes_of(module.buffers()),
        gradients=bytes_of(trained),
    )
    live = LiveBytes()
    before = bytes_of(tensors_in(batch))
    measured.inputs = before
    live.ignore(tensors)
    with ExitStack() as stack:
        stack.enter_context(blocks_watched(module, measured, before, live))
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(live.count_gradient)
            stack.callback(hook.remove)
        stack.enter_context(live)
        live.add(batch)
        loss = loss_in_precision(module, batch, config)
        measured.activations = live.now
        forward = live.most
        live.most = live.now
        loss.backward()
        measured.transient = max(0, live.most_beside_gradients - measured.activations)
        measured.alone = max(forward, live.most - measured.gradients)
    measured.flops = live.flops
    measured.optimizer = _optimizer_state(module, config, global_batch, measured)
    measured.unit = _largest_unit(module, measured)
    return measured


def _optimizer_state(
    module: LightningModule, config: DictConfig, global_batch: int, measured: MeasuredStep
) -> int:
    """Bytes of the optimizer's state after a step."""
    try:
        if configures_optimizers(module):
            made = module.configure_optimizers()
        else:
            made = optim.build_optimizer(module, plain(config.optimizer), global_batch=global_batch)
        optimizers = [each for each in tree_leaves(made) if isinstance(each, Optimizer)]
        for optimizer in optimizers:
            optimizer.step()
        states = tensors_in([dict(optimizer.state) for optimizer in optimizers])
        return bytes_of(tensor for tensor in states if tensor.dim())
    except Exception as error:  # the user's optimizer runs
        measured.notes.append(f"optimizer estimated as Adam, since its step fails here: {error}")
        return 2 * measured.gradients


def _largest_unit(module: nn.Module, measured: MeasuredStep) -> int:
    """Bytes of the most weights that FSDP gathers at once (see `distdl.strategies.fsdp.units`)."""
    from distdl.strategies.fsdp import units

    if measured.no_blocks:  # pipeline_blocks() may refuse: find units by size
        module = nn.Sequential(*module.children())
    inner = units(module, 1_000_000)
    held = {id(p) for unit in inner for p in unit.parameters()}
    rest = bytes_of(p for p in module.parameters() if id(p) not in held)
    return max([rest, *(bytes_of(unit.parameters()) for unit in inner)])


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:120]}"
