"""Sends a run to MLflow. A live run and `track sync` use the same code."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import posixpath
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from distdl.runs.records import journals, read
from distdl.tracking.client import import_client, is_permanent, last_written, metric_name, set_aside
from distdl.tracking.outbox import (
    STUDY,
    STUDY_KEY,
    Cursor,
    Outbox,
    database_path,
    is_local,
    redact,
)
from distdl.tracking.refusals import ADDRESS, OTHER, deleted, refusal
from distdl.util.errors import LastingRefusal
from distdl.util.wording import first_few

if TYPE_CHECKING:
    from mlflow.entities import Experiment

log = logging.getLogger(__name__)

Value = TypeVar("Value")

BATCH = {"metrics": 1000, "params": 100, "tags": 100}  # MLflow's own limits per request
ENOUGH = 8  # after so many refused parameters in a row, the server accepts no more


class Delivery:
    """Sends the outbox and the journals. Every method raises the server's errors.

    Args:
        uri: The tracking URI, with its password if it has one.
        node_rank: Node 0 creates the MLflow run and sends the outbox; the others only find the run.
        alone: Whether this process sends the journals of all nodes.
    """

    def __init__(self, outbox: Outbox, uri: str, node_rank: int = 0, alone: bool = False) -> None:
        self.outbox = outbox
        self.uri = uri
        self.node_rank = node_rank
        self.alone = alone or is_local(uri)
        self.client: Any = None
        self.run_id: str | None = None
        self.names = [None, outbox.state.run_id]  # the ids that a module may use for our run
        self.experiment_id: str | None = None
        self.delivered = 0  # points
        self.refused: set[str] = set()  # names
        self.in_a_row = 0  # refused parameters since the last accepted one
        self.renamed: set[str] = set()  # names that MLflow does not accept, and that were reported

    def connect(self) -> bool:
        """Finds the MLflow run, or creates it (node 0). False if it does not exist yet."""
        if self.run_id is not None:
            return True
        lock: Any = contextlib.nullcontext()
        if is_local(self.uri):
            # Two runs that start together must not create the tables at the same time.
            from filelock import FileLock

            database = database_path(self.uri)
            database.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(database.with_name(database.name + ".lock"), timeout=120)
        with lock:
            open_client = functools.partial(import_client(), tracking_uri=self.uri)
            written = last_written(self.uri)
            try:
                self.client = open_client()
            except Exception:  # of SQLAlchemy, sqlite or alembic
                if written is None or not set_aside(self.uri, written):
                    raise
                self.client = open_client()
            if self.node_rank:
                self.outbox.load()
            state = self.outbox.state
            run_id = state.run_id if state.run_id and self._is_active(state.run_id) else None
            is_gone = state.run_id and not run_id and not self.node_rank
            run_id = run_id or self._search() or (None if self.node_rank else self._create())
            if run_id and not self.node_rank and not state.job_run:
                self._become_child(run_id)
            if is_gone:  # and another one could be made: its experiment is not gone, too
                text = "MLflow at %s has no active run %s (was it deleted?); the run gets another"
                log.warning(text, redact(self.uri), state.run_id)
        if run_id and self.node_rank == 0:
            with self.outbox.lock:
                state.job_run = state.job_run and state.run_id == run_id
                state.run_id = run_id
                state.experiment_id = self.experiment_id
                self.outbox.save()
        self.run_id = run_id
        self.names.append(run_id)
        return run_id is not None

    def _is_active(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            info = self.client.get_run(run_id).info
            self.experiment_id = info.experiment_id
            return bool(info.lifecycle_stage == "active")
        except MlflowException as error:
            # An id that this kind of server cannot read counts as one that does not exist.
            if error.error_code == "RESOURCE_DOES_NOT_EXIST" or is_permanent(error):
                return False
            raise

    def _experiment(self) -> str | None:
        """Our experiment's id; node 0 creates it. Raises LastingRefusal if its name is unusable."""
        try:
            experiment = self._found_or_created(self.outbox.state.experiment)
        except Exception as error:  # MLflow's, or its store's; raised again
            if refusal(error, self.uri) or not is_permanent(error):
                raise
            what = f"does not accept the experiment {self.outbox.state.experiment!r}: {error}"
            raise LastingRefusal(what[:300], OTHER) from error
        if experiment is None:
            return None
        if not experiment.experiment_id:  # any JSON is taken for an experiment
            raise LastingRefusal("does not answer like an MLflow server", ADDRESS)
        if experiment.lifecycle_stage != "active":
            raise deleted(self.uri, experiment.name, experiment.experiment_id)
        return str(experiment.experiment_id)

    def _found_or_created(self, name: str) -> Experiment | None:
        experiment = self.client.get_experiment_by_name(name)
        if experiment is None and not self.node_rank:
            try:
                new = self.client.create_experiment(name, self.outbox.state.artifact_location)
                return self.client.get_experiment(new)
            except Exception:  # another run may have just created it
                experiment = self.client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return experiment

    def _search(self) -> str | None:
        """Finds the run by our tag, since the server's answer or our file may have been lost."""
        experiment = self.experiment_id = self._experiment()
        if experiment is None:
            return None
        query = f"tags.`distdl.run_key` = '{self.outbox.state.key}'"
        order = ["attributes.start_time DESC"]
        runs = self.client.search_runs([experiment], query, max_results=1, order_by=order)
        return str(runs[0].info.run_id) if runs else None

    def _create(self) -> str:
        state = self.outbox.state
        tags = {"distdl.run_id": state.distdl_run, "distdl.run_key": state.key}
        name = state.name or state.distdl_run.rsplit("/", 1)[-1]
        start = int(state.start_time * 1000)
        return str(self.client.create_run(self.experiment_id, start, tags, name).info.run_id)

    def _become_child(self, run_id: str) -> None:
        """Puts the run of a trial below the one of its study, which MLflow shows as a tree. The
        study's is found by its key, or made. Of two that trials have made at the same moment, the
        first one counts."""
        tags = self.outbox.state.tags
        key = tags.get(STUDY_KEY)
        if not key or not re.fullmatch("[0-9a-f]{32}", key):
            return
        study = self._study_of(key)
        if study is None:
            own = {STUDY: tags.get(STUDY, ""), "distdl.run_key": key}
            name = tags.get(STUDY, "").rpartition("/")[2]
            experiment = self.experiment_id
            made = self.client.create_run(experiment, None, own, name).info.run_id
            self.client.set_terminated(made)
            study = self._study_of(key) or made
            if study != made:
                self.client.delete_run(made)
        if study != run_id:
            self.outbox.add("tags", {"mlflow.parentRunId": study})

    def _study_of(self, key: str) -> str | None:
        query = f"tags.`distdl.run_key` = '{key}'"
        order = ["attributes.start_time ASC", "attributes.run_id ASC"]
        runs = self.client.search_runs([self.experiment_id], query, max_results=1, order_by=order)
        return str(runs[0].info.run_id) if runs else None

    def send_outbox(self) -> None:
        """Sends the pending parameters and tags."""
        from mlflow.entities import Param, RunTag

        outbox = self.outbox
        with outbox.lock:
            params = dict(outbox.state.params)
            tags = dict(outbox.state.tags)
        if params:
            # MLflow cannot change a parameter. A tag of the attempt records the changes.
            known = self.client.get_run(self.run_id).data.params
            named = self._accepted("parameter", params)
            new = [Param(key, value) for key, value in named.items() if key not in known]
            refused_before = {*self.refused}
            self.in_a_row = 0
            self._send("params", new)
            outbox.mark_sent("params", params)
            left_out = [key for key in named if key in self.refused - refused_before]
            if left_out:
                log.warning(
                    "MLflow at %s refuses %d of %d parameters (%s); config.yaml has all of them",
                    redact(self.uri),
                    len(left_out),
                    len(named),
                    first_few(left_out),
                )
        if tags:
            accepted = self._accepted("tag", tags)
            self._send("tags", [RunTag(key, value) for key, value in accepted.items()])
            outbox.mark_sent("tags", tags)

    def send_artifacts(self) -> None:
        """Sends all pending artifacts. One that fails is sent last in the next pass, so that
        it does not block the others."""
        outbox = self.outbox
        for copy in sorted(outbox.files(), key=os.path.getmtime):
            name = copy.relative_to(outbox.copies).as_posix()
            outbox.replaced.discard(copy)
            try:
                self.client.log_artifact(self.run_id, str(copy), posixpath.dirname(name) or None)
            except Exception as error:  # a store's SDK has its own errors
                if not is_permanent(error):
                    os.utime(copy)
                    raise
                log.warning("MLflow refuses the artifact %s: %s", name, error)
            with outbox.lock:
                if copy not in outbox.replaced:
                    copy.unlink()

    def send_status(self, ended: bool) -> None:
        """Sends the run's state: RUNNING, or how it ended."""
        state = self.outbox.state
        status = self.outbox.state.status
        if status is None or ended == (status == "RUNNING"):
            return
        if not ended:
            self.client.update_run(self.run_id, status=status)
        elif not state.job_run:  # the platform ends its own run
            end = int(state.end_time * 1000) if state.end_time else None
            self.client.set_terminated(self.run_id, status=status, end_time=end)
        with self.outbox.lock:
            if state.status == status:
                state.status = None
            self.outbox.save()

    def send_journal(self, node_rank: int, path: Path, progress: Callable[[int], None]) -> None:
        """Sends everything past the cursor in batches, moves the cursor after each, and reports the
        number of points to `progress`. If the move is lost, the batch is sent again: MLflow ignores
        a point that it already has (same key, time, step and value)."""
        from mlflow.entities import Metric

        assert self.run_id is not None
        cursor = Cursor(self.outbox.run_dir, node_rank)
        batch: list[Metric] = []
        end = 0

        def send() -> None:
            self._send("metrics", batch)
            cursor.move(str(self.run_id), end)
            self.delivered += len(batch)
            progress(len(batch))
            batch.clear()

        for record in read(path, cursor.offset(self.run_id)):
            at = round(record.time * 1000)
            values = self._accepted("metric", record.metrics).items()
            points = [Metric(name, value, at, record.step) for name, value in values]
            if batch and len(batch) + len(points) > BATCH["metrics"]:
                send()
            batch += points
            end = record.end
        if batch:
            send()

    def _accepted(self, what: str, values: Mapping[str, Value]) -> dict[str, Value]:
        """The values by names that MLflow accepts. One line reports each name that is changed."""
        names = {name: metric_name(name) for name in values}
        changed = {k: new for k, new in names.items() if new != k and k not in self.renamed}
        if changed:
            self.renamed |= changed.keys()
            text = ", ".join(f"{name!r} is {new}" for name, new in changed.items())
            log.warning("MLflow does not accept these names. The %s %s", what, text)
        return {names[name]: value for name, value in values.items()}

    def _send(self, kind: str, points: list[Any]) -> None:
        """Sends points, in halves if they are too many for a request or if one of them is refused.
        Keeps their order, since a server may limit the number of parameters (Azure ML does)."""
        if kind == "params" and self.in_a_row >= ENOUGH:
            self.refused |= {point.key for point in points}
            return
        if len(points) <= BATCH[kind]:
            try:
                self.client.log_batch(self.run_id, **{kind: points})
                self.in_a_row = 0
                return
            except Exception as error:  # MLflow's, or its store's; raised again
                if not self.run_id or not self._is_active(self.run_id):
                    self.run_id = None  # deleted on the server: the next pass creates a new run
                    raise
                if not is_permanent(error):
                    raise
                if len(points) == 1:
                    key = points[0].key
                    new = points[0].key not in self.refused
                    self.refused.add(key)
                    if kind == "params":  # reported together, by `send_outbox`
                        self.in_a_row += 1
                        log.debug("MLflow refuses the parameter %s: %s", key, error)
                    elif new:
                        log.warning("MLflow refuses the %s %s: %s", kind[:-1], key, error)
                    return
        middle = len(points) // 2
        self._send(kind, points[:middle])
        self._send(kind, points[middle:])

    def send(self, ended: bool, progress: Callable[[int], None] = lambda n: None) -> bool:
        """Sends everything once. True if all that this process has to send has arrived."""
        if not self.connect():
            return False
        if self.node_rank == 0:
            self.send_outbox()
            self.send_status(ended=False)
        for node, path in self.journals().items():
            self.send_journal(node, path, progress)
        if self.node_rank == 0:
            if ended:  # before artifacts, which may fail
                self.send_status(ended=True)
            self.send_artifacts()
        return True

    def send_all(self, progress: Callable[[int], None]) -> None:
        """Sends everything of a run that has ended."""
        with self.outbox.lock:
            if self.outbox.state.end_time is None:  # killed before it recorded its end
                self.outbox.state.status = "KILLED"
                times = [path.stat().st_mtime for path in self.journals().values()]
                self.outbox.state.end_time = max(times, default=None)
        self.send(True, progress)

    def journals(self) -> dict[int, Path]:
        """The journals that this process sends, by node rank."""
        paths = journals(self.outbox.run_dir).items()
        return {n: path for n, path in paths if self.alone or n == self.node_rank}

    def is_behind(self) -> bool:
        """Whether anything that was logged is not in the MLflow run yet."""
        state = self.outbox.state
        return bool(state.params or state.tags or any(self.outbox.files()) or self.pending())

    def pending(self) -> int:
        """The number of points in the journals that the MLflow run lacks."""
        total = 0
        for node, path in self.journals().items():
            offset = Cursor(self.outbox.run_dir, node).offset(self.outbox.state.run_id or "")
            total += sum(len(record.metrics) for record in read(path, offset))
        return total
