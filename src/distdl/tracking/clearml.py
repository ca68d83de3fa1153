"""A logger for ClearML, which Lightning lacks: a run's metrics and parameters as one task."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.logger import _convert_params
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only

from distdl.util.names import kept_apart

if TYPE_CHECKING:
    from clearml import Task

# What `Task.init` would record or patch by default. `detect_repository` would take minutes and send
# the complete git diff.
CAPTURED = (
    "detect_repository matplotlib tensorflow tensorboard pytorch xgboost scikit fastai lightgbm "
    "hydra tfdefines joblib megengine catboost gradio jsonargparse"
)


def curve_of(name: str) -> tuple[str, str]:
    """The plot and the curve in it: `val/loss` is the curve `loss` of the plot `val`, and `loss`
    that of `loss`. `loss/loss`, `/loss` and `loss/` become curves of their own."""
    if "/" not in name:
        return name, name
    title, _, series = name.rpartition("/")
    if title and series and title != series:
        return title, series
    return title or series or "_", kept_apart(name, series or "_")


class ClearMLLogger(Logger):
    """One ClearML task per run, opened on rank 0 when something is first logged.

    ClearML chooses the task's id. It is kept in `save_dir/task_id`, so that the next attempt
    continues the task. `experiment` is the `clearml.Task`. Output, code and figures are
    captured only if an argument of `Task.init` asks for it.

    Args:
        save_dir: A folder in the run.
        offline: Write into `save_dir` and send nothing. $CLEARML_OFFLINE_MODE=1 does the same.
    """

    def __init__(
        self,
        save_dir: str | Path,
        project_name: str = "distdl",
        task_name: str | None = None,
        offline: bool = False,
        **init: object,
    ) -> None:
        super().__init__()
        self._save_dir = str(save_dir)
        self._project = project_name
        self._name = task_name
        self._init = init
        self.offline = offline or os.environ.get("CLEARML_OFFLINE_MODE") in ("1", "true")
        self._task: Any = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Task:
        if self._task is not None:
            return self._task
        if self.offline:
            os.environ.setdefault("CLEARML_CACHE_DIR", self._save_dir)
        from clearml import Task

        if self.offline:
            Task.set_offline(True)
        file = Path(self._save_dir) / "task_id"
        previous = file.read_text().strip() if file.is_file() else ""
        if previous.startswith("offline-") != self.offline:
            previous = ""  # an offline session is not a task of the server
        implicit = ("auto_connect_arg_parser", "auto_connect_streams", "auto_resource_monitoring")
        quiet: dict[str, Any] = dict.fromkeys(implicit, False)
        quiet["auto_connect_frameworks"] = dict.fromkeys(CAPTURED.split(), False)
        self._task = Task.init(
            self._project,
            self._name,
            reuse_last_task_id=previous or False,
            continue_last_task=0 if previous else False,  # 0: our steps already continue
            **{**quiet, **self._init},
        )
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{self._task.id}\n")
        return self._task

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        report = self.experiment.get_logger().report_scalar
        for name, value in metrics.items():
            report(*curve_of(name), float(value), iteration=step or 0)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: object, **__: object) -> None:
        values = {f"run/{key}": str(value) for key, value in _convert_params(params).items()}
        self.experiment.update_parameters(values)

    save_dir = property(lambda self: self._save_dir)
    name = property(lambda self: self._project)

    @property
    def version(self) -> str | None:
        """The task's id; None until the task is opened."""
        return self._task.id if self._task is not None else None
