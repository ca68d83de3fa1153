"""What `self.logger.experiment` is in a module whose run MLflow follows. Imports mlflow."""

from __future__ import annotations

import functools
import logging
import os
import posixpath
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.store.artifact.artifact_repo import verify_artifact_path
from mlflow.tracking import MlflowClient
from mlflow.utils.async_logging.run_operations import RunOperations

if TYPE_CHECKING:
    from distdl.tracking.run_logger import RunLogger

log = logging.getLogger(__name__)

SERVER = "MLFLOW_TRACKING_URI"
RunId = Any  # a str, or None for our run


class RunClient(MlflowClient):
    """mlflow's, but what is logged to our run (its id, or None) goes into the journal and outbox.

    `log_text`, `log_dict`, `log_figure`, `log_image` and `log_stream` all end in `log_artifact`,
    which copies the file into the run. What asks the server is mlflow's own, as are other runs.
    """

    def __init__(self, owner: RunLogger) -> None:
        self._owner, self._outbox = owner, owner.sender.delivery.outbox  # type: ignore[union-attr]
        # Lightning's logger does so, for `mlflow.start_run(run_id=...)`. But a process may have
        # another run, with a server of its own: the environment stays.
        before = os.environ.get(SERVER)
        mlflow.set_tracking_uri(owner.sender.uri)
        os.environ.pop(SERVER, None)
        os.environ.update({} if before is None else {SERVER: before})

    def __getattr__(self, name: str) -> Any:
        # mlflow's own parts, late: the sender makes a database's tables, under a lock.
        if name.startswith("__") or "_tracking_client" in self.__dict__:
            raise AttributeError(name)
        _ = self._owner.run_id
        super().__init__(tracking_uri=self._owner.sender.uri)
        return getattr(self, name)

    def _is_ours(self, run_id: RunId) -> bool:
        return run_id in self._owner.given or run_id == self._owner.run_id

    def log_batch(
        self,
        run_id: RunId,
        metrics: Any = (),
        params: Any = (),
        tags: Any = (),
        synchronous: Any = None,
    ) -> Any:
        if not self._is_ours(run_id):
            return super().log_batch(run_id, metrics, params, tags, synchronous)
        for point in metrics:
            self._owner.journal.put({point.key: point.value}, point.step, point.timestamp / 1000)
        for kind, pairs in (("params", params), ("tags", tags)):
            if pairs:
                self._outbox.owe(kind, {pair.key: pair.value for pair in pairs})
        return RunOperations([]) if synchronous is False else None

    def log_metric(  # type: ignore[override]
        self,
        run_id: RunId,
        key: str,
        value: Any,
        timestamp: Any = None,
        step: Any = None,
        synchronous: Any = None,
        **of_model: Any,
    ) -> Any:
        at = round(time.time() * 1000) if timestamp is None else timestamp
        point = Metric(key, value, at, step or 0, **of_model)
        return self.log_batch(run_id, [point], synchronous=synchronous)

    def log_param(self, run_id: RunId, key: str, value: Any, synchronous: Any = None) -> Any:
        return self.log_batch(run_id, params=[Param(key, value)], synchronous=synchronous) or value

    def set_tag(self, run_id: RunId, key: str, value: Any, synchronous: Any = None) -> Any:
        return self.log_batch(run_id, tags=[RunTag(key, str(value))], synchronous=synchronous)

    def log_image(self, run_id: RunId, *args: Any, **kw: Any) -> None:
        # Ours waits for no server, so that "asynchronous" has no use.
        super().log_image(
            run_id, *args, **kw | ({"synchronous": True} if self._is_ours(run_id) else {})
        )

    def log_artifact(self, run_id: RunId, local_path: Any, artifact_path: Any = None) -> None:
        if not self._is_ours(run_id):
            super().log_artifact(run_id, local_path, artifact_path)
        elif os.path.isdir(local_path):
            name = os.path.basename(os.path.normpath(local_path))
            self.log_artifacts(run_id, local_path, posixpath.join(artifact_path or "", name))
        else:
            self._keep(local_path, artifact_path or "")

    def log_artifacts(self, run_id: RunId, local_dir: Any, artifact_path: Any = None) -> None:
        if not self._is_ours(run_id):
            return super().log_artifacts(run_id, local_dir, artifact_path)
        for folder, _, names in os.walk(local_dir):
            inner = os.path.relpath(folder, local_dir)
            there = [part for part in (artifact_path, inner) if part and part != "."]
            for name in names:
                self._keep(os.path.join(folder, name), "/".join(there))

    def _keep(self, file: Any, folder: str) -> None:
        verify_artifact_path(folder)
        os.stat(file)  # what is not there is the module's error, a full disk is not
        try:
            self._outbox.keep(file, folder)
        except OSError as error:
            log.warning("%s is not kept for MLflow: %s", file, error)


def _of_the_server(name: str) -> Callable[..., Any]:
    """A method of mlflow's that reads our run, or adds to what it reads: after what is owed."""
    real = getattr(MlflowClient, name)

    @functools.wraps(real)
    def method(self: RunClient, run_id: RunId = None, *args: Any, **kw: Any) -> Any:
        if self._is_ours(run_id):
            self._owner.sender.wait_until(self._outbox.is_empty)
            run_id = self._owner.run_id
        return real(self, run_id, *args, **kw)

    return method


for _name in ("get_run", "list_artifacts", "download_artifacts", "get_metric_history", "log_table"):
    setattr(RunClient, _name, _of_the_server(_name))
