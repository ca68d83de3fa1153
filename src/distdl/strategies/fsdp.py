"""Fully sharded data parallel (FSDP2): every rank holds a slice of each weight.

`fully_shard` (https://pytorch.org/docs/stable/distributed.fsdp.fully_shard.html) is applied to each
block of an ordinary LightningModule, which needs no code of its own for this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)

from distdl.strategies import sharing
from distdl.strategies.fsdp_limits import refuse_second_order
from distdl.strategies.sharded import ShardedStrategy
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import Positive

# Modules whose forward reads weights of submodules without calling the submodules' forward.
READ_SUBMODULES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
# Modules without a forward: no hook could gather their weights.
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
PRECISIONS = (None, 32, "32", "32-true", "bf16-mixed", "bf16-true")


class FSDPStrategy(ShardedStrategy):
    """Shards weights, gradients and optimizer state over all ranks.

    Weights are gathered in units. These are the blocks of the module's `pipeline_blocks()`, or
    without this method submodules chosen by size. All other parameters form one more unit, the
    module itself. In mixed precision (`trainer.precision=bf16-mixed`, autocast) weights are
    gathered in float32.

    Args:
        min_parameters: A block with fewer does not become a unit, because a collective of less than
            a few MB is mostly latency.
        reshard_after_forward: Free a block's weights after its forward and gather them again for
            the backward (as ZeRO-3); False keeps them in between (as ZeRO-2).
        offload: Keep slices and optimizer state in host memory between steps.
    """

    def __init__(
        self,
        min_parameters: Positive = 1_000_000,
        reshard_after_forward: bool = True,
        offload: bool = False,
    ) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.min_parameters = min_parameters
        self.reshard_after_forward = reshard_after_forward
        self.offload = offload

    @staticmethod
    def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterable[Problem]:
        """Problems of the strategy node; paths are relative to it."""
        if context["accelerator"] == "mps":
            yield Problem(
                "",
                what="does not run on Apple's GPUs",
                remedy="trainer.accelerator=cpu",
                code="unsupported",
            )
        yield from sharing.refuse_averaging(context["config"])
        precision = context["config"]["trainer"].get("precision")
        if precision not in PRECISIONS:
            yield Problem(
                "",
                what=f"does not train with trainer.precision={precision}",
                remedy="trainer.precision=bf16-mixed, or 32-true",
                code="unsupported",
            )

    def setup_environment(self) -> None:
        assert self.cluster_environment is not None
        self._data_parallel_size = self.cluster_environment.world_size()
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fits = trainer.state.fn == TrainerFn.FITTING
        module: nn.Module = self.lightning_module
        if not isinstance(module, FSDPModule):
            if fits and self._layer_sync:
                module = self._layer_sync.apply(module)
            self._shard(self.precision_plugin.convert_module(module))
        self.reshard()
        self.model = self.lightning_module
        if not self.offload:
            self.model_to_device()
        self.barrier()
        if fits:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fits and not self.offload:
            _optimizers_to_device(self.optimizers, self.root_device)

    def _shard(self, module: nn.Module) -> None:
        # Every rank has built the same full module and keeps its slices, without communication.
        pins = torch.cuda.is_available()
        policy = CPUOffloadPolicy(pin_memory=pins) if self.offload else OffloadPolicy()
        mesh = self.device_mesh["data_parallel"]
        sharing.to_default_layout(module)
        manual = not self.lightning_module.automatic_optimization
        for unit in [*units(module, self.min_parameters, every_part=manual), module]:
            # The backward needs the outermost unit again at once.
            frees = self.reshard_after_forward and unit is not module
            fully_shard(unit, mesh=mesh, reshard_after_forward=frees, offload_policy=policy)
            refuse_second_order(unit)
        self.gather_in_steps(module)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        super().pre_backward(closure_loss)
        module: Any = self.lightning_module
        if not module.automatic_optimization and closure_loss.requires_grad:
            # FSDP2 hooks the output of each unit. Under manual optimization, this loss never leaves
            # the outermost unit, so hook it here.
            closure_loss.register_hook(module._get_fsdp_state()._pre_backward)


def units(module: nn.Module, minimum: int, every_part: bool = False) -> list[nn.Module]:
    """The submodules to shard as units of their own, inner ones first.

    These are the blocks of `pipeline_blocks()`, or without this method submodules, searched from
    the inside out. No unit shares a parameter with a module outside it.

    Args:
        module: The module that contains them; not part of the result.
        minimum: The least number of parameters of a unit, without those of units inside it.
        every_part: Make every other submodule with weights a unit too. Needed if training_step
            calls parts of the module by themselves, with backward passes in between.
    """
    times = Counter(id(p) for m in module.modules() for p in m.parameters(recurse=False))
    taken: set[int] = set()
    chosen: list[nn.Module] = []

    def consider(candidate: nn.Module, least: int) -> None:
        inside = Counter(id(p) for m in candidate.modules() for p in m.parameters(recurse=False))
        shared = any(times[key] != count for key, count in inside.items())
        free = {id(p): p.numel() for p in candidate.parameters() if id(p) not in taken}
        if sum(free.values()) >= least and not shared:
            chosen.append(candidate)
            taken.update(free)

    def walk(parent: nn.Module, least: int) -> None:
        for child in parent.children():
            if not isinstance(child, READ_SUBMODULES):
                walk(child, least)
            if not isinstance(child, CONTAINERS):
                consider(child, least)

    blocks: list[tuple[str, nn.Module]] = []
    with suppress(UserError, AttributeError):  # no pipeline_blocks(), or no chain
        blocks = list(module.pipeline_blocks())  # type: ignore[operator]
    for _, block in blocks:
        consider(block, minimum)
    if not blocks:
        walk(module, minimum)
    if every_part:
        walk(module, 1)
    return chosen
