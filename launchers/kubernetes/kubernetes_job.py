"""A submitted job: its state, its pods' logs, its store."""

from __future__ import annotations

import functools
import json
import queue
import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from distdl.job import JobState
from distdl.launchers.common import (
    RemoteFile,
    attempt_at,
    fetch_files,
    leave,
    read_on,
    store_errors,
)
from distdl.launchers.kubernetes import states
from distdl.launchers.kubernetes.cluster import Cluster
from distdl.launchers.kubernetes.kubernetes_settings import PVC
from distdl.launchers.kubernetes.names import CONTAINER, ENDED, INSTANCE, LABELS, NODE, QUEUE
from distdl.launchers.kubernetes.states import CANCELLED, JobObjects, Object
from distdl.launchers.kubernetes.submission import path_of
from distdl.launchers.queried_job import QueriedJob
from distdl.stores import Store, open_store
from distdl.util.errors import Forgotten, Lasting, NoRight, Problem, StoreError, UserError

KINDS = {"job": "Job", "trainjob": "TrainJob"}
OURS = ",".join(f"{key}={value}" for key, value in LABELS.items())
MARK = "cancelled"  # a file of the attempt in the store, for a job that the cluster forgets
SMALL = 1 << 24  # bytes: a file up to this size may have changed without having grown
LABEL = re.compile(r"\[(\d{1,5})\] ")  # of lines of pods other than the first
LOGS_S = 1.0  # seconds after the end in which the last lines come


@dataclass(frozen=True)
class Name:
    """Identifies a job: `kind` is one of KINDS, `run` the run's id."""

    kind: str
    namespace: str
    name: str
    run: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class StoredEnd:
    """What the store says about a job that the cluster has forgotten."""

    state: JobState
    code: int | None = None


class KubernetesJob(QueriedJob[JobObjects | StoredEnd]):
    """A Job or TrainJob. `store` is the setting of the launcher; None if it is not known."""

    patience = 300.0
    failed_index = 0  # of the pod that failed

    def __init__(self, cluster: Cluster, name: Name, store: str | None) -> None:
        self.cluster = cluster
        self.name = name
        self.root = store

    @property
    def handle(self) -> str:
        each = self.name
        parts = (self.cluster.name, each.namespace, each.kind, each.name)
        place = "/".join(quote(part, safe="") for part in parts)
        run = f"#{quote(each.run)}/{each.attempt}" if each.run else ""
        return f"kubernetes://{place}{run}"

    @property
    def platform(self) -> str:
        context = f"context {self.cluster.context}" if self.cluster.context else "current context"
        return f"Kubernetes, {context}, namespace {self.name.namespace}"

    @property
    def path(self) -> str:
        return path_of(KINDS[self.name.kind], self.name.namespace, self.name.name)

    # ---- state ----------------------------------------------------------------------------------

    def _query(self) -> JobObjects | StoredEnd:
        try:
            job = self.cluster.read(self.path)
        except Forgotten:
            if kept := self._kept():
                return kept
            raise Forgotten(
                Problem(
                    self.handle,
                    what=(
                        "the cluster does not know it: it was deleted, "
                        "or has expired (launcher.ttl)"
                    ),
                )
            ) from None
        found = JobObjects(job, self.pods())
        if not states.verdict(found).state.ended:
            found = replace(found, events=self._events(found))
        return found

    def pods(self) -> list[Object]:
        place = f"/api/v1/namespaces/{quote(self.name.namespace, safe='')}/pods"
        selector = f"{INSTANCE}={self.name.name}"
        return list(self.cluster.read(place, labelSelector=selector).get("items") or [])

    def _events(self, found: JobObjects) -> list[Object]:
        """About the job, and about pods whose image does not come. Without the right to read them
        the state is known all the same."""
        names = [self.name.name]
        for pod in found.pods:
            waiting = states.state_of(pod).get("waiting") or {}
            if waiting.get("reason") in states.IMAGE:
                names.append(str(pod["metadata"]["name"]))
        if len(states.live(found.pods)) >= found.size:
            names.pop(0)
        place = f"/api/v1/namespaces/{quote(self.name.namespace, safe='')}/events"
        events: list[Object] = []
        with suppress(NoRight):
            for name in names:
                selector = f"involvedObject.name={name}"
                events += self.cluster.read(place, fieldSelector=selector).get("items") or []
        return events

    def _state_from(self, answer: JobObjects | StoredEnd) -> JobState:
        self.exit_code = None
        self.killed = ""
        if isinstance(answer, StoredEnd):
            self.exit_code = answer.code
            return answer.state
        verdict = states.verdict(answer)
        self.why = verdict.why
        if verdict.stuck and self._give_up(answer, verdict.why):
            verdict = replace(verdict, state=JobState.FAILED)
        self.failed_index = verdict.index
        if verdict.state is JobState.FAILED:
            self.exit_code = verdict.code
            self.killed = verdict.why
        return verdict.state

    def first_end(self, logs: Path) -> None:
        """Records what the platform says, as the error of the pod's first rank: the ranks' own are
        in the store, or there are none."""
        attempt = attempt_at(logs.parent)
        if self.killed and attempt.first_error() is None:
            rank = self.failed_index * attempt.resources().devices
            attempt.record_error(rank, "PodFailed", self.killed, "", self.exit_code or 1)

    @classmethod
    def _query_all(
        cls, jobs: Sequence[KubernetesJob]
    ) -> Iterator[tuple[KubernetesJob, JobObjects | StoredEnd | UserError]]:
        """Two lists per namespace. Who is in none of them is asked alone."""
        places: dict[tuple[str | None, str], list[KubernetesJob]] = {}
        for job in jobs:
            if job.name.kind == "job":
                places.setdefault((job.cluster.context, job.name.namespace), []).append(job)
        for (_, namespace), wanted in places.items():
            cluster = wanted[0].cluster
            listed = cluster.read(path_of("Job", namespace), labelSelector=OURS)
            pods_at = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods"
            pods = cluster.read(pods_at, labelSelector=OURS).get("items") or []
            by_name = {each["metadata"]["name"]: each for each in listed.get("items") or []}
            for job in wanted:
                if found := by_name.get(job.name.name):
                    own = [pod for pod in pods if job.owns(pod)]
                    yield job, JobObjects(found, own)

    def owns(self, pod: Mapping[str, Any]) -> bool:
        labels = (pod.get("metadata") or {}).get("labels") or {}
        return bool(labels.get(INSTANCE) == self.name.name)

    # ---- the store ------------------------------------------------------------------------------

    def store(self, patience: float = 10.0) -> Store | None:
        """The run's store, if it can be read from here; `patience` as for `open_store`."""
        if not self.root or not self.name.run or PVC.fullmatch(self.root):
            return None
        return open_store(f"{self.root.rstrip('/')}/{self.name.run}", patience=patience)

    @property
    def folder(self) -> str:
        return f"attempts/{self.name.attempt:03d}"

    def _kept(self) -> StoredEnd | None:
        """How the attempt ended according to the store; None if that does not say it."""
        store = self.store()
        if store is None:
            return None
        with suppress(StoreError, ValueError):
            cancelled = store.size(f"{self.folder}/{MARK}") is not None
            status = json.loads(store.read(f"{self.folder}/status.json"))
            state = JobState(status.get("state"))
            if state is JobState.SUCCEEDED or not cancelled:
                return StoredEnd(state, status.get("exit_code")) if state.ended else None
            return StoredEnd(JobState.CANCELLED)
        return None

    def fetch(self, to: Path) -> None:
        """Copies the run's store into a folder; `fetch_files` says what it skips."""
        store = self._seen(self.store())
        with store_errors(self.handle):
            names = [name for name in store.names() if not name.startswith("bundles/")]
            with ThreadPoolExecutor(8) as pool:
                sizes = [*pool.map(store.size, names)]
            found = {
                name: size for name, size in zip(names, sizes, strict=True) if size is not None
            }
            # Stores do not all tell the time of a change: what may have changed is copied.
            now = time.time()
            files = {n: RemoteFile(s, now if s < SMALL else 0.0) for n, s in found.items()}
            fetch_files(to, files, store.download)

    def _seen(self, store: Store | None) -> Store:
        if store is None:
            raise UserError.at(
                self.handle,
                what="its store is a volume of the cluster, which this machine does not see",
                remedy="kubectl cp from a pod that mounts the claim",
                code="unreadable",
            )
        return store

    @functools.cached_property
    def _followed(self) -> Store | None:
        return self.store(patience=0.0)

    def read_on(self, name: str, start: int) -> bytes | None:
        """The first pod copies the run there every `launcher.sync` seconds."""
        with store_errors(self.handle):
            return read_on(self._seen(self._followed), name, start)

    def leave(self, name: str, content: bytes) -> None:
        """The ranks read it in the store itself."""
        with store_errors(self.handle):
            leave(self._seen(self._followed), name, content)

    # ---- the end --------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ends the job. Its pods get SIGTERM and the grace period, and the job is kept until its
        ttl."""
        job = self.cluster.read(self.path)
        if states.verdict(JobObjects(job)).state.ended:
            return
        if self.name.kind == "trainjob":
            self._mark()
            self.cluster.delete(self.path)
            return
        self._end(job, CANCELLED)

    def _end(self, job: Object, why: str) -> None:
        """Lets the time limit of a Job end it at once: it is then kept with its state, which a
        deleted one is not."""
        note = {"annotations": {ENDED: why}}
        if (job.get("spec") or {}).get("suspend"):
            # Its time does not run yet. So it starts: without pods, and past its queue.
            metadata = {**note, "labels": {QUEUE: None}}
            self.cluster.patch(self.path, {"metadata": metadata, "spec": {"parallelism": 0}})
            spec = {"suspend": False, "activeDeadlineSeconds": 1}
            self.cluster.patch(self.path, {"spec": spec})
            return
        self.cluster.patch(self.path, {"metadata": note, "spec": {"activeDeadlineSeconds": 1}})

    def _give_up(self, found: JobObjects, why: str) -> bool:
        """Ends a job that cannot start. False if this user may not."""
        try:
            if self.name.kind == "trainjob":
                self.cluster.delete(self.path)
            else:
                self._end(found.job, why)
        except UserError:
            return False
        return True

    def _mark(self) -> None:
        """Notes in the store that the user has ended the job."""
        with suppress(StoreError), tempfile.NamedTemporaryFile() as file:
            if store := self.store():
                store.replace(Path(file.name), f"{self.folder}/{MARK}")

    # ---- logs -----------------------------------------------------------------------------------

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Lines of all pods; those of pods other than the first begin with their number. Once the
        pods are gone, the logs of the ranks from the store."""
        if follow:
            yield from self._follow()
            return
        try:
            pods = self.pods() if self.cluster.read(self.path) else []
        except Forgotten:
            yield from self._stored_logs()
            return
        seen = False
        for pod in sorted(pods, key=lambda pod: (states.started(pod), states.index_of(pod))):
            for line in self._lines(pod, follow=False):
                seen = True
                yield line
        if not seen and self.store() is not None and not states.live(pods):
            yield from self._stored_logs()

    def node_of(self, line: str) -> tuple[int, str]:
        label = LABEL.match(line)
        return (int(label[1]), line[label.end() :]) if label else (0, line)

    def _follow(self) -> Iterator[str]:
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        readers: dict[str, threading.Thread] = {}
        waits = ""
        silent_since: float | None = None
        while True:
            state = self.state()
            if state is JobState.UNKNOWN and not self.reached:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > self.patience:
                    raise UserError.at(self.handle, what=self.why, code="unreachable")
            elif state is JobState.UNKNOWN:
                return  # forgotten: `wait` says it
            else:
                silent_since = None
            if state is JobState.PENDING and self.why != waits:
                waits = self.why
                yield f"waits: {waits}"
            with suppress(UserError):
                for pod in self.pods():
                    uid = str(pod["metadata"]["uid"])
                    if uid not in readers and not state_is_waiting(pod):
                        readers[uid] = threading.Thread(
                            target=self._read, args=(pod, lines), daemon=True
                        )
                        readers[uid].start()
            deadline = time.monotonic() + (LOGS_S if state.ended else self.poll_seconds)
            while (left := deadline - time.monotonic()) > 0:
                with suppress(queue.Empty):
                    yield lines.get(timeout=left)
            if state.ended:
                return

    def _read(self, pod: Object, lines: queue.SimpleQueue[str]) -> None:
        """Follows a pod's log until its container has ended, also when the connection breaks."""
        read = 0
        for _ in range(3):
            with suppress(UserError):
                for number, line in enumerate(self._lines(pod, follow=True)):
                    if number >= read:
                        read = number + 1
                        lines.put(line)
                return
            time.sleep(1)

    def _lines(self, pod: Object, follow: bool) -> Iterator[str]:
        names = [each.get("name") for each in (pod.get("spec") or {}).get("containers") or []]
        container = next((name for name in names if name in (CONTAINER, NODE)), CONTAINER)
        index = states.index_of(pod)
        label = f"[{index}] " if index else ""
        namespace = quote(self.name.namespace, safe="")
        name = quote(str(pod["metadata"]["name"]), safe="")
        place = f"/api/v1/namespaces/{namespace}/pods/{name}/log"
        rest = b""
        try:
            for piece in self.cluster.stream(place, follow, container=container):
                *complete, rest = (rest + piece).split(b"\n")
                yield from (label + line.decode(errors="replace") for line in complete)
        except Lasting:
            if follow:
                raise
            return  # the pod is gone, or its container has not started
        if rest:
            yield label + rest.decode(errors="replace")

    def _stored_logs(self) -> Iterator[str]:
        store = self.store()
        if store is None:
            raise UserError.at(
                self.handle,
                what="its pods are gone, and with them their logs; its store is not seen from here",
                remedy="the ranks' logs are in the volume, in logs/",
                code="unreadable",
            )
        try:
            names = [n for n in store.names(f"{self.folder}/logs/rank_") if n.endswith(".log")]
            if not names:
                raise UserError.at(
                    self.handle,
                    what="its pods are gone, and the store has no log of it",
                    code="not-found",
                )
            for name in sorted(
                names, key=lambda name: int("0" + "".join(filter(str.isdigit, name)))
            ):
                rank = name.rpartition("_")[2].removesuffix(".log")
                label = "" if rank == "0" else f"[rank {rank}] "
                for line in store.read(name).decode(errors="replace").splitlines():
                    yield label + line
        except StoreError as error:
            raise UserError.at(
                self.handle, what=str(error), remedy=error.remedy, code=error.code
            ) from error


def state_is_waiting(pod: Object) -> bool:
    """Whether its container has no log yet."""
    state = states.state_of(pod)
    return not (state.get("running") or state.get("terminated"))
