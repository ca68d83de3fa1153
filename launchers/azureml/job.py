"""A job on Azure ML: its state, its log, its end. Needs nothing but its handle."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError
from distdl.job import JobState
from distdl.launchers.azureml.client import Connection, Workspace, told
from distdl.launchers.azureml.logs import LogFile, RunHistory, by_rank
from distdl.launchers.azureml.store import Store

# https://learn.microsoft.com/rest/api/azureml/jobs/get#jobstatus
STATES = {
    "NotStarted": JobState.PENDING,
    "Queued": JobState.PENDING,
    "Starting": JobState.PENDING,
    "Provisioning": JobState.PENDING,
    "Preparing": JobState.PENDING,
    "Paused": JobState.PENDING,
    "Running": JobState.RUNNING,
    "Finalizing": JobState.RUNNING,
    "CancelRequested": JobState.RUNNING,
    "NotResponding": JobState.RUNNING,  # it may come back
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Canceled": JobState.CANCELLED,
    "Unknown": JobState.UNKNOWN,
}
WORTH_SAYING = {
    "Queued": "waiting for nodes",
    "Preparing": "getting nodes and the image; the first build of an image takes 10 to 20 minutes",
    "CancelRequested": "being cancelled",
}
QUEUED_LONG = 120  # seconds, after which the likely reason is told
SHORTEST, LONGEST = 1.0, 10.0  # seconds between two looks
MISSES = 20  # looks in a row without an answer, after which following ends


class AzureMLJob:
    """One job, or one trial of a sweep job.

    Args:
        connection: To its workspace.
        name: The job's.
        member: Of a sweep: which one. Its trial has a name only once it has started.
    """

    def __init__(self, connection: Connection, name: str, member: str | None = None) -> None:
        self._connection = connection
        self._name, self._member = name, member
        self._history = RunHistory(connection)
        self._trial: str | None = None
        self.why = ""
        self._listed = JobState.UNKNOWN  # in the answer to `ask`

    @property
    def handle(self) -> str:
        return self._connection.workspace.handle(self._name, self._member)

    @property
    def url(self) -> str | None:
        return self._connection.page(self._name)

    @staticmethod
    def ask(jobs: Sequence[AzureMLJob]) -> None:
        """Asks for lists of the workspace's jobs, for the next `state` of each: no more often than
        one by one would. Trials, and what is in none of the lists, are asked by themselves.

        Raises:
            UserError: Azure refuses, or is out of reach.
        """
        workspaces: dict[Workspace, dict[str, AzureMLJob]] = {}
        for job in jobs:
            if job._member is None:
                workspaces.setdefault(job._connection.workspace, {})[job._name] = job
        for missing in workspaces.values():
            connection, most = next(iter(missing.values()))._connection, len(missing)
            with told():
                for page in islice(connection.client.jobs.list().by_page(), most):
                    for listed in page:  # None: the SDK knows no such kind of job
                        if listed and (found := missing.pop(listed.name, None)):
                            found._listed = STATES.get(listed.status, JobState.UNKNOWN)
                    if not missing:
                        break

    def state(self) -> JobState:
        listed, self._listed = self._listed, JobState.UNKNOWN
        if listed is not JobState.UNKNOWN:
            return listed
        try:
            return STATES.get(self._details()["status"], JobState.UNKNOWN)
        except UserError as error:
            self.why = str(error)
            return JobState.UNKNOWN

    def wait(self) -> JobState:
        for _ in pace():
            state = self.state()
            if state.ended:
                return state
        raise AssertionError

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Rank 0's output, and what Azure itself has to say; of a failed job every rank's."""
        file, steps, misses = LogFile(self._history), pace(), 0
        said, since, explained = "", time.monotonic(), False
        while True:
            try:
                details = self._details()
                ranks = by_rank(details.get("logFiles") or {})
                lines = file.new(ranks[0]) if 0 in ranks else []
            except UserError as error:
                # The job goes on without us; a network that is gone for a minute is no reason.
                misses += 1
                if not follow or misses > MISSES:
                    raise
                yield f"azureml: no answer, trying again: {error.problems[0].what}"
                next(steps)
                continue
            status, misses = details["status"], 0
            if status != said and follow:
                more = WORTH_SAYING.get(status)
                yield f"azureml: {status.lower()}" + (f": {more}" if more else "")
                since = time.monotonic()
            said = status
            yield from lines
            state = STATES.get(status, JobState.UNKNOWN)
            if state.ended or not follow:
                break
            if status == "Queued" and not explained and time.monotonic() - since > QUEUED_LONG:
                explained = True
                yield f"azureml: still queued after {QUEUED_LONG} s: {self._cluster_says()}"
            if lines:
                steps = pace()
            next(steps)
        yield from file.rest()
        if state is JobState.FAILED:
            yield from self._failure(details, ranks)

    def cancel(self) -> None:
        run = self._run()
        if run is None:
            raise UserError(
                Problem(
                    self.handle,
                    "has not started yet, and Azure ML has no name for it",
                    f"cancel the whole sweep: {self._connection.workspace.handle(self._name)}",
                )
            )
        if not self.state().ended:
            with told(self.handle):
                self._connection.client.jobs.begin_cancel(run)

    def fetch(self, to: Path) -> None:
        """Copies the store (checkpoints, logs, status) here; what is here already is kept."""
        with told(self.handle):
            path = str(self._connection.client.jobs.get(self._name).outputs["store"].path)
        address = f"{path.rstrip('/')}/{self._member}" if self._member else path
        Store(self._connection, address).fetch(Path(to))

    def _run(self) -> str | None:
        """What Azure calls it; None for a member of a sweep that has not begun."""
        if self._member is None:
            return self._name
        if self._trial is None:
            for child in self._history.children(self._name):
                given = json.loads((child.get("tags") or {}).get("hyperparameters") or "{}")
                if given.get("member") == self._member:
                    self._trial = str(child["runId"])
        return self._trial

    def _details(self) -> dict[str, Any]:
        run = self._run()
        if run is not None:
            return self._history.details(run)
        sweep = self._history.details(self._name)
        # While the sweep goes on its turn may come; when that has ended, it never will.
        status = sweep["status"]
        going_on = not STATES.get(status, JobState.UNKNOWN).ended
        return {"status": "Queued" if going_on else "Canceled", "error": sweep.get("error")}

    def _failure(self, details: dict[str, Any], ranks: dict[int, str]) -> Iterator[str]:
        """Rank 0 often fails because of another; the others wrote errors only."""
        for rank, address in ranks.items():
            if rank:
                file = LogFile(self._history)
                for line in [*file.new(address), *file.rest()]:
                    yield f"[rank {rank}] {line}"
        error = (details.get("error") or {}).get("error") or {}
        if error.get("message"):
            yield f"azureml: {' '.join(str(error['message']).split())[:600]}"

    def _cluster_says(self) -> str:
        quota = "is the quota used up (Studio, Quota), or has the region no such VMs to give?"
        with told():
            client = self._connection.client
            name = str(client.jobs.get(self._name).compute or "").rpartition("/")[2]
            if not name:
                return f"Azure has found no serverless nodes; {quota}"
            cluster = client.compute.get(name)
            nodes = len(list(client.compute.list_nodes(name)))
        most, tier = getattr(cluster, "max_instances", "?"), getattr(cluster, "tier", "")
        text = f"cluster {name} has {nodes} of at most {most} nodes ({cluster.size}, {tier})"
        errors = getattr(cluster, "provisioning_errors", None)
        if errors:
            return f"{text}, and Azure says {errors}"
        return f"{text}: all are busy" if nodes == most else f"{text}; {quota}"


def pace() -> Iterator[None]:
    """Waits between looks: a second at first, then longer and longer."""
    pause = SHORTEST
    yield
    while True:
        time.sleep(pause)
        yield
        pause = min(pause * 1.3, LONGEST)
