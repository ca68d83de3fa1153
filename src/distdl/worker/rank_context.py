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
    """One rank of an attempt. A measured choice is added to `launch`, its launch.yaml."""

    attempt: Attempt
    launch: dict[str, Any]
    resources: Resources
    environment: Environment
    stop: StopRequest

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.attempt.path.parents[1])
