"""Tracking services: the arguments of each logger, and how its run is ended."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distdl.util.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger

    from distdl.tracking import RunInfo

Result = TypeVar("Result")
log = logging.getLogger(__name__)

# Seconds to wait until everything is sent, by the run's state. A scheduler's grace period is short,
# and torch's agent kills a failed rank 30 s after the first one ended.
PATIENCE = {"PREEMPTED": 5.0, "CANCELLED": 5.0, "FAILED": 15.0}


# By the logger's class: its arguments for the run's folder, key and name (the config takes
# precedence), and the method of its `experiment` that sends what is left. (Some loggers send it in
# Python's exit hooks, which a worker does not run.) As the key is the id in the service, a resumed
# run continues the same curves.
SERVICES = {
    "WandbLogger": (("save_dir", "id", "name"), "finish"),
    "CometLogger": (("offline_directory", "experiment_key", "name"), "end"),
    "ClearMLLogger": (("save_dir", "", "task_name"), "close"),
}


def for_run(partial: functools.partial[Any], info: RunInfo, key: str) -> Logger:
    """Builds a logger for the run. Raises a UserError if that fails."""
    folder = info.run_dir / "logs" / key
    names, _ = SERVICES.get(getattr(partial.func, "__name__", ""), ((), ""))
    if not names:
        return partial(save_dir=str(folder))
    configured = {"", *(k for k, v in partial.keywords.items() if v is not None)}
    defaults = dict(zip(names, (str(folder), info.key, info.name), strict=True))
    if info.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)  # else W&B would write to another folder
    more = {k: v for k, v in defaults.items() if k not in configured}
    return _started(key, lambda: partial(**more))


def describe(key: str, logger: Logger, params: Mapping[str, Any]) -> None:
    """Opens the service and sends the parameters. Raises a UserError if that fails."""
    _started(key, lambda: logger.log_hyperparams(dict(params)))


def _started(key: str, start: Callable[[], Result]) -> Result:
    try:
        return start()
    except Exception as error:  # each service has errors of its own
        reason = next(iter(str(error).strip().splitlines()), "")
        raise UserError.at(
            f"tracking.{key}",
            what=f"cannot start: {type(error).__name__}: {reason}",
            remedy="log in, use its offline mode (docs/tracking.md), or choose tracking=mlflow",
            code="failed",
        ) from error


def end(key: str, logger: Logger, status: str) -> None:
    """Sends what is left, for at most PATIENCE seconds. Never raises."""
    _, method = SERVICES[type(logger).__name__]
    service: Any = logger  # with an `experiment` of its own kind

    def close() -> None:
        try:
            arguments = {"exit_code": 1} if method == "finish" and status == "FAILED" else {}
            getattr(service.experiment, method)(**arguments)
        except Exception as error:  # each service has errors of its own
            log.warning("tracking.%s could not finish: %s", key, error)

    thread = threading.Thread(target=close, name=f"end-{key}", daemon=True)
    thread.start()
    thread.join(PATIENCE.get(status, 60.0))
    if thread.is_alive():
        log.warning("tracking.%s has not sent everything: the rest stays in the run", key)


def how_to_open(logger: Logger, folder: Path) -> str:
    """The address of the run's page, or the command that uploads what was written offline."""
    name = type(logger).__name__
    service: Any = logger  # with an `experiment` of its own kind
    experiment = service.experiment
    if name == "WandbLogger":
        command = f"wandb sync {os.path.relpath(folder)}/wandb/offline-run-*"
        return command if experiment.offline else str(experiment.url)
    if name == "CometLogger":
        offline = type(experiment).__name__.endswith("OfflineExperiment")
        return f"comet upload {os.path.relpath(folder)}/*.zip" if offline else str(experiment.url)
    if service.offline:
        session = Path(experiment.get_offline_mode_folder())
        return f"clearml-task --import-offline-session {os.path.relpath(session)}.zip"
    return str(experiment.get_output_log_web_page())
