"""What one rank of an attempt knows; read and resolved once, and handed on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distdl.job import Resources
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import Attempt, RunDirectory


@dataclass(frozen=True)
class RankContext:
    """
    Args:
        attempt: Where its files are.
        launch: What its launch.yaml holds; a measured choice is added to it.
        resources: How many ranks there are, on what.
        environment: Which of them this one is.
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
