"""A module's `self.logger` with `tracking=mlflow`."""

from __future__ import annotations

import functools
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import DummyExperiment, Logger

from distdl.tracking.outbox import redact
from distdl.util.names import kept_apart

if TYPE_CHECKING:
    from distdl.tracking.journal import Journal
    from distdl.tracking.mlflow import MLflowLogger
    from distdl.tracking.run_client import RunClient


class RunLogger(MLFlowLogger):
    """Has the type and properties of Lightning's logger, but logging never waits for a server:
    metrics go into the journal, parameters and calls of `experiment` into the outbox."""

    def __init__(self, sender: MLflowLogger, journal: Journal) -> None:
        Logger.__init__(self)  # Lightning's __init__ would open the store
        self.sender = sender
        self.journal = journal
        self._tracking_uri = sender.uri
        self.delivery: Any = None if sender.info.rank else sender.delivery

    @functools.cached_property
    def experiment(self) -> RunClient | DummyExperiment:
        """An `MlflowClient` on rank 0. On other ranks it ignores every call, like Lightning's."""
        if self.delivery is None:
            return DummyExperiment()
        from distdl.tracking.run_client import RunClient

        return RunClient(self)

    @property
    def _run_id(self) -> str | None:  # type: ignore[override]
        """MLflow's id of the run. None on other ranks, or if the server has not answered yet;
        `experiment` accepts None as the id."""
        if self.delivery is None:
            return None
        self.sender.wait_until(lambda: self.delivery.run_id)
        if self.delivery.names[-1] is None:
            text = "MLflow at %s has not answered yet: self.logger.run_id is None for now"
            self.journal.warn_once("run_id", text % redact(self.sender.uri))
        return self.delivery.names[-1]

    _experiment_id = property(lambda self: self._run_id and self.delivery.experiment_id)
    save_dir = log_dir = property(lambda self: str(self.sender.info.run_dir))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: object, **kw: object) -> None:
        """Sends the run's parameters, nested ones as `a/b`, cut at 500 characters. One that has the
        name of a setting of the run (`seed`), and another value, gets a name of its own."""
        if self.delivery is None:
            return
        flat = _flatten_dict(_convert_params(params))
        ours = self.sender.info.params
        differ = [k for k, v in flat.items() if k in ours and str(v) != str(ours[k])]
        for name in differ:
            other = kept_apart(name, f"{name}-hparam")
            text = f"the hyperparameter {name} is {other} in MLflow, as the config has {name} too"
            self.journal.warn_once(f"parameter {name}", text)
            flat[other] = flat.pop(name)
        self.delivery.outbox.add("params", flat, longest=500)

    def send_folder(self, folder: Path, to: str) -> None:
        """Sends copies of the files in a folder, to a folder of MLflow's run; waits for nobody."""
        if self.delivery is not None:
            self.delivery.outbox.add_file(folder, to)

    def _nothing(self, *args: object, **kw: object) -> None:
        """The journal has the metrics, the run the checkpoints; `MLflowLogger` sends the end."""

    log_metrics = after_save_checkpoint = finalize = _nothing
