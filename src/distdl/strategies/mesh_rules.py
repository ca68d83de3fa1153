"""What `strategy=model_parallel` asks of a module: that its `configure_model` divides it over the
mesh, and that what it leaves whole stays equal on all ranks.

A validation calls `configure_model` on a mesh of ranks that do not exist (torch's fake process
group), with a module without memory. What only values show, the first steps compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from distdl.config.degrees import MESH, at_strategy
from distdl.optim import layerwise
from distdl.strategies.sharing import refuse_averaging, to_default_layout
from distdl.util.errors import Problem, UserError
from distdl.util.wording import first_few, plural
from distdl.validation.meta import build_on_meta, targets_own

AXES = ("data_parallel", "tensor_parallel")
PRECISIONS = (None, 32, "32", "32-true", "bf16-mixed")
PAGE = "docs/strategies/model_parallel.md"
WRITE = (
    'write a configure_model that calls parallelize_module(layer, self.device_mesh["tensor_'
    'parallel"], plan) and fully_shard(self, mesh=self.device_mesh["data_parallel"]), as in '
    f"{PAGE}; or strategy=fsdp, which needs none"
)
SHARD = 'end its configure_model with fully_shard(self, mesh=self.device_mesh["data_parallel"])'


def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem | str]:
    """The strategy's validation hook: the device, other settings of the run, and the module.

    Yields:
        Problems; a text, if the module cannot be checked.
    """
    config = context["config"]
    trainer = config.get("trainer") or {}
    if context["accelerator"] == "mps":
        yield Problem(
            "",
            what="does not run on Apple's GPUs",
            remedy="trainer.accelerator=cpu",
            code="unsupported",
        )
    yield from refuse_averaging(config, "strategy=ddp")
    if trainer.get("precision") not in PRECISIONS:
        yield Problem(
            "",
            what=f"does not train with trainer.precision={trainer['precision']}",
            remedy="trainer.precision=bf16-mixed, or 32-true",
            code="unsupported",
        )
    if trainer.get("sync_batchnorm"):
        yield Problem(
            "",
            what="does not synchronise batch norm",
            remedy="trainer.sync_batchnorm=false",
            code="unsupported",
        )
    yield from layerwise.refuse_slices(*layerwise.of_config(config))
    ranks = context["world_size"]
    nodes = trainer.get("num_nodes") or 1
    model = config.get("model")
    divides = not [*MESH.problems(node, ranks, nodes)]
    built = isinstance(model, Mapping) and "_target_" in model
    if ranks < 2:
        yield Problem(
            "",
            what="a mesh needs at least two devices, and there is one",
            remedy="trainer.devices=2, or strategy=single",
            code="not-enough",
        )
    elif divides and built and "model" not in context.get("refused", ()):
        yield from _module(model, *MESH.sizes(node, ranks, nodes).values())


def _module(model: Mapping[str, Any], data: int, tensor: int) -> Iterator[Problem | str]:
    try:
        with rehearsed(model, data, tensor) as module:
            found = [*undivided(module, data, tensor)]
    except Exception as error:  # any class's methods run
        cause = error.__cause__ or error
        yield f"the module's own parallelism: {type(cause).__name__}: {cause}"
        return
    yield from found


@contextmanager
def rehearsed(model: Mapping[str, Any], data: int, tensor: int) -> Iterator[nn.Module]:
    """The module of a model's node after its `configure_model`, without memory, as rank 0 of a
    mesh has it. It may raise anything.

    Raises:
        RuntimeError: This process has a process group, of real ranks.
    """
    with imagined_mesh(data, tensor) as mesh:
        module: Any = build_on_meta(targets_own(model))
        to_default_layout(module)  # as a worker does
        module._device_mesh = mesh
        module.configure_model()
        yield module


@contextmanager
def imagined_mesh(data: int, tensor: int) -> Iterator[DeviceMesh]:
    """A mesh of this process and of ranks that do not exist.

    Raises:
        RuntimeError: This process has a process group, of real ranks.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("there is a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=data * tensor)
    try:
        yield init_device_mesh("cpu", (data, tensor), mesh_dim_names=AXES)
    finally:
        dist.destroy_process_group()


def undivided(module: nn.Module, data: int, tensor: int) -> Iterator[Problem]:
    """Problems of a module after its `configure_model`, on a mesh of `data` x `tensor` ranks; paths
    are relative to the strategy's node."""
    name = next(c.__name__ for c in type(module).__mro__ if not c.__name__.startswith("FSDP"))
    parameters = dict(module.named_parameters())
    if not any(isinstance(each, DTensor) for each in parameters.values()):
        yield Problem(
            "",
            what=f"{name} does not parallelise itself: no weight is divided over the mesh",
            remedy=WRITE,
            code="unsupported",
        )
        return
    apart = [
        path
        for path, parameter in parameters.items()
        if parameter.requires_grad and not _on_axis(parameter, data, tensor, "data_parallel")
    ]
    if data > 1 and apart:
        count = f"{len(apart)} {plural('parameter', len(apart))}"
        yield Problem(
            "",
            what=(
                f"{name} averages no gradients of {count} over its {data} groups: "
                f"{first_few(apart)}"
            ),
            remedy=SHARD,
            code="unsupported",
        )


def _on_axis(parameter: torch.Tensor, data: int, tensor: int, axis: str) -> bool:
    """Whether a parameter's mesh goes along an axis of the whole mesh."""
    if not isinstance(parameter, DTensor):
        return False
    ranks = parameter.device_mesh.mesh.flatten().tolist()
    if axis == "data_parallel":
        return len({rank // tensor for rank in ranks}) == data
    return len({rank % tensor for rank in ranks}) == tensor


def refuse(module: nn.Module, data: int, tensor: int) -> None:
    """Raises a UserError with what `undivided` finds."""
    if found := [*map(at_strategy, undivided(module, data, tensor))]:
        raise UserError(*found)


def refuse_other_batches(batch: object, peers: dist.ProcessGroup) -> None:
    """Raises a UserError unless the ranks of a tensor-parallel group have the same batch.
    Collective."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    sums = [float(each.double().sum()) for each in tensors if not each.is_complex()]
    if _differ(sums, peers):
        raise UserError.at(
            "data",
            what="the ranks of a tensor-parallel group have different batches of one step",
            remedy="let distdl divide the samples: a DataLoader without a sampler of its own",
            code="unsupported",
        )


def refuse_other_gradients(
    module: nn.Module, data: int, tensor: int, peers: dist.ProcessGroup
) -> None:
    """Raises a UserError unless a weight that every rank of a tensor-parallel group holds has the
    same gradient on each. Collective."""
    norms: dict[str, float] = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        if gradient is None or _on_axis(parameter, data, tensor, "tensor_parallel"):
            continue
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        norms[name] = float(local.double().norm())
    if _differ([*norms.values()], peers):
        what = "has weights whose gradients differ within a tensor-parallel group"
        named = f" ({next(iter(norms))}, ...)" if norms else ""
        raise UserError.at(
            "model",
            what=f"{what}{named}",
            remedy=(
                "let parallelize_module give their layers a style as well (SequenceParallel() for "
                "a "
                "norm), or let their inputs and outputs be whole: input_layouts=Replicate()"
            ),
            code="unsupported",
        )


def _differ(mine: list[float], peers: dist.ProcessGroup) -> bool:
    """Whether numbers differ among ranks by more than rounding."""
    gathered: list[Any] = [None] * dist.get_world_size(peers)
    dist.all_gather_object(gathered, mine, group=peers)
    if any(len(each) != len(mine) for each in gathered):
        return True
    rows = torch.tensor(gathered, dtype=torch.float64)
    spread = rows.amax(0) - rows.amin(0)
    allowed = 1e-9 + 1e-3 * rows.abs().amax(0)
    # What is not finite on all of them is equal enough.
    return bool((spread > allowed).any())
