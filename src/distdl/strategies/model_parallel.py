"""`strategy=model_parallel`: a module that divides itself over a mesh of devices.

The module's `configure_model` applies torch's tensor parallelism and FSDP2 along
`self.device_mesh["tensor_parallel"]` and `self.device_mesh["data_parallel"]`, as for Lightning's
strategy of this name. The ranks of a tensor-parallel group have the same samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from distdl.config.degrees import DATA, MESH, TENSOR
from distdl.optim import layerwise
from distdl.strategies import mesh_rules
from distdl.strategies.sharded import ShardedStrategy
from distdl.strategies.sharing import Replicated
from distdl.util.ranges import Positive

COMPARED = 2  # first steps, of which batches and gradients are compared


class ModelParallelStrategy(Replicated, ShardedStrategy):
    """Runs a module that parallelises itself in `configure_model`.

    Args:
        data_parallel_size: Groups of ranks that have different samples.
        tensor_parallel_size: Ranks in each group. "auto": what the other size leaves; if both are
            "auto", a group is a node.

    Raises:
        UserError: The product of the sizes is not the number of ranks, or the module leaves weights
            whole that the ranks would train apart.
    """

    def __init__(
        self,
        data_parallel_size: Positive | Literal["auto"] = "auto",
        tensor_parallel_size: Positive | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(data_parallel_size, tensor_parallel_size, False)
        self._compared = 0

    check = staticmethod(mesh_rules.check)

    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        ranks = self.cluster_environment.world_size()
        node = {DATA: self._data_parallel_size, TENSOR: self._tensor_parallel_size}
        MESH.refuse(node, ranks, self.num_nodes)
        data, tensor = MESH.sizes(node, ranks, self.num_nodes).values()
        self.sizes = (data, tensor)
        self._data_parallel_size = data
        self._tensor_parallel_size = tensor
        super().setup_environment()
        self.replicas = self.device_mesh["data_parallel"].get_group()
        self.peers = self.device_mesh["tensor_parallel"].get_group()
        _quieten()

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        module = self.lightning_module
        mesh_rules.refuse(module, *self.sizes)
        self._materialise()
        if isinstance(module, FSDPModule) and "training_step" not in vars(module):
            self.gather_in_steps(module)
        self.reshard()
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        self.barrier()
        if fits:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                facts = layerwise.of_optimizer(optimizer)
                layerwise.refuse_own(layerwise.refuse_slices(*facts))
        self.setup_precision_plugin()
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_by_norm
        plugin.clip_grad_by_value = self._clip_by_value
        if fits:
            _optimizers_to_device(self.optimizers, self.root_device)
        self.count_once(module)

    def teardown(self) -> None:
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            vars(self.precision_plugin).pop(name, None)
        super().teardown()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._materialise()
        super().load_model_state_dict(checkpoint, strict)

    def _materialise(self) -> None:
        """Gives weights memory that `configure_model` has left on `meta`."""
        _materialize_distributed_module(self.lightning_module, self.root_device)

    def training_step(self, *args: object, **kwargs: object) -> STEP_OUTPUT:
        if self._compared < COMPARED:
            mesh_rules.refuse_other_batches(args, self.peers)
        return super().training_step(*args, **kwargs)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        if self._compared < COMPARED:
            mesh_rules.refuse_other_gradients(self.lightning_module, *self.sizes, self.peers)
            self._compared += 1

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        parts = by_mesh(self.precision_plugin.main_params(optimizer))
        norm = total_norm(parts)
        for parameters in parts:
            clip_grads_with_norm_(parameters, clip_val, norm)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        for parameters in by_mesh(self.precision_plugin.main_params(optimizer)):
            clip_grad_value_(parameters, clip_value=clip_val)


def by_mesh(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The parameters that have a gradient, by the mesh over which they are divided: torch computes
    with DTensors of one mesh at a time."""
    parts: dict[object, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            parts.setdefault(mesh, []).append(parameter)
    return [*parts.values()]


def total_norm(parts: Iterable[Iterable[torch.Tensor]]) -> torch.Tensor:
    """The norm of all gradients, as if they were whole. Collective."""
    squared = []
    for parameters in parts:
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        squared.append(whole.float() ** 2)
    return torch.stack(squared).sum().sqrt() if squared else torch.zeros(())


def _quieten() -> None:
    """torch warns of each weight that is divided twice, at each checkpoint, that gathering it takes
    two collectives."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    logger.addFilter(lambda record: "sequential all_gather" not in record.getMessage())
