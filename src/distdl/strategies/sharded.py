"""What strategies share whose ranks hold slices of weights as DTensors: portable checkpoints, and
weights that are whole while a step runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from distdl.checkpoint import portable, sharded_folder
from distdl.strategies import sharing
from distdl.strategies.fsdp_limits import show_arguments, watch_weights

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class ShardedStrategy(sharing.Sliced, ModelParallelStrategy):
    """Base of strategies whose module holds DTensors by the time of `setup`."""

    offload = False  # slices and optimizer state are in host memory

    def gather_in_steps(self, module: Any) -> None:  # noqa: ANN401 - methods of it are replaced
        """Lets the weights of the module itself be whole in its steps: Lightning calls these, not
        `forward`."""
        steps = {step: getattr(module, step) for step in STEPS}
        if module.automatic_optimization:
            watch_weights(module)
        for step, method in steps.items():
            register_fsdp_forward_method(module, step)
            show_arguments(getattr(module, step), method)

    def reshard(self) -> None:
        """Frees weights that stay gathered after a forward without a backward."""
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full weights on rank 0; for a sharded checkpoint, each rank's slices. Collective."""
        sharing.agree_on_buffers(self.lightning_module, self.replicas)
        self.reshard()
        return self._outgoing(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state as in `distdl.checkpoint.portable`: full on rank 0, or slices. Collective."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        self.reshard()
        named = portable.to_names(optimizer.state_dict(), optimizer, self.lightning_module)
        return {**named, "state": {k: self._outgoing(v) for k, v in named["state"].items()}}

    def _outgoing(self, values: Mapping[str, Any]) -> dict[str, Any]:
        if self.sharded_checkpoints:
            return dict(values)
        return {key: self._full(value) for key, value in values.items()}  # one at a time

    def _full(self, value: object) -> object:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        return sharing.on_host(full) if self.is_global_zero else None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object = None
    ) -> None:
        if self.sharded_checkpoints:
            path = Path(self.broadcast(str(filepath)))
            sharded_folder.write(checkpoint, path, write_rest=self.is_global_zero)
        else:
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.reshard()
        slices = self.lightning_module.state_dict()
        full = checkpoint["state_dict"]
        sliced = {name: sliced_like(value, slices.get(name)) for name, value in full.items()}
        self.lightning_module.load_state_dict(sliced, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self.reshard()
        for state, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=True):
            # A state by position fits these groups, which are the same as without sharding.
            named = portable.to_names(state, optimizer, self.lightning_module)
            indexed = portable.to_indices(named, optimizer, self.lightning_module)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            indexed["state"] = {
                index: {key: sliced_like(value, parameters[index]) for key, value in entry.items()}
                for index, entry in indexed["state"].items()
            }
            optimizer.load_state_dict(indexed)
        if not self.offload:
            _optimizers_to_device(self.optimizers, self.root_device)


def sliced_like(full: object, parameter: object) -> object:
    """This rank's slice of a full tensor, cut like `parameter`, without communication.

    A tensor of another shape (Adam's step) is the same on every rank and is returned unchanged.
    """
    if not isinstance(parameter, DTensor) or not isinstance(full, torch.Tensor):
        return full
    if full.shape != parameter.shape:
        return full
    mesh = parameter.device_mesh
    full = full.to(parameter.device)
    # A copy, else the slice would keep the full tensor alive.
    return distribute_tensor(full, mesh, parameter.placements, src_data_rank=None).clone()
