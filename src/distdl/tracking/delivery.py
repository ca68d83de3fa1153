"""One pass of sending a run to MLflow: the same code behind a live run and `track sync`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distdl.tracking.client import import_client, metric_name, refusal
from distdl.tracking.outbox import Cursor, Outbox, database_path, is_local
from distdl.tracking.records import journals, read

log = logging.getLogger(__name__)

BATCH = {"metrics": 1000, "params": 100, "tags": 100}  # MLflow's own limits per request


class Delivery:
    """Sends what an outbox and the journals hold. Every method raises what the server raises.

    Args:
        outbox: The run's state; its file is written after each thing that arrived.
        uri: The tracking URI with its password, if it has one.
        node_rank: Node 0 makes the MLflow run and sends the outbox; the others only find it.
    """

    def __init__(self, outbox: Outbox, uri: str, node_rank: int = 0) -> None:
        self.outbox, self.uri, self.node_rank = outbox, uri, node_rank
        self.client: Any = None
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self.delivered = 0  # points
        self.refused: set[str] = set()  # names

    def connect(self) -> bool:
        """Find the MLflow run, or make it (node 0). False where it is not there yet."""
        if self.run_id is not None:
            return True
        if not is_local(self.uri):
            return self._connect()
        # Two runs that start together must not both create the tables: mlflow's migrations race.
        from filelock import FileLock

        database = database_path(self.uri)
        if self.node_rank and not database.is_file():
            return False
        database.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(database.with_name(database.name + ".lock"), timeout=120):
            return self._connect()

    def _connect(self) -> bool:
        self.client = import_client()(tracking_uri=self.uri)
        if self.node_rank:
            self.outbox.load()
        state = self.outbox.state
        run_id = state.run_id if state.run_id and self._is_active(state.run_id) else None
        run_id = run_id or self._search() or (None if self.node_rank else self._create())
        if run_id is None:
            return False
        self.run_id = run_id
        if self.node_rank == 0:
            with self.outbox.lock:
                if state.run_id != run_id:
                    state.run_id, state.job_run = run_id, False
                    self.outbox.save()
        return True

    def _is_active(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            info = self.client.get_run(run_id).info
            self.experiment_id = info.experiment_id
            return bool(info.lifecycle_stage == "active")
        except MlflowException as error:
            # An id that this kind of server cannot even read counts as one it does not have.
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" or refusal(error):
                return False
            raise

    def _experiment(self) -> str | None:
        state = self.outbox.state
        found = self.client.get_experiment_by_name(state.experiment)
        if found is not None or self.node_rank:
            return found and str(found.experiment_id)
        try:
            location = state.artifact_location
            return str(self.client.create_experiment(state.experiment, artifact_location=location))
        except Exception:  # another run may have made it in this moment
            found = self.client.get_experiment_by_name(state.experiment)
            if found is None:
                raise
            return str(found.experiment_id)

    def _search(self) -> str | None:
        """The run by our tags: its id may have been lost with the server's answer or our file."""
        experiment = self.experiment_id = self._experiment()
        if experiment is None:
            return None
        tag, value = "distdl.run_key", self.outbox.state.key
        if self.node_rank or self.outbox.lost:
            tag, value = "distdl.run_id", self.outbox.state.distdl_run
        query = f"tags.`{tag}` = '{value}'"
        order = ["attributes.start_time DESC"]
        found = self.client.search_runs([experiment], query, max_results=1, order_by=order)
        return str(found[0].info.run_id) if found else None

    def _create(self) -> str:
        state = self.outbox.state
        tags = {"distdl.run_id": state.distdl_run, "distdl.run_key": state.key}
        made = self.client.create_run(
            self._experiment(),
            start_time=int(state.start_time * 1000),
            tags=tags,
            run_name=state.distdl_run.rsplit("/", 1)[-1],
        )
        return str(made.info.run_id)

    def send_outbox(self) -> None:
        """Parameters and tags, and the status where the run goes on."""
        from mlflow.entities import Param, RunTag

        outbox = self.outbox
        with outbox.lock:
            params, tags = dict(outbox.state.params), dict(outbox.state.tags)
        if params:
            # MLflow refuses a parameter that changes; changes are told by a tag of the attempt.
            known = self.client.get_run(self.run_id).data.params
            named = {metric_name(k): v for k, v in params.items()}
            self._send("params", [Param(k, v) for k, v in named.items() if k not in known])
            outbox.sent("params", params)
        if tags:
            self._send("tags", [RunTag(metric_name(k), v) for k, v in tags.items()])
            outbox.sent("tags", tags)
        if outbox.state.status == "RUNNING":
            self._send_status("RUNNING")

    def send_artifacts(self) -> None:
        """What is owed now. One that fails is the last of the next pass: it holds up no other."""
        from mlflow.utils.validation import path_not_unique

        outbox = self.outbox
        for item in list(outbox.state.artifacts):
            name, folder = item
            path, run = outbox.run_dir / name, outbox.run_dir.resolve()
            out = (folder and path_not_unique(folder)) or not path.resolve().is_relative_to(run)
            if out:  # `track sync` of somebody else's run
                log.warning("the artifact %r is not in the run, and is not sent", name)
            elif path.is_file():
                try:
                    self.client.log_artifact(self.run_id, str(path), folder or None)
                except Exception as error:
                    if not refusal(error):
                        outbox.put_last(item)
                        raise
                    log.warning("MLflow refuses the artifact %s: %s", name, error)
            outbox.strike(item)

    def send_end(self) -> None:
        """The status that a finished run ends with."""
        if self.outbox.state.status not in (None, "RUNNING"):
            self._send_status(self.outbox.state.status)

    def _send_status(self, status: str | None) -> None:
        state = self.outbox.state
        if status == "RUNNING":
            self.client.update_run(self.run_id, status="RUNNING")
        elif not state.job_run:  # the platform ends its own
            end = int(state.end_time * 1000) if state.end_time else None
            self.client.set_terminated(self.run_id, status=status, end_time=end)
        with self.outbox.lock:
            if state.status == status:
                state.status = None
            self.outbox.save()

    def send_journal(
        self, node_rank: int, path: Path, progress: Callable[[int], None] = lambda n: None
    ) -> None:
        """Send what lies past the cursor, in batches; `progress` gets the points of each.

        The cursor moves after each batch. Where that was lost the batch is sent again, and MLflow
        ignores a point that it has (same key, time, step and value).
        """
        from mlflow.entities import Metric

        if self.run_id is None or not path.is_file():
            return
        cursor = Cursor(self.outbox.run_dir, node_rank)
        batch: list[Metric] = []
        end = 0

        def send() -> None:
            self._send("metrics", batch)
            cursor.move(self.run_id or "", end)
            self.delivered += len(batch)
            progress(len(batch))
            batch.clear()

        for record in read(path, cursor.offset(self.run_id)):
            at = round(record.time * 1000)
            points = [Metric(metric_name(k), v, at, record.step) for k, v in record.metrics.items()]
            if batch and len(batch) + len(points) > BATCH["metrics"]:
                send()
            batch += points
            end = record.end
        if batch:
            send()

    def _send(self, kind: str, points: list[Any]) -> None:
        for i in range(0, len(points), BATCH[kind]):
            part = points[i : i + BATCH[kind]]
            try:
                self.client.log_batch(self.run_id, **{kind: part})
            except Exception as error:
                if not self.run_id or not self._is_active(self.run_id):
                    self.run_id = None  # deleted on the server: the next pass makes it anew
                    raise
                if not refusal(error):
                    raise
                if len(part) > 1:
                    middle = len(part) // 2
                    self._send(kind, part[:middle])
                    self._send(kind, part[middle:])
                elif part[0].key not in self.refused:
                    self.refused.add(part[0].key)
                    log.warning("MLflow refuses the %s %s: %s", kind[:-1], part[0].key, error)

    def send_all(self, progress: Callable[[int], None] = lambda n: None) -> None:
        """Everything that the directory of a run that is not running any more holds."""
        self.connect()
        found = journals(self.outbox.run_dir)
        with self.outbox.lock:
            if self.outbox.state.end_time is None:  # it was killed before it could say so
                self.outbox.state.status = "KILLED"
                times = [path.stat().st_mtime for path in found.values()]
                self.outbox.state.end_time = max(times, default=None)
        self.send_outbox()
        for node, path in found.items():
            self.send_journal(node, path, progress)
        self.send_end()
        self.send_artifacts()

    def pending(self) -> int:
        """How many points the journals hold that this run does not have."""
        total = 0
        for node, path in journals(self.outbox.run_dir).items():
            offset = Cursor(self.outbox.run_dir, node).offset(self.outbox.state.run_id or "")
            total += sum(len(record.metrics) for record in read(path, offset))
        return total
