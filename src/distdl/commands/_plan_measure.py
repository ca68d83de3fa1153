"""What one training step needs, found out without a GPU and without its memory.

The model is built without memory and its step runs on fake tensors (torch's FakeTensorMode), which
have shapes, types and lifetimes, but no values. So what is counted is what the step itself would
allocate at the full batch, in the run's precision. A step that looks at values cannot run so: it
runs on the CPU then, on a few samples, and is scaled.

Not counted: what kernels take for themselves (cuDNN's workspaces), the allocator's fragments, and
the CUDA context. `_plan_estimate.USABLE` leaves room for them.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from distdl import optim
from distdl.build import configures_optimizers, make
from distdl.commands import _plan_inputs as inputs
from distdl.config import plain
from distdl.errors import Problem, UserError


@dataclass
class Block:
    """A part of the model that stays whole under a pipeline, and what its forward leaves behind.

    Args:
        name: In the model.
        weights: Bytes of its parameters and buffers.
        gradients: Bytes.
        activations: Bytes that wait for the backward, of the whole batch.
        output: Bytes of what it gives to the next block, of the whole batch.
        flops: Of its forward.
    """

    name: str
    weights: int
    gradients: int
    activations: int = 0
    output: int = 0
    flops: float = 0.0


@dataclass
class Measured:
    """One training step on one device, in bytes.

    Args:
        batch_size: Samples of the step.
        weights: Parameters and buffers.
        buffers: Of those, the buffers.
        gradients: Of what is trained.
        optimizer: Its state.
        activations: What is there at the end of the forward besides weights: what the backward
            needs, and the batch.
        transient: What the backward has more at its worst moment, gradients not counted.
        flops: Floating-point operations of forward and backward.
        unit: Weights of the largest part that FSDP gathers at once.
        blocks: What a pipeline can cut between; empty if it cannot, and then `no_blocks` says why.
        notes: How it was measured, where not as the module says.
    """

    batch_size: int
    weights: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    transient: int = 0
    flops: float = 0.0
    unit: int = 0
    blocks: list[Block] = field(default_factory=list)
    no_blocks: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def per_sample(self) -> float:
        """Bytes that one more sample takes."""
        return (self.activations + self.transient) / self.batch_size


class Live(TorchDispatchMode):
    """Bytes of the tensors that are alive and were made under it, real or fake."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.gradients = self.most_beside_gradients = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        return output

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes()
        self.now += size
        weakref.finalize(storage, self._gone, key, size)
        self.most_beside_gradients = max(self.most_beside_gradients, self.now - self.gradients)

    def ignore(self, tensor: Tensor) -> None:
        """Takes a tensor for one that was there before."""
        self._known.add(tensor.untyped_storage()._cdata)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def measure(config: DictConfig, global_batch: int) -> Measured:
    """Measures one training step of a validated config at `data.batch_size`.

    Args:
        config: As composed.
        global_batch: For optimizers whose rate follows it; no byte depends on it.

    Raises:
        UserError: The data gives no batch here, or the step fails on the CPU as well.
    """
    samples, batch = inputs.a_batch(config)
    size = int((config.get("data") or {}).get("batch_size") or samples)
    try:
        module = inputs.in_precision(inputs.without_memory(config.model), config)
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = inputs.as_fake_batch(batch, samples, size)
            return step(inputs.as_fake(module), fake, size, config, global_batch)
    except Exception as error:  # it looks at values, or builds itself in its own way
        why = f"{type(error).__name__}: {first_line(error)}"
    try:
        found = extrapolated(batch, samples, size, config, global_batch)
    except Exception as error:
        what = f"a training step fails here: {type(error).__name__}: {first_line(error)}"
        raise UserError(Problem("model", what)) from error
    found.notes.append(f"measured on the CPU with {samples} samples and scaled ({why})")
    return found


def extrapolated(
    batch: Any, samples: int, size: int, config: DictConfig, global_batch: int
) -> Measured:
    """A real step with few samples and with half of them: some bytes depend on their number."""
    few = max(1, samples // 2)

    def first(tensor: Tensor) -> Tensor:
        # A view would keep all samples in memory, and counted.
        return tensor[:few].clone() if tensor.dim() and len(tensor) == samples else tensor

    less, more = (
        step(inputs.in_precision(make(config.model), config), part, count, config, global_batch)
        for part, count in ((tree_map_only(Tensor, first, batch), few), (batch, samples))
    )
    steps = (size - samples) / (samples - few) if samples > few else 0.0
    for one, other in zip((less, *less.blocks), (more, *more.blocks), strict=True):
        for name in ("activations", "transient", "output", "flops"):
            if hasattr(other, name):
                value = getattr(other, name)
                grown = value + steps * (value - getattr(one, name))
                setattr(other, name, grown if name == "flops" else int(grown))
    more.batch_size = size
    return more


def step(module: Any, batch: Any, size: int, config: DictConfig, global_batch: int) -> Measured:
    """Forward, backward and optimizer step of a module, real or fake."""
    precision = inputs.precision_of(config)
    if precision in inputs.HALF:
        batch = tree_map_only(Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, batch)
    module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    found = Measured(
        size,
        weights=total([*module.parameters(), *module.buffers()]),
        buffers=total(module.buffers()),
        gradients=total(trained),
    )
    live, counter = Live(), FlopCounterMode(display=False)
    for tensor in (*module.parameters(), *module.buffers()):
        live.ignore(tensor)
    with ExitStack() as stack:
        before = total(t for t in tree_leaves(batch) if isinstance(t, Tensor))
        stack.enter_context(blocks_watched(module, found, before, live, counter))
        for parameter in trained:
            stack.callback(parameter.register_post_accumulate_grad_hook(_count(live)).remove)
        stack.enter_context(counter)
        stack.enter_context(live)
        for tensor in tree_leaves(batch):
            if isinstance(tensor, Tensor):
                live.add(tensor)
        autocast = torch.autocast("cpu", torch.bfloat16) if precision in inputs.AUTOCAST else None
        with autocast or nullcontext():
            takes = len(inspect.signature(module.training_step).parameters)
            output = module.training_step(*(batch, 0)[:takes])
        loss = output["loss"] if isinstance(output, Mapping) else output
        del output
        found.activations = live.now
        loss.backward()
        found.transient = max(0, live.most_beside_gradients - found.activations)
    found.flops = float(counter.get_total_flops())
    found.optimizer = optimizer_state(module, config, global_batch, found)
    found.unit = largest_unit(module, found)
    return found


def _count(live: Live) -> Callable[[Tensor], None]:
    def count(parameter: Tensor) -> None:
        if parameter.grad is not None:
            live.gradients += parameter.grad.untyped_storage().nbytes()

    return count


@contextmanager
def blocks_watched(
    module: Any, found: Measured, before: int, live: Live, counter: FlopCounterMode
) -> Iterator[None]:
    """Fills `found.blocks` while the forward runs; `before` it there are so many bytes."""
    from distdl.strategies.pipeline.splitting import blocks_in

    try:
        stated = blocks_in(module)
    except UserError as error:
        found.no_blocks = error.problems[0].what
        yield
        return
    seen: list[tuple[int, float]] = [(before, 0.0)]
    handles = []
    for stage in stated:
        tensors = [t for part in stage.modules for t in (*part.parameters(), *part.buffers())]
        trained = [t for t in tensors if t.requires_grad]
        block = Block(stage.name, total(tensors), total(trained))
        found.blocks.append(block)
        # Steps without a name (a flatten) are no modules of the network: nobody calls them.
        last = [part for name, part in stage.parts if name is not None][-1]

        def after(_: nn.Module, __: Any, output: Any, block: Block = block) -> None:
            memory, flops = live.now, float(counter.get_total_flops())
            block.activations = max(0, memory - seen[-1][0])
            block.flops = flops - seen[-1][1]
            block.output = total(t for t in tree_leaves(output) if isinstance(t, Tensor))
            seen.append((memory, flops))

        handles.append(last.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def optimizer_state(module: Any, config: DictConfig, global_batch: int, found: Measured) -> int:
    """Bytes of the optimizer's state after a step."""
    try:
        optimizers = optimizers_of(module, config, global_batch)
        for optimizer in optimizers:
            optimizer.step()
        states = [state for optimizer in optimizers for state in optimizer.state.values()]
        return total(v for s in states for v in s.values() if isinstance(v, Tensor) and v.dim())
    except Exception as error:
        found.notes.append(f"optimizer taken for Adam, since its step fails here: {error}")
        return 2 * found.gradients


def optimizers_of(module: Any, config: DictConfig, global_batch: int) -> list[Optimizer]:
    if not configures_optimizers(module):
        node = plain(config.optimizer)
        return [optim.build_optimizer(module, node, global_batch=global_batch)]
    made = module.configure_optimizers()
    found: list[Optimizer] = []

    def collect(value: Any) -> None:
        if isinstance(value, Optimizer):
            found.append(value)
        elif isinstance(value, Mapping):
            collect(list(value.values()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)

    collect(made)
    return found


def largest_unit(module: nn.Module, found: Measured) -> int:
    """The most weights that FSDP has whole at once (of `distdl.strategies.fsdp.units`)."""
    from distdl.strategies.fsdp import units

    if found.no_blocks:  # it may have the method, which then refuses: found by size instead
        module = nn.Sequential(*module.children())
    inner = units(module, 1_000_000)
    sizes = [total(unit.parameters()) for unit in inner]
    held = {id(p) for unit in inner for p in unit.parameters()}
    rest = total(p for p in module.parameters() if id(p) not in held)
    return max([rest, *sizes])


def total(tensors: Any) -> int:
    """Bytes of tensors, each storage once."""
    seen = {id(t): t.numel() * t.element_size() for t in tensors}
    return sum(seen.values())


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:120]
