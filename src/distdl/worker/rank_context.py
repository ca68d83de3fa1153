"""The facts about one rank of an attempt, read once and then passed on."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from distdl.health.watchdog import Watchdog
from distdl.job import Resources
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import Attempt, RunDirectory


@dataclass(frozen=True)
class RankContext:
    """One rank of an attempt. `launch` is its launch.yaml, to which measured choices are added.
    `watchdog` is None if it is switched off. `started` is in seconds since 1970."""

    attempt: Attempt
    launch: dict[str, Any]
    resources: Resources
    environment: Environment
    stop: StopRequest
    watchdog: Watchdog | None = None
    started: float = field(default_factory=time.time)

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.attempt.path.parents[1])
