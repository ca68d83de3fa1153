"""Which rank is which stage of which pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class Place:
    """One rank on the mesh of pipelines (replicas of the model) and their stages.

    Args:
        stage: Which part of the model this rank has; 0 takes the images.
        stages: Parts of the model, one per rank of a pipeline.
        replica: Which pipeline this rank belongs to; each takes its own share of the data.
        replicas: How many pipelines there are.
        across: "devices": the stages of a pipeline are neighbouring ranks. "nodes": they are as far
            apart as they can be, so that the copies of a stage share a node.
    """

    stage: int
    stages: int
    replica: int
    replicas: int
    across: str = "devices"

    @classmethod
    def of(cls, rank: int, world_size: int, stages: int, across: str = "devices") -> Place:
        assert world_size % stages == 0
        replicas = world_size // stages
        if across == "nodes":
            return cls(rank // replicas, stages, rank % replicas, replicas, across)
        return cls(rank % stages, stages, rank // stages, replicas, across)

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def groups(self, device_type: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The ranks of this pipeline, in order of their stages, and the copies of this stage.

        All ranks must call it.
        """
        names: tuple[str, str] = ("replica", "stage")
        shape = (self.replicas, self.stages)
        if self.across == "nodes":
            names, shape = names[::-1], shape[::-1]
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
        return mesh["stage"].get_group(), mesh["replica"].get_group()
