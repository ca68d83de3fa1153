"""Tracking: each run has a journal; MLflow and Lightning's loggers are optional."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

# No heavy imports here: the report and `track sync` import this module and must start fast.
if TYPE_CHECKING:
    from lightning.pytorch.loggers.logger import Logger

    from distdl.tracking.journal import Journal
    from distdl.tracking.system import SystemMetrics

from distdl.tracking import services
from distdl.tracking.outbox import STUDY as STUDY
from distdl.tracking.outbox import STUDY_KEY as STUDY_KEY
from distdl.tracking.outbox import redacted

log = logging.getLogger(__name__)

SYSTEM_METRICS_INTERVAL = 15.0  # seconds


@dataclass(frozen=True)
class RunInfo:
    """What tracking knows about the run, on every rank."""

    run_dir: Path
    run_id: str  # `<experiment>/<name>`, the same in every attempt
    attempt: int  # which start of the run this is, from 1
    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    output_dir: Path  # the folder of all runs, with the project's database
    experiment_name: str
    name: str = ""  # for display: the values that a sweep varies, or the run's name
    key: str = ""  # 32 letters, unique to this run, the same in every attempt
    # The most important come first: a server may limit their number. Values may have any length.
    params: Mapping[str, Any] = field(default_factory=dict)
    # This attempt's changes to the frozen recipe.
    changed: Mapping[str, Any] = field(default_factory=dict)
    artifacts: list[Path] = field(default_factory=list)  # files that describe the run
    tags: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Tracking:
    """What `start_tracking` started."""

    loggers: list[Logger]  # as many on every rank; the journal is the last
    journal: Journal
    components: dict[str, Any] = field(default_factory=dict)  # `MLflowLogger`s by config key
    sampler: SystemMetrics | None = None  # if this process samples its node
    services: dict[str, Logger] = field(default_factory=dict)  # by config key; only on rank 0

    def describe(self, params: Mapping[str, Any]) -> None:
        """Adds parameters to the run. Called on rank 0."""
        for component in self.components.values():
            component.describe(params)
        for key, logger in self.services.items():
            services.describe(key, logger, params)

    def settle(self) -> None:
        """Waits until components have done their imports, which would delay a step."""
        for component in self.components.values():
            component.settle()

    def finish(self, status: str) -> None:
        """Writes and sends what is left, for only a few seconds if `status` is PREEMPTED or
        CANCELLED (and not SUCCEEDED or FAILED). Never raises; may be called again."""
        if self.sampler is not None:
            self.sampler.stop()
        self.journal.close()
        for key, component in self.components.items():
            try:
                component.finish(status)
            except Exception as error:  # a service's; the run has ended
                log.warning("tracking.%s could not finish: %s", key, error)
        for key, logger in self.services.items():
            services.end(key, logger, status)

    def how_to_open(self) -> list[str]:
        """The commands and addresses that show the run, printed at its end."""
        lines = [line for component in self.components.values() for line in component.how_to_open()]
        for logger in self.loggers:
            if type(logger).__name__ == "TensorBoardLogger" and logger.save_dir:
                lines.append(f"tensorboard --logdir {os.path.relpath(logger.save_dir)}")
        for key, logger in self.services.items():
            with contextlib.suppress(Exception):  # the address is optional
                lines.append(services.how_to_open(logger, self.journal.run_dir / "logs" / key))
        return lines


def start_tracking(info: RunInfo, components: Mapping[str, Any]) -> Tracking:
    """Starts the journal, the system metrics and every component, on every rank.

    Args:
        components: Built from the `tracking` section of the config: our `MLflowLogger`, Lightning
            loggers, or partials of them, which are called with `save_dir` (`RUN/logs/<key>`).

    Raises:
        UserError: A service, such as W&B, cannot be started.
    """
    from lightning.pytorch.loggers.logger import Logger

    from distdl.runs.records import journal_path
    from distdl.tracking.journal import Journal
    from distdl.tracking.system import SystemMetrics

    path = journal_path(info.run_dir, info.node_rank) if info.local_rank == 0 else None
    journal = Journal(path, info.run_dir, info.attempt, training=info.rank == 0)
    tracking = Tracking([], journal)
    interval = SYSTEM_METRICS_INTERVAL
    for key, component in components.items():
        if isinstance(component, functools.partial):
            component = services.for_run(component, info, key)
        if not isinstance(component, Logger):
            component.start(info)
            tracking.components[key] = component
            interval = component.system_metrics_interval
            component = component.lightning_logger(journal)
        tracking.loggers.append(journal.record_from(component))
        if info.rank == 0 and type(component).__name__ in services.SERVICES:
            services.describe(key, component, redacted(info.params))
            tracking.services[key] = component
    tracking.loggers.append(journal)
    if path is not None and interval > 0:
        with contextlib.suppress(OSError):
            info.run_dir.mkdir(parents=True, exist_ok=True)
        tracking.sampler = SystemMetrics(journal, interval, info.node_rank, info.run_dir)
        tracking.sampler.start()
    return tracking
