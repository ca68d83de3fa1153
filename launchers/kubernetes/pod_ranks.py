"""The ranks of a pod: waits for the other pods, starts the ranks, and ends when another pod ends.

So that all pods join the next start, a pod that has only lost another one ends with 75. The first
pod numbers the starts of an attempt, in start.json of the attempt's folder in the store.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distdl.launchers.common import attempt_at
from distdl.launchers.heartbeat import PATIENCE_SECONDS, VANISHED, Heartbeat, HostEnd
from distdl.launchers.kubernetes.first_process import Stop, reap
from distdl.launchers.kubernetes.mirror import Mirror, say
from distdl.stores import is_remote
from distdl.util.errors import StoreError, UserError
from distdl.util.exit_codes import (
    EXIT_CANCELLED,
    EXIT_FAILURE,
    EXIT_PREEMPTED,
    EXIT_REFUSED,
    GRACEFUL,
    as_shell,
)

POLL_S = 0.2
SETTLE_S = 5.0  # after a failure, for the other pods to say how they ended
FAILED_GRACE_S = 5.0  # when a pod has failed, the ranks of the others cannot save
START = "start.json"


@dataclass(frozen=True)
class Pod:
    """This pod and its job. `grace` is in seconds, from SIGTERM to SIGKILL."""

    index: int
    address: str
    bundle: Path
    store: str
    nodes: int
    devices: int
    attempt: int
    first: str
    port: int
    grace: int
    wait: int
    sync: int
    job: str

    @property
    def names(self) -> list[str]:
        """The first pod has the name by which the others reach it."""
        return [self.first, *(f"pod-{index}" for index in range(1, self.nodes))]

    @property
    def is_first(self) -> bool:
        return self.index == 0


class PodRanks:
    """The ranks of this pod, from their start to their end."""

    def __init__(self, pod: Pod, stop: Stop) -> None:
        self.pod = pod
        self.stop = stop
        self.mirror: Mirror | None = None
        self.store = Path(pod.store)
        if is_remote(pod.store):
            self.store = pod.bundle.parent / "store"
            self.mirror = Mirror(pod.store, self.store)
        self.folder = self.store / "attempts" / f"{pod.attempt:03d}"
        self.ask_next = 0.0

    # ---- before the ranks -----------------------------------------------------------------------

    def run(self) -> HostEnd:
        pod = self.pod
        self.store.mkdir(parents=True, exist_ok=True)
        self.get_code()
        record = self.record()
        if record.get("done"):
            return HostEnd(0, "all ranks had ended")
        if pod.is_first and self.mirror:
            self.mirror.restore(self.stop)
        number = int(record.get("number", 0)) + 1
        try:
            heartbeat = Heartbeat(
                pod.names,
                pod.names[pod.index],
                pod.port - 1,
                address=pod.address,
                gathers=True,
                number=number,
                connect_seconds=pod.wait,
            )
        except OSError as error:
            what = f"port {pod.port - 1} (launcher.port - 1) cannot be used: {error}"
            return HostEnd(EXIT_FAILURE, what, time.time())
        if end := self.gather(heartbeat):
            return end
        if pod.is_first:
            self.write_record({"number": number})
        elif self.mirror:  # the first pod's last start has stored everything by now
            self.mirror.restore(self.stop)
        say(f"start {heartbeat.number} of attempt {pod.attempt}: all {pod.nodes} pods are there")
        if self.mirror:
            self.mirror.start(pod.sync)
        return self.conclude(self.watch(heartbeat), heartbeat)

    def get_code(self) -> None:
        """Adds the user's code and the run's inputs, if they were too much to be sent with the
        job."""
        bundle = self.pod.bundle
        in_image = (bundle / "code").is_symlink()
        provenance = bundle / "provenance.json"
        named = json.loads(provenance.read_bytes()).get("inputs") if provenance.exists() else None
        lacks_inputs = bool(named) and not (bundle / "inputs").exists()
        lacks_code = not in_image and not (bundle / "code" / "project").exists()
        if self.mirror is None or not (lacks_code or lacks_inputs):
            return
        archive = self.pod.bundle.parent / "project.tar.gz"
        self.mirror.store.download(f"bundles/{self.pod.job}.tar.gz", archive)
        with tarfile.open(archive) as tar:
            tar.extractall(bundle, filter="data")

    def record(self) -> dict[str, Any]:
        """The number of the last start, and whether everything is `done`."""
        name = f"attempts/{self.pod.attempt:03d}/{START}"
        with suppress(ValueError, OSError):
            if self.mirror is None:
                return dict(json.loads((self.store / name).read_bytes()))
            if self.mirror.store.size(name) is not None:
                return dict(json.loads(self.mirror.store.read(name)))
        return {}

    def write_record(self, record: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{START}"
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(self.folder / START)
        if self.mirror:
            self.mirror.send([(self.folder / START).relative_to(self.store).as_posix()])

    def gather(self, heartbeat: Heartbeat) -> HostEnd | None:
        """Waits until all pods are there. How this pod ends if they do not come."""
        deadline = time.monotonic() + self.pod.wait
        while not heartbeat.gathered.wait(POLL_S):
            reap()
            if self.stop():
                return HostEnd(EXIT_PREEMPTED, "stopped by a signal before it started", time.time())
            if self.record_done():
                return HostEnd(0, "all ranks had ended")
            if time.monotonic() > deadline:
                missing = [n for n in heartbeat.names if n not in heartbeat.came]
                missing.remove(heartbeat.current)
                who = ", ".join(missing) if self.pod.is_first else self.pod.first
                what = f"{who} did not come within {self.pod.wait} s (launcher.wait)"
                return HostEnd(EXIT_FAILURE, what, time.time())
        return None

    def record_done(self) -> bool:
        """Asked now and then: a pod that comes late, after the first one has ended."""
        now = time.monotonic()
        if self.pod.is_first or now < self.ask_next:
            return False
        self.ask_next = now + 5
        return bool(self.record().get("done"))

    # ---- the ranks ------------------------------------------------------------------------------

    def command(self) -> list[str]:
        pod = self.pod
        options = (
            f"--nodes={pod.nodes}",
            f"--node-rank={pod.index}",
            f"--devices={pod.devices}",
            f"--main-address={pod.first}",
            f"--main-port={pod.port}",
            f"--grace-seconds={max(5, pod.grace * 3 // 4)}",
        )
        worker = [str(pod.bundle), str(self.store), "--attempt", str(pod.attempt)]
        return [sys.executable, "-m", "distdl.agent", *options, "--", *worker]

    def watch(self, heartbeat: Heartbeat) -> HostEnd:
        """Starts the ranks and waits for their end, or ends them because another pod has ended."""
        agent = subprocess.Popen(self.command())
        self.stop.agent = agent
        if self.stop():
            agent.terminate()
        since: dict[str, float] = {}
        while (code := agent.poll()) is None:
            reap(agent.pid)
            for name, end in heartbeat.ends().items():
                since.setdefault(name, time.monotonic())
                if end.code == 0:
                    continue  # it waits for us
                # After one that was asked to end, the ranks here save and end by themselves.
                graceful = end.code in GRACEFUL or self.stop()
                grace = self.pod.grace * 3 // 4 if graceful else FAILED_GRACE_S
                if time.monotonic() - since[name] > grace:
                    agent.kill()  # its ranks end with it
                    agent.wait()
                    return HostEnd(EXIT_PREEMPTED, f"{name}: {end.why}", end.time)
            time.sleep(POLL_S)
        return self.own_end(as_shell(code))

    def own_end(self, code: int) -> HostEnd:
        """How the ranks of this pod ended, with the first error of one of them."""
        if code == EXIT_FAILURE and self.stop():  # the agent's code after every signal
            return HostEnd(self.stopped(), "stopped by a signal", time.time())
        first = self.first_error()
        if code in GRACEFUL or first is None:
            return HostEnd(code, f"the ranks ended with exit code {code}", time.time())
        what = f"rank {first['rank']}: {first['type']}: {first['message']}"
        return HostEnd(code, what, float(first["time"]))

    def stopped(self) -> int:
        with suppress(UserError):  # status.json was truncated while being written
            status = attempt_at(self.folder).status()
            if self.pod.is_first and status.get("ended"):
                return int(status["exit_code"])
        return EXIT_PREEMPTED

    def first_error(self) -> dict[str, Any] | None:
        """The first error of this pod's ranks. A volume has also the errors of others."""
        first: dict[str, Any] | None = None
        low = self.pod.index * self.pod.devices
        for rank in range(low, low + self.pod.devices):
            with suppress(OSError, ValueError):
                error = json.loads((self.folder / "errors" / f"rank_{rank}.json").read_bytes())
                if first is None or worse(error) < worse(first):
                    first = error
        return first

    # ---- after the ranks ------------------------------------------------------------------------

    def conclude(self, end: HostEnd, heartbeat: Heartbeat) -> HostEnd:
        """The pod's end: what it stores, what it tells the others, and its exit code."""
        if end.code not in (*GRACEFUL, EXIT_REFUSED):
            end = self.cause(end, heartbeat)
        if end.code == EXIT_CANCELLED:  # Ctrl-C has no meaning here
            end = HostEnd(EXIT_PREEMPTED, end.why, end.time)
        if end.code != 0:
            heartbeat.report_end(end)
            self.send_all()
            return end
        if not self.send_all():
            end = HostEnd(EXIT_FAILURE, "the store did not take the last files", time.time())
            heartbeat.report_end(end)
            return end
        return self.together(end, heartbeat)

    def together(self, end: HostEnd, heartbeat: Heartbeat) -> HostEnd:
        """No pod succeeds alone: its index would not be started again if another one has to be. The
        first pod waits for all others, and they wait for it."""
        others = [name for name in heartbeat.names if name != heartbeat.current]
        if not self.pod.is_first:
            heartbeat.report_end(end)
            others = [self.pod.first]
        while True:
            reap()
            ends = heartbeat.ends()
            if failed := [(name, ends[name]) for name in others if ends.get(name, end).code != 0]:
                name, other = failed[0]
                lost = HostEnd(EXIT_PREEMPTED, f"{name}: {other.why}", other.time)
                if self.pod.is_first:
                    heartbeat.report_end(lost)
                return lost
            if all(name in ends for name in others):
                break
            time.sleep(POLL_S)
        if self.pod.is_first:
            self.write_record({**self.record(), "done": True})
            heartbeat.report_end(end)
        return end

    def cause(self, end: HostEnd, heartbeat: Heartbeat) -> HostEnd:
        """Whether this pod has failed by itself, or only lost another one: then it ends with 75."""
        first = self.first_error() or {}
        lost = bool(first.get("lost_peer"))
        # Another pod that is cut off says nothing for a while.
        deadline = time.monotonic() + (PATIENCE_SECONDS + SETTLE_S if lost else SETTLE_S)
        while time.monotonic() < deadline:
            reap()
            for name, other in heartbeat.ends().items():
                before = other.code == VANISHED or other.time <= end.time
                if other.code != 0 and (lost or before):
                    return HostEnd(EXIT_PREEMPTED, f"{name}: {other.why}", other.time)
            time.sleep(POLL_S)
        return end

    def send_all(self) -> bool:
        if self.mirror is None:
            return True
        try:
            self.mirror.end()
        except (StoreError, OSError) as error:
            say(f"the store did not take the last files: {error}")
            return False
        return True


def worse(error: Mapping[str, Any]) -> tuple[bool, float]:
    return bool(error.get("lost_peer")), float(error.get("time") or 0)
