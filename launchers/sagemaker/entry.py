"""The entry point that SageMaker starts in the container of every host, from the bundle.

It reads the list of hosts, fetches the forwarded secrets, starts this host's ranks with
`distdl.agent`, and ends when the other hosts end. SageMaker copies the store, /opt/ml/checkpoints,
to the run's prefix in S3.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from distdl.launchers.common import attempt_at
from distdl.launchers.heartbeat import VANISHED, Heartbeat, HostEnd
from distdl.launchers.sagemaker.instances import instances
from distdl.launchers.sagemaker.sagemaker_request import REGION, SECRETS
from distdl.util.errors import UserError
from distdl.util.exit_codes import EXIT_FAILURE, EXIT_PREEMPTED, GRACEFUL, as_shell

ROOT = "DISTDL_SAGEMAKER_ROOT"  # a folder to use instead of /opt/ml
RESOURCES = "input/config/resourceconfig.json"  # below /opt/ml
PORT = 29500  # of the ranks' rendezvous store on the primary host
POLL_SECONDS = 0.2
# SageMaker sends SIGKILL 120 s after SIGTERM. In the remaining time a host reports how it ended.
GRACE_SECONDS = 100
# When a host has failed, the other ranks cannot save; they only need time to fail as well.
FAILED_GRACE_SECONDS = 5
SETTLE_SECONDS = 3  # after a failure, for the other hosts to report how they ended
FAILURE_LENGTH = 1024  # characters of /opt/ml/output/failure that SageMaker shows


def _by_number(name: str) -> list[int | str]:
    """Sorts algo-10 behind algo-2: every host needs the same order."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


@dataclass(frozen=True)
class Hosts:
    """All hosts of the job, and the current one. The first is the primary host: it runs rank 0."""

    names: tuple[str, ...]
    current: str
    interface: str = ""
    instance_types: tuple[str, ...] = ()

    @classmethod
    def read(cls, root: Path) -> Hosts:
        """Reads resourceconfig.json below `root`.

        Source: "Distributed training configuration" of
        https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
        """
        config = json.loads((root / RESOURCES).read_text())
        groups = config.get("instance_groups") or ()
        types = [group.get("instance_type", "") for group in groups]
        return cls(
            names=tuple(sorted(config["hosts"], key=_by_number)),
            current=config["current_host"],
            interface=config.get("network_interface_name", ""),
            instance_types=tuple(types or [config.get("current_instance_type")]),
        )

    @property
    def number(self) -> int:
        return self.names.index(self.current)

    @property
    def primary(self) -> str:
        return self.names[0]

    def environment(self) -> dict[str, str]:
        """Network variables for NCCL and Gloo. Variables that are already set take precedence.

        EFA: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html
        """
        variables = {}
        if self.interface:
            variables["NCCL_SOCKET_IFNAME"] = self.interface
            variables["GLOO_SOCKET_IFNAME"] = self.interface
        known = [instances().get(str(name)) for name in self.instance_types]
        if len(self.names) > 1 and all(instance and instance.efa for instance in known):
            variables["FI_PROVIDER"] = "efa"
        return variables

    def await_primary(self, seconds: float = 300) -> None:
        """Waits until DNS resolves the primary host's name, maybe some time after the start."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                socket.getaddrinfo(self.primary, None)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs this host's ranks of an attempt and returns the container's exit code."""
    parser = argparse.ArgumentParser("python -m distdl.launchers.sagemaker.entry")
    parser.add_argument("--devices", type=int, required=True, help="ranks on this host")
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args(argv)
    root = Path(os.environ.get(ROOT, "/opt/ml"))
    try:
        hosts = Hosts.read(root)
        print(
            f"distdl: host {hosts.current}, {hosts.number + 1} of {len(hosts.names)}, primary "
            f"{hosts.primary}, interface {hosts.interface or 'unknown'}, {options.devices} ranks",
            flush=True,
        )
        env = {**hosts.environment(), **os.environ, **secrets(os.environ)}
        hosts.await_primary()
        end = HostRanks(hosts, root, options.devices, options.attempt).run(env)
        code, why = end.code, end.why
    except Exception as error:  # SageMaker shows what is in the file `failure`
        code = EXIT_FAILURE
        why = f"{type(error).__name__}: {error}"
    if code:
        print(f"distdl: {why}", file=sys.stderr, flush=True)
        failure = root / "output" / "failure"
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write_text(why[:FAILURE_LENGTH])
    return code


def secrets(env: Mapping[str, str]) -> dict[str, str]:
    """The forwarded variables' values, read with the job's role. They must not be printed."""
    parts = [value for name, value in env.items() if re.fullmatch(rf"{SECRETS}(_\d+)?", name)]
    names = {name: secret for part in parts for name, secret in json.loads(part or "{}").items()}
    if not names:
        return {}
    import boto3
    from botocore.config import Config

    config = Config(connect_timeout=10, read_timeout=20)  # seconds; by default 60 each
    client = boto3.client("secretsmanager", region_name=env.get(REGION), config=config)
    read = client.get_secret_value
    return {name: read(SecretId=secret)["SecretString"] for name, secret in names.items()}


class HostRanks:
    """Runs the ranks of this host."""

    def __init__(self, hosts: Hosts, root: Path, devices: int, attempt: int) -> None:
        self.hosts = hosts
        self.devices = devices
        self.number = attempt
        self.store = root / "checkpoints"
        self.bundle = root / "distdl"
        self.folder = self.store / "attempts" / f"{attempt:03d}"
        self.stopping = False

    def command(self) -> list[str]:
        options = (
            f"--nodes={len(self.hosts.names)}",
            f"--node-rank={self.hosts.number}",
            f"--devices={self.devices}",
            f"--main-address={self.hosts.primary}",
            f"--main-port={PORT}",
            f"--grace-seconds={GRACE_SECONDS}",
        )
        worker = [str(self.bundle), str(self.store), "--attempt", str(self.number)]
        return [sys.executable, "-m", "distdl.agent", *options, "--", *worker]

    def run(self, env: dict[str, str]) -> HostEnd:
        """Runs the ranks; returns how this host ended, with an exit code."""
        self.store.mkdir(parents=True, exist_ok=True)
        heartbeat = Heartbeat(self.hosts.names, self.hosts.current)
        agent = subprocess.Popen(self.command(), env=env)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, frame: self.forward(agent, n, frame))
        end = self.watch(agent, heartbeat)
        if end.code == EXIT_FAILURE and self.stopping:
            end = HostEnd(self.stopped(), "stopped by a signal", time.time())
        heartbeat.report_end(end)
        return end if end.code in GRACEFUL else self.first_cause(end, heartbeat)

    def forward(self, agent: subprocess.Popen[bytes], number: int, _: FrameType | None) -> None:
        self.stopping = True
        if agent.poll() is None:
            agent.send_signal(number)

    def watch(self, agent: subprocess.Popen[bytes], heartbeat: Heartbeat) -> HostEnd:
        """Waits until this host's ranks have ended, or ends them because another host has ended."""
        since: dict[str, float] = {}
        while (code := agent.poll()) is None:
            for name, end in heartbeat.ends().items():
                since.setdefault(name, time.monotonic())
                if end.code == 0 and name != self.hosts.primary:
                    continue  # only the primary host's success ends the other hosts
                # After a host that ended gracefully, the others get time to finish.
                graceful = end.code in GRACEFUL or self.stopping
                grace = GRACE_SECONDS if graceful else FAILED_GRACE_SECONDS
                if time.monotonic() - since[name] > grace:
                    agent.kill()  # its ranks end with it: they cannot save without the lost host
                    agent.wait()
                    code = EXIT_FAILURE if end.code == VANISHED else end.code
                    return HostEnd(code, end.why, end.time)
            time.sleep(POLL_SECONDS)
        return self.first_error(as_shell(code))

    def first_cause(self, end: HostEnd, heartbeat: Heartbeat) -> HostEnd:
        """This host's exit code, with the earliest failure of all hosts as the cause."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and len(heartbeat.ends()) < len(self.hosts.names) - 1:
            time.sleep(POLL_SECONDS)
        failed = [other for other in heartbeat.ends().values() if other.code not in GRACEFUL]
        first = min([end, *failed], key=lambda each: each.time)
        return HostEnd(end.code, first.why, first.time)

    def stopped(self) -> int:
        """The exit code after a signal. The agent exits with 1 after every signal, so the primary
        host reads the code in status.json, and the others assume a preemption."""
        try:
            status = attempt_at(self.folder).status()
        except UserError:  # status.json was truncated while being written
            status = {}
        known = self.hosts.number == 0 and status.get("ended")
        return int(status["exit_code"]) if known else EXIT_PREEMPTED

    def first_error(self, code: int) -> HostEnd:
        """The earliest failure of a rank on this host; its message was redacted when written."""
        if code == 0:
            return HostEnd(0)
        first = attempt_at(self.folder).first_error()
        if first is None:
            why = f"the ranks on {self.hosts.current} ended without recording an error"
            return HostEnd(code, why, time.time())
        why = f"rank {first['rank']} on {first['host']}: {first['type']}: {first['message']}"
        return HostEnd(code, why, first["time"])


if __name__ == "__main__":
    sys.exit(main())
