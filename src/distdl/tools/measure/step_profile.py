"""Memory and operations of one training step, measured without a GPU or the step's memory.

The model is built without memory, and its step runs on fake tensors (torch's FakeTensorMode), which
have shapes, types and lifetimes, but no values. So the counted bytes are those that the real step
would allocate at the full batch, in the run's precision. A step that reads values runs on the CPU
with a few samples instead, and the result is scaled.

Not counted: kernels' own memory (cuDNN's workspaces), the allocator's fragmentation, and the CUDA
context. `distdl.tools.measure.estimate.USABLE` leaves room for them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from distdl.config.recipe import plain
from distdl.config.schema import TrainerArguments
from distdl.optim import optimizers as optim
from distdl.util.errors import UserError
from distdl.validation.meta import without_weights
from distdl.worker.build import configures_optimizers, make, make_module

# What grows with the samples.
SCALED = {"activations", "transient", "inputs", "alone", "output", "flops"}
SAMPLES = 4  # that are loaded; fake tensors have the size of the full batch
AUTOCAST = ("16-mixed", "bf16-mixed", "16", "bf16", "transformer-engine-float16")
HALF = ("16-true", "bf16-true", "transformer-engine")


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
        notes: Where the measurement differs from that in the module's docstring.
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


class LiveBytes(TorchDispatchMode):
    """Bytes of the live tensors that were created while this mode was active, real or fake; and the
    floating-point operations meanwhile, by torch's formulas. torch's FlopCounterMode would keep
    tensors alive that a second forward makes in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0
        self.now = self.most = self.gradients = self.most_beside_gradients = 0
        self.most_of_block = 0  # beside gradients, since this was set
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        self.add(output)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        return output

    def add(self, tree: object) -> None:
        for tensor in _tensors(tree):
            storage = tensor.untyped_storage()
            key = storage._cdata
            size = storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self.now += size
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, size)
                beside = self.now - self.gradients
                self.most_beside_gradients = max(self.most_beside_gradients, beside)
                self.most_of_block = max(self.most_of_block, beside)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Excludes tensors that existed before this mode was active."""
        self._known.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def count_gradient(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.gradients += parameter.grad.untyped_storage().nbytes()

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


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
            return _step(_as_fake(module), fake, size, config, global_batch)
    except Exception as error:  # the step reads values, or the model is built in an unusual way
        why = _short(error)
    try:
        measured = _extrapolated(batch, samples, size, config, global_batch)
    except Exception as error:  # the user's module and data run
        raise UserError.at(
            "model", f"a training step fails here: {_short(error)}", code="failed"
        ) from error
    measured.notes.append(f"measured on the CPU with {samples} samples and scaled ({why})")
    return measured


def stretched(samples: int, size: int) -> Callable[[Tensor], Tensor]:
    """Makes a batch of `size` samples of one of a few, without values."""

    def stretch(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if shape and shape[0] == samples:
            shape[0] = size
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    return stretch


def a_batch(config: DictConfig) -> tuple[int, Any]:
    """The number of samples loaded, and the batch as the training step receives it."""
    from distdl.callbacks.metrics import batch_size_of

    try:
        if config.get("data"):
            node = plain(config.data)
            few = {"batch_size": min(SAMPLES, int(node.get("batch_size", 1))), "num_workers": 0}
            source = make(node | {key: few[key] for key in few.keys() & node.keys()})
            source.setup("fit")
        else:
            source = make_module(config.model)
        batch = source.on_before_batch_transfer(next(iter(source.train_dataloader())), 0)
        batch = source.on_after_batch_transfer(batch, 0)
    except Exception as error:  # the user's data module runs
        what = f"no batch can be loaded here: {type(error).__name__}: {error}"
        remedy = "plan with random images of the same size: data=synthetic data.image_size=..."
        raise UserError.at("data", what, remedy, code="failed") from error
    return batch_size_of(batch) or 1, batch


def without_memory(config: DictConfig) -> LightningModule:
    """The module on the meta device, if it can be built there; else on the CPU."""
    bare = without_weights(plain(config.model))
    bare.pop("compile", None)
    try:
        with torch.device("meta"):
            return _in_precision(make_module(bare), config)
    except Exception:  # timm, for example, reads values while building
        return _in_precision(make_module(bare), config)


def _as_fake(module: LightningModule) -> LightningModule:
    """Replaces all parameters and buffers with fake tensors on a fake CPU."""

    @functools.cache  # by identity: shared ones stay shared
    def fake(tensor: Tensor) -> Tensor:
        sizes = tensor.size(), tensor.stride()
        empty = torch.empty_strided(*sizes, dtype=tensor.dtype, device="cpu")
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty

    for part in module.modules():
        owned: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in owned:
            tensors.update({k: fake(v) for k, v in tensors.items() if v is not None})
    return module


def _in_precision(module: LightningModule, config: DictConfig) -> LightningModule:
    """float16 is as large as bfloat16, which CPUs support better."""
    precision = TrainerArguments.of(config.trainer).precision_name
    return module.to(torch.bfloat16) if precision in HALF else module


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
        _step(_in_precision(make_module(config.model), config), part, count, config, global_batch)
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
    batch = _batch_in_precision(batch, config)
    module.train()
    trained = [p for p in module.parameters() if p.requires_grad]
    tensors = [*module.parameters(), *module.buffers()]
    bytes_of = _total(tensors), _total(module.buffers()), _total(trained)
    measured = MeasuredStep(size, *bytes_of)
    live = LiveBytes()
    before = measured.inputs = _total(_tensors(batch))
    live.ignore(tensors)
    with ExitStack() as stack:
        stack.enter_context(_blocks_watched(module, measured, before, live))
        for parameter in trained:
            hook = parameter.register_post_accumulate_grad_hook(live.count_gradient)
            stack.callback(hook.remove)
        stack.enter_context(live)
        live.add(batch)
        loss = _loss_in_precision(module, batch, config)
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


def loss_of(module: LightningModule, batch: object, config: DictConfig) -> Tensor:
    """The loss of a batch, in the run's precision."""
    return _loss_in_precision(module, _batch_in_precision(batch, config), config)


def _batch_in_precision(batch: object, config: DictConfig) -> object:
    if TrainerArguments.of(config.trainer).precision_name not in HALF:
        return batch
    return tree_map_only(Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, batch)


def _loss_in_precision(module: LightningModule, batch: object, config: DictConfig) -> Tensor:
    precision = TrainerArguments.of(config.trainer).precision_name
    with torch.autocast("cpu", torch.bfloat16) if precision in AUTOCAST else nullcontext():
        numbered = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        output: Any = module.training_step(*((batch, 0) if numbered else (batch,)))
    loss: Tensor = output["loss"] if isinstance(output, Mapping) else output
    return loss


@contextmanager
def _blocks_watched(
    module: LightningModule,
    measured: MeasuredStep,
    before: int,
    live: LiveBytes,
) -> Iterator[None]:
    """Fills `measured.blocks` while the forward runs. `before`: bytes at its start."""
    from distdl.strategies.pipeline.splitting import blocks_in

    try:
        stated = blocks_in(module)
    except UserError as error:
        measured.no_blocks = error.problems[0].what
        yield
        return
    seen: list[tuple[int, float]] = [(before, 0.0)]
    going_back: list[tuple[MeasuredBlock, int]] = []

    def end_block() -> None:
        if going_back:
            block, kept = going_back.pop()
            block.transient = max(0, live.most_of_block - kept)

    def watch(block: MeasuredBlock) -> Callable[..., None]:
        def after(_: nn.Module, __: object, output: object) -> None:
            memory = live.now
            block.activations = max(0, memory - seen[-1][0])
            block.flops = live.flops - seen[-1][1]
            block.output = _total(_tensors(output))
            seen.append((memory, live.flops))

            def goes_back(gradient: Tensor) -> None:
                end_block()
                live.most_of_block = live.now - live.gradients
                going_back.append((block, memory))

            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(goes_back)

        return after

    with ExitStack() as stack:
        for stage in stated:
            tensors = [t for part in stage.modules for t in (*part.parameters(), *part.buffers())]
            trained = [t for t in tensors if t.requires_grad]
            largest = max((_total([t]) for t in trained), default=0)
            block = MeasuredBlock(_total(tensors), _total(trained), largest=largest)
            measured.blocks.append(block)
            # Steps without a name (a flatten) are not modules of the network, so no hook runs.
            last = [part for name, part in stage.parts if name is not None][-1]
            stack.callback(last.register_forward_hook(watch(block)).remove)
        yield
        end_block()


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
        states = _tensors([dict(optimizer.state) for optimizer in optimizers])
        return _total(tensor for tensor in states if tensor.dim())
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
    rest = _total(p for p in module.parameters() if id(p) not in held)
    return max([rest, *(_total(unit.parameters()) for unit in inner)])


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _total(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each counted once."""
    return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:120]}"
