"""What `self.logger` is in a module whose run MLflow follows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.loggers.logger import DummyExperiment, Logger

from distdl.tracking.outbox import redact

if TYPE_CHECKING:
    from distdl.tracking.journal import Journal
    from distdl.tracking.mlflow import MLflowLogger

log = logging.getLogger(__name__)


class RunLogger(MLFlowLogger):
    """Lightning's by its type and its properties; it never waits for a server to log something.

    The journal hears its metrics. Parameters, and what `experiment` is given, go into the outbox.
    """

    def __init__(self, sender: MLflowLogger, journal: Journal) -> None:
        Logger.__init__(self)  # Lightning's own would open the store
        self.sender, self.journal, self._tracking_uri = sender, journal, sender.uri
        self.given: set[str | None] = {None}  # what a module may call our run by
        self._client: Any = None
        self._warned = False

    @property
    def experiment(self) -> Any:
        """An `MlflowClient` on rank 0; elsewhere it swallows every call, as Lightning's does."""
        if self.sender.info.rank:
            return DummyExperiment()
        if self._client is None:
            from distdl.tracking.run_client import RunClient

            self._client = RunClient(self)
        return self._client

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None on other ranks and where the server has never answered.

        `experiment` takes None for this run.
        """
        delivery = self.sender.delivery
        if self.sender.info.rank or delivery is None:
            return None
        self.sender.wait_until(lambda: delivery.run_id)
        found = delivery.run_id or delivery.outbox.state.run_id
        if not found and not self._warned:
            self._warned = True
            text = "MLflow at %s has not answered yet, and self.logger.run_id is None for now"
            log.warning(text, redact(self.sender.uri))
        self.given.add(found)
        return found

    _run_id = run_id

    @property
    def experiment_id(self) -> str | None:
        """MLflow's id of the experiment; None where `run_id` is."""
        return self.sender.delivery.experiment_id if self.run_id and self.sender.delivery else None

    @property
    def save_dir(self) -> str:
        """The run directory."""
        return str(self.sender.info.run_dir)

    log_dir = save_dir

    def log_hyperparams(self, params: Any, *_: Any, **kw: Any) -> None:
        """Parameters of the run, nested ones as `a/b`, cut at 500 characters."""
        if self.sender.delivery is not None and not self.sender.info.rank:
            flat = _flatten_dict(_convert_params(params))
            self.sender.delivery.outbox.owe("params", flat, longest=500)

    def _nothing(self, *args: Any, **kw: Any) -> None:
        """The journal has heard it; checkpoints stay in the run; `MLflowLogger` tells the end."""

    log_metrics = after_save_checkpoint = finalize = _nothing
