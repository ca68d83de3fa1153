"""Tools that a worker calls if its config asks for them: by name, since it trains without them too.

Nothing outside of `distdl.tools` imports from there. What the core needs of a tool is stated here.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch.distributed as dist
from omegaconf import DictConfig

from distdl.config import task_facts
from distdl.ranks.environment import Environment
from distdl.runs.directory import RunDirectory
from distdl.util.errors import UserError
from distdl.worker.rank_context import RankContext

EXAMINER, EXPORT = "distdl.tools.doctor.examiner", "distdl.tools.serving.export"
PLANNER = "distdl.tools.measure.largest_batch"
RECOMPUTE = "distdl.tools.measure.recompute_choice"


class Examiner(Protocol):
    """Looks at the machines of a job before it trains (`preflight=true`, `distdl doctor`)."""

    def rendezvous(self, environment: Environment, attempt: int) -> dist.Store:
        """The store by which the ranks find each other, once all hosts have reached each other."""

    def record_transport(self, context: RankContext) -> None:
        """Called before the process group is made: lets NCCL write what it uses."""

    def examine(
        self, config: DictConfig, context: RankContext, expect: float | None
    ) -> dict[str, float]:
        """Measures and judges; raises a UserError if the job should not train."""


class Exporter(Protocol):
    def export(self, config: DictConfig, run: RunDirectory, checkpoint: Path, format: str) -> None:
        """Writes the model of a checkpoint in a form that answers without distdl."""


class LargestBatch(Protocol):
    """A batch of a device, and the numbers that say so."""

    batch: int
    reason: str


class Planner(Protocol):
    def largest_batch(self, config: DictConfig, devices: int, memory: float) -> LargestBatch:
        """The largest batch of a device whose step takes no more than `memory` bytes, by a
        measurement without memory (`distdl plan`); raises a UserError if not one sample fits."""


class RecomputeChoice(Protocol):
    """A value of `model.recompute`, and the numbers that say so."""

    value: str
    reason: str


class RecomputePlanner(Protocol):
    def recompute_for(
        self, config: DictConfig, global_batch: int, devices: int, memory: float
    ) -> RecomputeChoice:
        """none if a step fits `memory` bytes of a device, else blocks, by a measurement without
        memory (`distdl plan`); raises a UserError if it fits with neither."""


def examiner(config: DictConfig) -> Examiner | None:
    """What examines this job at its start; None: nothing."""
    if config.get("preflight") or task_facts.of(config).examines:
        tool: Any = _tool("preflight", EXAMINER)
        return tool
    return None


def exporter() -> Exporter:
    tool: Any = _tool("tracking.mlflow.register", EXPORT)
    return tool


def planner() -> Planner:
    tool: Any = _tool("data.batch_size", PLANNER)
    return tool


def recompute_planner() -> RecomputePlanner:
    tool: Any = _tool("model.recompute", RECOMPUTE)
    return tool


def _tool(key: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(str(error.name)):  # a package that the tool needs
            raise
        raise UserError.at(
            key,
            what=f"needs {name}, which is not in this installation of distdl",
            remedy=f"install distdl whole, or leave out {key}",
            code="not-installed",
        ) from error
