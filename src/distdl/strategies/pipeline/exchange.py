"""What Lightning asks of a strategy whose ranks are stages: shares, collectives, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch.optim import Optimizer

from distdl import cluster
from distdl.errors import UserError
from distdl.portable import index_state, name_state, names_of
from distdl.strategies.pipeline import checks, state
from distdl.strategies.pipeline.loading import FirstStageLoader, to_device
from distdl.strategies.pipeline.place import Place


class StagedStrategy(DDPStrategy):
    """The side of PipelineStrategy that needs no schedule.

    The stages of a pipeline take the same data and hold the same metrics, but not the same weights.
    """

    given: dict[str, Any]  # the settings, as distdl.strategies.pipeline.checks takes them
    place: Place
    pipeline: dist.ProcessGroup  # the stages of this rank's pipeline
    replicas: dist.ProcessGroup  # the copies of this rank's stage
    names: list[str]  # of the whole module's state, in its order
    optimizer_names: list[list[list[str]]]  # of the parameters by optimizer and group

    # ------------------------------------------------------------------- who takes which data

    def data_share(self, rank: int, world_size: int) -> tuple[int, int]:
        """(this rank's number, how many) among those that take different data."""
        place = self.placed(rank, world_size)
        return place.replica, place.replicas

    def placed(self, rank: int, world_size: int) -> Place:
        """Where a rank stands.

        Raises:
            UserError: The settings do not fit the world size.
        """
        problems = list(checks.problems(self.given, world_size))
        if problems:
            raise UserError(*map(checks.at_strategy, problems))
        stages = checks.stages_of(self.given, world_size)
        return Place.of(rank, world_size, stages, self.given["across"])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        rank, world_size = self.data_share(self.global_rank, self.world_size)
        return {"num_replicas": world_size, "rank": rank}

    @property
    def takes_inputs(self) -> bool:
        """Whether the images are needed here; elsewhere they are on `meta`."""
        return self.place.first

    def process_dataloader(self, dataloader: object) -> object:
        key = getattr(self.lightning_module, "pipeline_key", None)
        return FirstStageLoader(dataloader, self.place, self.pipeline, key)

    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if self.place.first or self.lightning_module is None:
            return super().batch_to_device(batch, device, dataloader_idx)
        device = device or self.root_device
        return to_device(self.lightning_module, batch, device, dataloader_idx)

    # ------------------------------------------------------------------ collective operations

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over the replicas: all stages of a pipeline hold the same value."""
        return super().reduce(tensor, group or self.replicas, reduce_op)

    def all_gather(
        self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False
    ) -> torch.Tensor:
        return super().all_gather(tensor, group or self.replicas, sync_grads)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # This one is asked of every rank.
        votes = cluster.gather(bool(decision))
        return min(votes) if all else max(votes)

    def on_validation_start(self) -> None:
        self._agree_on_buffers()

    def on_test_start(self) -> None:
        self._agree_on_buffers()

    def on_predict_start(self) -> None:
        self._agree_on_buffers()

    def _agree_on_buffers(self) -> None:
        """Running statistics of batch norm: those of the first replica, as under DDP."""
        assert self.lightning_module is not None
        for buffer in self.lightning_module.buffers():
            dist.broadcast(buffer.data, group=self.replicas, group_src=0)

    # --------------------------------------------------------------------------- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole module's, on rank 0; all ranks must call it."""
        assert self.lightning_module is not None
        return self._whole(self.lightning_module.state_dict())

    def _whole(self, part: Mapping[str, Any]) -> dict[str, Any]:
        return state.ordered(state.merged(part, self.place, self.pipeline), self.names)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        # A callback that averages weights puts its own copy, of this stage alone, there.
        weights = checkpoint.get("state_dict", {})
        if cluster.tell_all(bool(weights) and not set(self.names) <= set(weights)):
            checkpoint["state_dict"] = self._whole(weights)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """By name, of the whole model, on rank 0; all ranks must call it."""
        assert self.lightning_module is not None
        inner = getattr(optimizer, "_optimizer", optimizer)  # Lightning wraps it
        own = name_state(inner.state_dict(), names_of(inner, self.lightning_module))
        names = self.optimizer_names[self._number(inner)]
        return state.named_state(own, names, self.place, self.pipeline)

    def _number(self, optimizer: Optimizer) -> int:
        return next(i for i, own in enumerate(self.optimizers) if own is optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.lightning_module is not None
        states = [
            index_state(name_state(given, names), names_of(optimizer, self.lightning_module))
            for given, names, optimizer in zip(
                checkpoint["optimizer_states"], self.optimizer_names, self.optimizers, strict=True
            )
        ]
        Strategy.load_optimizer_state_dict(self, {**checkpoint, "optimizer_states": states})
