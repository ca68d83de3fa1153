"""A job on Azure ML: its state and log, and how it ended. A handle is enough to find it."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from distdl.job import JobState
from distdl.launchers.azureml import datastore
from distdl.launchers.azureml.client import Connection, Workspace, azure_errors
from distdl.launchers.azureml.run_history import LogFile, RunHistory, by_rank
from distdl.launchers.common import leave, read_on, store_errors
from distdl.launchers.queried_job import QueriedJob, from_pages, pace
from distdl.util.errors import NoRight, UserError

# https://learn.microsoft.com/rest/api/azureml/jobs/get#jobstatus
STATES = {
    **dict.fromkeys(("NotStarted", "Queued", "Starting"), JobState.PENDING),
    **dict.fromkeys(("Provisioning", "Preparing", "Paused"), JobState.PENDING),
    **dict.fromkeys(("Running", "Finalizing", "CancelRequested"), JobState.RUNNING),
    "NotResponding": JobState.RUNNING,  # it may answer again
    "Completed": JobState.SUCCEEDED,
    "Failed": JobState.FAILED,
    "Canceled": JobState.CANCELLED,
    "Unknown": JobState.UNKNOWN,
}
EXPLAINED = {
    "Queued": "waiting for nodes",
    "Preparing": "getting nodes and the image; the first build of an image takes 10 to 20 minutes",
    "CancelRequested": "being cancelled",
}
QUEUED_LONG = 120  # seconds in the queue, after which the likely reason is shown
SHORTEST, LONGEST = 1.0, 10.0  # seconds between two polls of the log
MISSES = 20  # consecutive polls without an answer, after which following ends


def member_in(trial: dict[str, Any]) -> str:
    """The member that a trial of a sweep runs."""
    values = json.loads((trial.get("tags") or {}).get("hyperparameters") or "{}")
    return str(values.get("member", ""))


class AzureMLJob(QueriedJob[dict[str, Any]]):
    """One job, or the trial of `member` in a sweep job. Azure names a trial when it starts."""

    def __init__(self, connection: Connection, name: str, member: str | None = None) -> None:
        self._connection = connection
        self._name = name
        self._member = member
        self._history = RunHistory(connection)
        self._trial: str | None = None

    @property
    def handle(self) -> str:
        return self._connection.workspace.handle(self._name, self._member)

    @property
    def url(self) -> str | None:
        return self._connection.page(self._name)

    @property
    def platform(self) -> str:
        workspace = self._connection.workspace
        return f"Azure ML (workspace {workspace.name} in {workspace.resource_group})"

    @classmethod
    def _query_all(cls, jobs: Sequence[AzureMLJob]) -> Iterable[tuple[AzureMLJob, Any]]:
        """As in the base class. The trials of a sweep are in a list of its own."""
        workspaces: dict[Workspace, dict[str, AzureMLJob]] = {}
        sweeps: dict[tuple[Workspace, str], dict[str, AzureMLJob]] = {}
        for job in jobs:
            workspace = job._connection.workspace
            if job._member is None:
                workspaces.setdefault(workspace, {})[job._name] = job
            else:
                sweeps.setdefault((workspace, job._name), {})[job._member] = job
        for named in workspaces.values():
            with azure_errors():
                listed = next(iter(named.values()))._connection.client.jobs.list().by_page()
                # The SDK lists a job of a kind that it does not know as None.
                pages = ([(j.name, {"status": j.status}) for j in page if j] for page in listed)
                yield from from_pages(named, pages)
        for members in sweeps.values():
            yield from next(iter(members.values()))._trials(members)

    def _query(self) -> dict[str, Any]:
        if run := self._run():
            return self._history.details(run)
        return self._not_started()

    def _not_started(self) -> dict[str, Any]:
        """The answer about a trial that has not started. While the sweep runs, it still can."""
        sweep = self._history.details(self._name)
        ended = self._state_from(sweep).ended
        return {"status": "Canceled" if ended else "Queued", "error": sweep.get("error")}

    def _trials(self, members: dict[str, AzureMLJob]) -> Iterator[tuple[AzureMLJob, Any]]:
        """The answers about several members of this sweep, from its list of trials."""
        trials = {member_in(child): child for child in self._history.children(self._name)}
        waiting = None if trials.keys() >= members.keys() else self._not_started()
        for member, job in members.items():
            answer = trials.get(member, waiting)
            if answer and answer.get("status"):  # else the trial is queried on its own
                yield job, answer

    def _state_from(self, answer: dict[str, Any]) -> JobState:
        return STATES.get(answer["status"], JobState.UNKNOWN)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Rank 0's output and Azure's own messages; after a failure, every rank's output."""
        file = LogFile(self._history)
        steps = pace(SHORTEST, LONGEST)
        misses = 0
        status = ""
        since = time.monotonic()
        explained = False
        while True:
            try:
                details = self._query()
                ranks = by_rank(details.get("logFiles") or {})
                lines = file.new(ranks[0]) if 0 in ranks else []
            except UserError as error:
                # The job continues anyway, so a short network outage must not end the command.
                misses += 1
                if not follow or misses > MISSES or isinstance(error, NoRight):
                    raise
                yield f"azureml: no answer, trying again: {error.problems[0].what}"
                next(steps)
                continue
            misses = 0
            before = status
            status = details["status"]
            if status != before and follow:
                more = EXPLAINED.get(status)
                yield f"azureml: {status.lower()}" + (f": {more}" if more else "")
                since = time.monotonic()
            yield from lines
            state = self._state_from(details)
            if state.ended or not follow:
                break
            if status == "Queued" and not explained and time.monotonic() - since > QUEUED_LONG:
                explained = True
                yield f"azureml: still queued after {QUEUED_LONG} s: {self._why_queued()}"
            if lines:
                steps = pace(SHORTEST, LONGEST)
            next(steps)
        yield from file.rest()
        if state is JobState.FAILED:
            yield from self._failure(details, ranks)

    def cancel(self) -> None:
        if (run := self._run()) is None:
            raise UserError.at(
                self.handle,
                what="has not started yet, and until then Azure ML cannot cancel it alone",
                remedy=f"cancel the entire sweep: {self._connection.workspace.handle(self._name)}",
                code="under-way",
            )
        if not self.state().ended:
            with azure_errors(self.handle):
                self._connection.client.jobs.begin_cancel(run)

    def fetch(self, to: Path) -> None:
        """Copies the store (checkpoints, logs, status) into a folder, with `fetch_files`."""
        datastore.fetch(self._connection, self._address, Path(to))

    @functools.cached_property
    def _address(self) -> str:
        with azure_errors(self.handle):
            path = str(self._connection.client.jobs.get(self._name).outputs["store"].path)
        return f"{path.rstrip('/')}/{self._member}" if self._member else path

    @functools.cached_property
    def _followed(self) -> datastore.DatastoreFolder:
        return datastore.DatastoreFolder(self._connection, self._address, patience=0.0)

    def read_on(self, name: str, start: int) -> bytes | None:
        """The job's mount writes there."""
        with store_errors(self.handle):
            return read_on(self._followed, name, start)

    def leave(self, name: str, content: bytes) -> None:
        """Rank 0 reads the blob itself: a mount never looks again at what it knows of a file."""
        with store_errors(self.handle):
            leave(self._followed, name, content)

    def _run(self) -> str | None:
        """Azure's name of the job or trial; None for a member of a sweep that has not started."""
        if self._member is None:
            return self._name
        if self._trial is None:
            for child in self._history.children(self._name):
                if member_in(child) == self._member:
                    self._trial = str(child["runId"])
        return self._trial

    def _failure(self, details: dict[str, Any], ranks: dict[int, str]) -> Iterator[str]:
        """Azure's error, after the other ranks' output: rank 0 is often not the first to fail."""
        for rank, address in ranks.items():
            if rank:
                file = LogFile(self._history)
                yield from (f"[rank {rank}] {x}" for x in (*file.new(address), *file.rest()))
        message = ((details.get("error") or {}).get("error") or {}).get("message")
        if message:
            yield f"azureml: {' '.join(str(message).split())[:600]}"

    def _why_queued(self) -> str:
        quota = "the quota may be used up (Studio, Quota), or the region has no free VMs"
        with azure_errors():
            client = self._connection.client
            name = str(client.jobs.get(self._name).compute or "").rpartition("/")[2]
            if not name:
                return f"Azure has found no serverless nodes; {quota}"
            cluster = client.compute.get(name)
            nodes = len(list(client.compute.list_nodes(name)))
        most = getattr(cluster, "max_instances", "?")
        tier = getattr(cluster, "tier", "")
        text = f"cluster {name} has {nodes} of at most {most} nodes ({cluster.size}, {tier})"
        if errors := getattr(cluster, "provisioning_errors", None):
            return f"{text}; Azure reports {errors}"
        return f"{text}: all are busy" if nodes == most else f"{text}; {quota}"
