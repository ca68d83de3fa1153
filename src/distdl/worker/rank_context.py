"""What one rank of an attempt knows, read and resolved once, then passed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distdl.job import Resources
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import Attempt, RunDirectory


@dataclass(frozen=True)
class RankContext:
    """One rank of an attempt.

    Args:
        attempt: Has the paths of its files.
        launch: The contents of its launch.yaml; a measured choice is added to it.
        resources: The number of ranks, nodes and devices, and the accelerator.
        environment: Which of the ranks this one is.
        stop: Whether this process was asked to end.
    """

    attempt: Attempt
    launch: dict[str, Any]
    resources: Resources
    environment: Environment
    stop: StopRequest

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.attempt.path.parents[1])
