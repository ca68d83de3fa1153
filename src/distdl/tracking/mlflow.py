"""MLflow: each run of distdl has one MLflow run, which a thread fills from the journal."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.config.recipe import not_exportable
from distdl.runs import provenance
from distdl.tracking import services
from distdl.tracking.client import exclusive, import_client, prepare_environment
from distdl.tracking.delivery import Delivery
from distdl.tracking.outbox import Outbox, database_path, is_local, redact
from distdl.tracking.refusals import deleted_in, described, refusal, schema_of
from distdl.util.errors import Problem

if TYPE_CHECKING:
    from distdl.tracking import RunInfo
    from distdl.tracking.journal import Journal
    from distdl.tracking.run_logger import RunLogger

log = logging.getLogger(__name__)

# A name in MLflow's registry.
NAME = r"[\w.\- ]{1,100}"
STATUS = {
    "SUCCEEDED": "FINISHED",
    "PRUNED": "FINISHED",  # MLflow has no such word: the tag of the attempt's state has it
    "FAILED": "FAILED",
    "PREEMPTED": "KILLED",
    "CANCELLED": "KILLED",
}
LONGEST_WAIT = 30.0  # seconds between two tries while the server fails
PATIENCE = 30.0  # seconds for which a module's query waits for the server
IMPORT_TIMEOUT = 120.0  # seconds for which training waits for the thread's imports


class MLflowLogger:
    """Sends the run's journal to an MLflow server. Training never waits for the server.

    A thread sends the journal from a cursor on, in batches with the original times and steps, and
    moves the cursor. A failure of the server is reported once, and sending is tried again at
    growing intervals. What is left at the end stays in the run for `python -m distdl track sync
    RUN`. What a module logs through its `lightning_logger`, except metrics, goes into the outbox.

    `start` and `finish` are called on every rank, but only rank 0 creates the MLflow run. With a
    server, local rank 0 of each other node sends its node's system metrics. Only rank 0 writes a
    database file, with the journals of all nodes that it can see.

    If a job's platform has created an MLflow run (`MLFLOW_RUN_ID`, `AZUREML_RUN_ID`), that run is
    used. A resumed run is another job, and sends the complete history to that job's MLflow run,
    tagged `distdl.previous_job`.

    Args:
        tracking_uri: The server; None for `$MLFLOW_TRACKING_URI`, else the project's database
            `<output_dir>/mlflow.db`.
        experiment_name: None for the run's experiment.
        artifact_location: Where a new experiment keeps artifacts; None for the server's choice, or
            for `mlflow-artifacts` beside a database file (MLflow would use the current folder).
        system_metrics_interval: Seconds between two samples of the node's load; 0 for none.
        flush_timeout: Seconds to wait for the server at the end of the run.
        interval: Seconds between two deliveries.
        register: The name under which MLflow's registry gets the model when a training ends; None
            for no registration (docs/export.md).
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        artifact_location: str | None = None,
        system_metrics_interval: float = 15.0,
        flush_timeout: float = 60.0,
        interval: float = 5.0,
        register: str | None = None,
    ) -> None:
        variable = os.environ.get("MLFLOW_TRACKING_URI") or None
        self.tracking_uri = tracking_uri or variable
        # Read now: a user's mlflow.start_run() removes MLFLOW_RUN_ID from the environment.
        job_run = os.environ.get("MLFLOW_RUN_ID") or os.environ.get("AZUREML_RUN_ID")
        self.job_run = job_run if variable and self.tracking_uri == variable else None
        self.experiment_name = None if experiment_name is None else str(experiment_name)
        self.artifact_location = artifact_location
        self.system_metrics_interval = system_metrics_interval
        self.flush_timeout = flush_timeout
        self.interval = interval
        self.register = register
        self.delivery: Delivery | None = None
        self.uri = ""
        self._failures = 0
        self._told: set[str] = set()  # the refusals since the last success, and "" for an outage
        self._finishing = self._done = False
        self._wake = threading.Event()
        self._imported = threading.Event()
        self._thread: threading.Thread | None = None

    @staticmethod
    def check(
        config: Mapping[str, Any], context: Mapping[str, Any] | None = None
    ) -> Iterable[Problem]:
        """Problems of the arguments; paths are relative to the tracker's node."""
        experiment = config.get("experiment_name")
        if isinstance(experiment, bool | float | list | dict):
            yield Problem(
                "experiment_name",
                what=f"{experiment!r} is not a name",
                remedy=f"'{experiment!s}'",
                code="wrong-kind",
            )
        elif experiment is not None and not 0 < len(str(experiment).strip()) <= 500:
            yield Problem(
                "experiment_name",
                what="has no character, or more than 500",
                remedy="a shorter name",
                code="incomplete",
            )
        elif context and context["new"] and context["local"]:
            outputs = os.path.abspath(str(context["config"].get("output_dir")))
            uri = config.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI")
            uri = str(uri or f"sqlite:///{outputs}/mlflow.db")
            own = context["config"].get("experiment_name")
            if refused := schema_of(uri):
                path = f"MLflow at {redact(uri)}"
                yield Problem(
                    "tracking_uri",
                    what=f"{path} {refused.what}",
                    remedy=refused.remedy,
                    code="mismatch",
                )
            elif refused := deleted_in(uri, str(experiment or own)):
                yield Problem(
                    "experiment_name",
                    what=f"MLflow {refused.what}",
                    remedy=refused.remedy,
                    code="conflict",
                )
        name = config.get("register")
        if name is not None and not re.fullmatch(NAME, str(name)):
            yield Problem(
                "register",
                what=f"{name!r} has other characters",
                remedy=f"as in {NAME}",
                code="wrong-kind",
            )
        elif name is not None and context and (why_not := not_exportable(context["config"])):
            yield Problem(
                "register", what=why_not, remedy="remove tracking.mlflow.register", code="mismatch"
            )

    def start(self, info: RunInfo) -> None:
        """Starts the sender. Never raises, and never waits for the server."""
        self.info = info
        outbox = Outbox(info.run_dir)
        self._describe(outbox)
        sends = info.local_rank == 0 and not is_local(self.uri)
        if info.rank != 0 and not sends:
            return
        prepare_environment()
        self.delivery = Delivery(outbox, self.uri, info.node_rank)
        if info.rank == 0:
            outbox.save()
            self.describe(info.params)
        for path in info.artifacts if info.rank == 0 else []:
            self._keep(path)
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def describe(self, params: Mapping[str, Any]) -> None:
        """Adds parameters to the run. A parameter that exists keeps its value."""
        if self.delivery is not None:
            self.delivery.outbox.add("params", params, longest=500)

    def settle(self) -> None:
        """Waits until the thread has done its imports. They take up to 3 s, and would delay a step:
        loading one of MLflow's libraries holds the interpreter's lock for 0.7 s."""
        if self._thread is not None:
            self._imported.wait(IMPORT_TIMEOUT)

    def lightning_logger(self, journal: Journal) -> RunLogger:
        """The logger that a module gets as `self.logger`."""
        from distdl.tracking.run_logger import RunLogger

        return RunLogger(self, journal)

    def wait_until(self, done: Callable[[], Any]) -> None:
        """Sends now and waits until `done()`, the server fails, or PATIENCE is over."""
        end = time.monotonic() + PATIENCE
        while not done() and not self._failures and time.monotonic() < end:
            self._wake.set()
            time.sleep(0.02)

    def finish(self, status: str) -> None:
        """Sends what is left, for at most `flush_timeout` seconds, and reports what could not be
        sent. `status` is SUCCEEDED, PRUNED, FAILED, PREEMPTED or CANCELLED."""
        if self.delivery is None or self._thread is None or self._finishing:
            return
        if self.info.rank == 0:
            outbox = self.delivery.outbox
            outbox.state.status = STATUS.get(status, "FAILED")
            outbox.state.end_time = time.time()
            outbox.add("tags", {f"distdl.runs.attempt.{self.info.attempt}.state": status})
        timeout = min(self.flush_timeout, services.PATIENCE.get(status, self.flush_timeout))
        self._finishing = True
        self._wake.set()
        self._thread.join(timeout)
        if not self._done:
            self._finishing = False  # the thread stops trying
            self._thread = None
            points = self.delivery.pending()
            files = len([*self.delivery.outbox.files()])
            text = (
                "MLflow at %s has not received everything (%d points and %d files left). To send "
                "the rest%s: python -m distdl track sync %s"
            )
            then = ", once that is done" if self._told - {""} else ""
            folder = shlex.quote(str(self.info.run_dir))
            log.warning(text, redact(self.uri), points, files, then, folder)

    def how_to_open(self) -> list[str]:
        """The commands and addresses that show the run."""
        if self.delivery is None:
            return []
        self.wait_until(lambda: self.delivery.run_id)  # type: ignore[union-attr]
        return how_to_open(self.uri, self.delivery.outbox)

    def _describe(self, outbox: Outbox) -> None:
        """Fills the outbox with the facts about this attempt."""
        info, state = self.info, outbox.state
        state.key = info.key or state.key
        state.distdl_run = info.run_id
        state.name = info.name
        state.server = redact(self.tracking_uri) if self.tracking_uri else None
        state.output_dir = os.path.relpath(info.output_dir, info.run_dir)
        state.experiment = self.experiment_name or info.experiment_name
        uri = self.uri = self.tracking_uri or outbox.database()
        state.artifact_location = self.artifact_location
        if not self.artifact_location and re.match(r"(sqlite|mysql|postgresql|mssql)[+:]", uri):
            folder = database_path(uri).parent if is_local(uri) else info.output_dir.absolute()
            state.artifact_location = (folder / "mlflow-artifacts").as_uri()
        state.tags |= {k: str(v)[:5000] for k, v in info.tags.items()} | self._tags(state.key)
        if self.job_run and self.job_run != state.run_id:
            if state.run_id:
                state.tags["distdl.previous_job"] = state.run_id
            state.run_id = self.job_run
        state.job_run = bool(self.job_run)
        state.status = "RUNNING"
        state.end_time = None

    def _tags(self, key: str) -> dict[str, str]:
        info = self.info
        attempt = f"distdl.runs.attempt.{self.info.attempt}"
        tags = {"distdl.run_id": info.run_id, "distdl.attempts": str(info.attempt)}
        tags["distdl.run_key"] = key
        tags[f"{attempt}.state"] = "RUNNING"
        if info.changed:
            tags[f"{attempt}.changed"] = json.dumps(info.changed, default=str)[:5000]
        for n in range(1, info.attempt):  # a killed attempt did not report its end
            with contextlib.suppress(OSError, ValueError, AttributeError):
                status = json.loads((info.run_dir / f"attempts/{n:03d}/status.json").read_text())
                state = status.get("state", "UNKNOWN")
                tags[f"distdl.runs.attempt.{n}.state"] = "UNKNOWN" if state == "RUNNING" else state
        if info.tags.get("git.commit"):
            tags["mlflow.source.git.commit"] = info.tags["git.commit"]
        return tags

    def _keep(self, path: Path) -> None:
        assert self.delivery is not None
        self.delivery.outbox.add_own(path, self.info.attempt)

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # `_follow` meets the error again and reports it
            import_client()
        self._imported.set()
        folder = self.info.run_dir / "tracking"
        if self.info.rank == 0:
            lines = sorted(provenance.packages(), key=str.lower)
            path = folder / "packages.txt"
            with contextlib.suppress(OSError):
                path.write_text("\n".join(lines) + "\n")
                self._keep(path)
        lock = folder / f"mlflow-node{self.info.node_rank}.lock"
        while self._thread is not None:
            with exclusive(lock) as acquired:
                if acquired:
                    self._follow()
                    return
            self._wait(self.interval)  # `track sync` is running and moves the cursor

    def _follow(self) -> None:
        assert self.delivery is not None
        while self._thread is not None:
            finishing = self._finishing  # read first: the pass must send all that was logged before
            try:
                complete = self.delivery.send(finishing)
                if self._failures:
                    log.warning("MLflow at %s is back: sending continues", redact(self.uri))
                    self._failures = 0
                    self._told.clear()
                if finishing:
                    self._done = complete
                    return
                self._wait(self.interval)
            except Exception as error:  # of MLflow or its HTTP client: the journal keeps all
                self._failures += 1
                self._tell(error)
                if finishing and refusal(error, self.uri):
                    return
                self._wait(1.0 if finishing else min(2.0**self._failures, LONGEST_WAIT))

    def _tell(self, error: Exception) -> None:
        """Says once what is wrong: an outage, which passes, or what somebody has to do."""
        refused = refusal(error, self.uri)
        topic = refused.what if refused else ""
        if topic in self._told:
            return
        self._told.add(topic)
        if refused is not None:
            text = (
                "MLflow at %s %s. Training continues, and what is logged stays in the run. To send "
                "it: %s"
            )
            log.warning(text, redact(self.uri), refused.what, refused.remedy)
            return
        text = (
            "MLflow at %s fails; training continues, and what is logged is sent "
            "when the %s. The error: %s"
        )
        later = "database can be used again" if is_local(self.uri) else "server is back"
        log.warning(text, redact(self.uri), later, described(error, self.uri))

    def _wait(self, seconds: float) -> None:
        if self._wake.wait(seconds):
            self._wake.clear()


def how_to_open(uri: str, outbox: Outbox) -> list[str]:
    """The address of the run's page, after the command that serves it if there is no server."""
    run, experiment = outbox.state.run_id, outbox.state.experiment_id
    page = f"/#/experiments/{experiment}/runs/{run}"
    if not (run and experiment and re.fullmatch(r"/#/experiments/[\w-]+/runs/[\w-]+", page)):
        page = ""
    if uri.startswith("http"):
        return [redact(uri).rstrip("/") + page]
    if uri.startswith("azureml:"):
        names = ("SUBSCRIPTION", "RESOURCEGROUP", "WORKSPACE_NAME")
        workspace = [os.environ.get(f"AZUREML_ARM_{name}") for name in names]
        if run and all(workspace):
            wsid = "/subscriptions/{}/resourcegroups/{}/workspaces/{}".format(*workspace)
            return [f"https://ml.azure.com/runs/{run}?wsid={wsid}"]
        return [redact(uri)]
    if is_local(uri):
        path = database_path(uri)
        with contextlib.suppress(ValueError):
            path = path.relative_to(Path.cwd())
        uri = f"sqlite:///{path}"
    command = f"mlflow ui --backend-store-uri {shlex.quote(redact(uri))}"
    return [command, f"http://127.0.0.1:5000{page}"] if page else [command]
