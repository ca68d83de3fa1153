"""Data shares, collectives and checkpoints of a strategy whose ranks are pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.utilities import move_data_to_device
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from distdl.checkpoint.portable import index_state, name_state, names_of
from distdl.config.degrees import PIPELINE, at_strategy
from distdl.distributed import process_group
from distdl.strategies.pipeline import stage_rules
from distdl.strategies.pipeline.first_stage_loader import FirstStageLoader
from distdl.strategies.pipeline.stage_rules import StagePosition
from distdl.strategies.sharing import Replicated, agree_on_buffers
from distdl.util.errors import UserError


class StagedStrategy(Replicated, DDPStrategy):
    """The parts of PipelineStrategy that do not depend on a schedule.

    The stages of a pipeline have the same data and metrics, but different weights.
    """

    lightning_module: Any  # set before Lightning calls any of these methods
    settings: dict[str, Any]  # stages, schedule, ..., as in stage_rules.problems
    schedule: str
    balance: str | list[str]
    kept_split: object
    micro_batches: int
    pieces_per_stage: int
    position: StagePosition
    pipeline: dist.ProcessGroup  # the stages of this rank's pipeline
    names: list[str]  # the keys of the complete module's state, in order
    optimizer_names: list[list[list[str]]]  # parameter names by optimizer and group

    def data_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """This rank's share of the data, and the number of shares."""
        position = self.position_of(rank, world_size)
        return position.replica, position.replicas

    def position_of(self, rank: int, world_size: int) -> StagePosition:
        """The stage and the pipeline of a rank.

        Raises:
            UserError: The settings do not fit the world size.
        """
        PIPELINE.refuse(self.settings, world_size)
        if problems := list(stage_rules.problems(self.settings, world_size)):
            raise UserError(*map(at_strategy, problems))
        stages = self.settings["stages"] or world_size
        return StagePosition.of_rank(rank, world_size, stages, self.settings["across"])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        rank, world_size = self.data_share(self.global_rank, self.world_size)
        return {"num_replicas": world_size, "rank": rank}

    @property
    def takes_inputs(self) -> bool:
        """Whether this rank needs the inputs; on other ranks they are on `meta`."""
        return self.position.first

    def process_dataloader(self, dataloader: object) -> object:
        key = getattr(self.lightning_module, "pipeline_key", None)
        return FirstStageLoader(dataloader, self.position, self.pipeline, key)

    def batch_to_device(
        self, batch: object, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> object:
        """Like Lightning's, with its three hooks, but tensors on `meta` stay there."""
        module = self.lightning_module
        if self.position.first or module is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        target = device or self.root_device

        def move(value: object) -> object:
            on_meta = isinstance(value, torch.Tensor) and value.is_meta
            return value if on_meta else move_data_to_device(value, target)

        batch = module._call_batch_hook("on_before_batch_transfer", batch, dataloader_idx)
        batch = tree_map(move, batch)
        return module._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)

    def on_validation_start(self) -> None:
        agree_on_buffers(self.lightning_module, self.replicas)

    on_test_start = on_predict_start = on_validation_start

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state of the complete module, on rank 0. Collective."""
        return self._merged(self.lightning_module.state_dict(), self.names)

    def _merged(self, part: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """All stages' values, on the first stage of the first pipeline; else empty. Collective.

        The values are in the order of `names`. If several stages have a name, the first one's
        value is used.
        """
        if self.position.replica > 0:  # the replicas hold the same values
            return {}
        parts: list[Any] | None = [None] * self.position.stages if self.position.first else None
        on_host = move_data_to_device(dict(part), torch.device("cpu"))
        dist.gather_object(on_host, parts, group=self.pipeline, group_dst=0)
        merged = {name: value for each in reversed(parts or []) for name, value in each.items()}
        return {**{name: merged[name] for name in names if name in merged}, **merged}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: object = None
    ) -> None:
        # A callback that averages weights has put its copy there, which holds only this stage.
        weights = checkpoint.get("state_dict", {})
        if process_group.broadcast(bool(weights) and not set(self.names) <= set(weights)):
            checkpoint["state_dict"] = self._merged(weights, self.names)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state by name, for the complete model, on rank 0. Collective."""
        inner = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps it
        state = name_state(inner.state_dict(), names_of(inner, self.lightning_module))
        number = next(i for i, each in enumerate(self.optimizers) if each is inner)
        names = self.optimizer_names[number]
        values = self._merged(state["state"], [name for group in names for name in group])
        pairs = zip(state["param_groups"], names, strict=True)
        groups = [{**group, "params": list(complete)} for group, complete in pairs]
        return {**state, "state": values, "param_groups": groups}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            index_state(name_state(state, names), names_of(optimizer, self.lightning_module))
            for state, names, optimizer in zip(
                checkpoint["optimizer_states"], self.optimizer_names, self.optimizers, strict=True
            )
        ]
        Strategy.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": states})
