"""A module's `self.logger.experiment` with `tracking=mlflow`. Imports mlflow."""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import mlflow
from mlflow.entities import Metric, Param, RunTag
from mlflow.store.artifact.artifact_repo import verify_artifact_path
from mlflow.tracking import MlflowClient
from mlflow.utils.async_logging.run_operations import RunOperations

if TYPE_CHECKING:
    from PIL.Image import Image

    from distdl.tracking.run_logger import RunLogger

SERVER = "MLFLOW_TRACKING_URI"


class RunClient(MlflowClient):
    """MLflow's client, except that anything logged to our run (its id, or None) goes into the
    journal and the outbox. Queries, and calls for other runs, go to the server."""

    def __init__(self, owner: RunLogger) -> None:
        self._owner = owner
        self._tracking_client: Any = _Runs(owner, self._real)
        # As Lightning's logger does, for `mlflow.start_run(run_id=...)`. The environment is
        # restored, since another run of this process may have another server.
        before = os.environ.get(SERVER)
        mlflow.set_tracking_uri(owner.sender.uri)
        os.environ.pop(SERVER, None)
        os.environ.update({} if before is None else {SERVER: before})

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or not name.startswith("_"):
            return object.__getattribute__(self, name)  # raises
        return getattr(self._real(), name)  # the parts that do not concern runs

    def _real(self) -> MlflowClient:
        _ = self._owner.run_id  # waits for the sender, which creates a database under a lock
        return MlflowClient(self._owner.sender.uri)

    def log_artifact(
        self, run_id: str | None, local_path: str, artifact_path: str | None = None
    ) -> None:
        # mlflow's method would fail with None as the id.
        self._tracking_client.log_artifact(run_id, local_path, artifact_path)

    def _log_artifact_async_helper(
        self, run_id: str | None, artifact_file: str, artifact: Image
    ) -> None:
        with self._log_artifact_helper(run_id, artifact_file) as path:  # waits for no server
            artifact.save(path)


class _Runs:
    """Replaces the part of an `MlflowClient` that handles all calls for runs."""

    def __init__(self, owner: RunLogger, real: Callable[[], MlflowClient]) -> None:
        self._owner = owner
        self._real = real
        self._ours = _OurRun(owner)

    def __getattr__(self, name: str) -> object:
        if name in ("store", "tracking_uri"):
            return getattr(self._real()._tracking_client, name)

        def call(*args: object, **kw: object) -> object:
            delivery = self._owner.delivery
            if args and args[0] in delivery.names:
                if hasattr(self._ours, name):
                    getattr(self._ours, name)(*args[1:], **kw)
                    return RunOperations([])
                self._owner.journal.flush()
                self._owner.sender.wait_until(lambda: not delivery.is_behind())
                args = (self._owner.run_id, *args[1:])
            return getattr(self._real()._tracking_client, name)(*args, **kw)

        return call


class _OurRun:
    """mlflow's methods that log to a run, for our run."""

    def __init__(self, owner: RunLogger) -> None:
        self._put = owner.journal.put
        self._outbox = owner.delivery.outbox

    def log_batch(
        self,
        metrics: Sequence[Metric] = (),
        params: Sequence[Param] = (),
        tags: Sequence[RunTag] = (),
        **kw: object,
    ) -> None:
        for point in metrics:
            self._put({point.key: point.value}, point.step, point.timestamp / 1000)
        for kind, pairs in (("params", params), ("tags", tags)):
            if pairs:
                self._outbox.add(kind, {pair.key: pair.value for pair in pairs})

    def log_metric(
        self,
        key: str,
        value: float,
        timestamp: int | None,
        step: int | None,
        *args: object,
        **kw: object,
    ) -> None:
        self._put({key: value}, step or 0, time.time() if timestamp is None else timestamp / 1000)

    def log_param(self, key: str, value: object, **kw: object) -> None:
        self._outbox.add("params", {key: value})

    def set_tag(self, key: str, value: object, **kw: object) -> None:
        self._outbox.add("tags", {key: value})

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        name = os.path.basename(os.path.normpath(local_path))
        self.log_artifacts(local_path, posixpath.join(artifact_path or "", name))

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        verify_artifact_path(artifact_path)
        self._outbox.add_file(local_dir, artifact_path or "")
