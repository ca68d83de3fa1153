"""The peak memory of a step whose weights are divided over ranks, by a rehearsal on one of them.

The step runs on fake tensors, and with it FSDP2 itself, on a mesh of ranks that do not exist. So
what is gathered, kept and freed in which order is torch's own doing. torch's tracker of memory
counts the local tensors behind DTensors, and sees storages shrink and grow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from omegaconf import DictConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from distdl.config.recipe import plain
from distdl.optim import optimizers as optim
from distdl.strategies.fsdp import units
from distdl.strategies.mesh_rules import imagined_mesh
from distdl.strategies.sharing import to_default_layout
from distdl.tools.measure import step_parts
from distdl.worker.build import configures_optimizers


class NoNames(contextlib.nullcontext[None]):
    """In place of the tracker's tracker of modules: a peak needs no names."""

    is_bw = False
    parents: frozenset[str] = frozenset()

    def register_user_hooks(self, *hooks: object) -> None:
        """There are none."""

    def clear_user_hooks(self) -> None:
        """There are none."""


Divides = Callable[[LightningModule, DeviceMesh], None]


def by_fsdp(minimum: int, reshard: bool) -> Divides:
    """What `strategy=fsdp` does; `minimum` is its `min_parameters`."""

    def divide(module: LightningModule, mesh: DeviceMesh) -> None:
        manual = not module.automatic_optimization
        for unit in [*units(module, minimum, every_part=manual), module]:
            frees = reshard and unit is not module
            fully_shard(unit, mesh=mesh["data_parallel"], reshard_after_forward=frees)

    return divide


def by_itself(module: LightningModule, mesh: DeviceMesh) -> None:
    """What `strategy=model_parallel` does."""
    module._device_mesh = mesh
    module.configure_model()


def peak(config: DictConfig, data: int, tensor: int, divide: Divides) -> int:
    """Bytes at the peak of a step after the first one, on the first rank of a mesh.

    Args:
        data, tensor: The sizes of the mesh.
        divide: Called with the module, whose weights are on `meta`, and the mesh.

    Raises:
        Exception: Of any kind, as the user's code runs.
    """
    from torch.distributed._tools.mem_tracker import MemTracker

    samples, batch = step_parts.a_batch(config)
    size = int((config.get("data") or {}).get("batch_size") or samples)
    module: Any = step_parts.without_memory(config)
    with imagined_mesh(data, tensor) as mesh:
        module = module.to("meta")
        to_default_layout(module)  # as a worker does
        divide(module, mesh)
        shards_itself = isinstance(module, FSDPModule)
        if shards_itself:
            register_fsdp_forward_method(module, "training_step")
        with FakeTensorMode(allow_non_fake_inputs=True):
            module.to_empty(device="cpu")
            module.train()
            fake = tree_map_only(torch.Tensor, step_parts.stretched(samples, size), batch)
            optimizers = optimizers_of(module, config)
            # As after a step: the states exist, and gradients stay until the backward begins.
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            for each in optimizers:
                each.step()
            tracker: Any = MemTracker()
            tracker._mod_tracker = NoNames()
            inputs = [leaf for leaf in tree_leaves(fake) if isinstance(leaf, torch.Tensor)]
            tracker.track_external(module, *optimizers, *inputs)
            with tracker:
                loss = step_parts.loss_of(module, fake, config)
                for each in optimizers:
                    each.zero_grad()
                loss.backward()
                for each in optimizers:
                    each.step()
            found = tracker.get_tracker_snapshot("peak")
            return max(each["Total"] for each in found.values())


def optimizers_of(module: nn.Module, config: DictConfig) -> list[Optimizer]:
    """Those of a run."""
    made: object
    if isinstance(module, LightningModule) and configures_optimizers(module):
        made = module.configure_optimizers()
    else:
        made = optim.build_optimizer(module, plain(config.optimizer), global_batch=1)
    return [each for each in tree_leaves(made) if isinstance(each, Optimizer)]
