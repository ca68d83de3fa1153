"""What SageMaker starts in the container of every host, as a module of the bundle.

It reads who takes part, fetches the forwarded secrets, starts this host's ranks by `distdl.agent`,
and ends with the other hosts. The code is that of the bundle; SageMaker keeps /opt/ml/checkpoints,
the store, equal to the run's prefix in S3.
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

from distdl.job import EXIT_CANCELLED, EXIT_FAILURE, EXIT_PREEMPTED
from distdl.launchers.common import attempt_at
from distdl.launchers.sagemaker.heartbeat import VANISHED, Heartbeat, HostEnd
from distdl.launchers.sagemaker.sagemaker_request import REGION, SECRETS
from distdl.launchers.sagemaker.sagemaker_settings import instances
from distdl.util.errors import UserError

ROOT = "DISTDL_SAGEMAKER_ROOT"  # in place of /opt/ml
RESOURCES = "input/config/resourceconfig.json"  # below /opt/ml
PORT = 29500  # where the primary host keeps the ranks' store
POLL_SECONDS = 0.2
# SageMaker leaves 120 s from SIGTERM to SIGKILL; in less than that a host reports how it ended.
GRACE_SECONDS = 100
# After another host has failed, its ranks are missing: the others only have to notice.
FAILED_GRACE_SECONDS = 5
SETTLE_SECONDS = 3  # after a failure, for the others to report how they ended
MOST_OF_A_FAILURE = 1024  # characters that SageMaker shows of /opt/ml/output/failure
AGREED = (0, EXIT_PREEMPTED, EXIT_CANCELLED)


@dataclass(frozen=True)
class Hosts:
    """Who takes part, and who this is. The first host is the primary one: rank 0 lives there."""

    names: tuple[str, ...]
    current: str
    interface: str = ""
    instance_type: str = ""

    @classmethod
    def read(cls, root: Path) -> Hosts:
        """From resourceconfig.json below `root`.

        Source: "Distributed training configuration" of
        https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
        """
        config = json.loads((root / RESOURCES).read_text())

        def by_number(name: str) -> list[int | str]:
            # algo-10 comes after algo-2: every host must see the same order.
            return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", name)]

        return cls(
            tuple(sorted(config["hosts"], key=by_number)),
            config["current_host"],
            config.get("network_interface_name", ""),
            config.get("current_instance_type", ""),
        )

    @property
    def number(self) -> int:
        return self.names.index(self.current)

    @property
    def primary(self) -> str:
        return self.names[0]

    def environment(self) -> dict[str, str]:
        """How the libraries that carry gradients are to talk; a variable that is set already wins.

        EFA: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-start-nccl.html
        """
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME") if self.interface else ()
        instance = instances().get(self.instance_type)
        efa = instance is not None and instance.efa and len(self.names) > 1
        return dict.fromkeys(names, self.interface) | ({"FI_PROVIDER": "efa"} if efa else {})

    def await_primary(self, seconds: float = 300) -> None:
        """DNS may know the name of the other host a little later than this one runs."""
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
    """Runs one host's share of an attempt and returns the container's exit code."""
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
    except Exception as error:
        code, why = EXIT_FAILURE, f"{type(error).__name__}: {error}"
    if code:
        print(f"distdl: {why}", file=sys.stderr, flush=True)
        failure = root / "output" / "failure"
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write_text(why[:MOST_OF_A_FAILURE])
    return code


def secrets(env: Mapping[str, str]) -> dict[str, str]:
    """Values of the forwarded variables, read as the job's role. They are printed nowhere."""
    names = json.loads(env.get(SECRETS) or "{}")
    if not names:
        return {}
    import boto3

    client = boto3.client("secretsmanager", region_name=env.get(REGION))
    return {
        name: client.get_secret_value(SecretId=secret)["SecretString"]
        for name, secret in names.items()
    }


class HostRanks:
    """This host's ranks, from their start to their end."""

    def __init__(self, hosts: Hosts, root: Path, devices: int, attempt: int) -> None:
        self.hosts, self.devices, self.number = hosts, devices, attempt
        self.store = root / "checkpoints"
        self.bundle = root / "distdl"
        self.stopping = False

    def command(self) -> list[str]:
        worker = [str(self.bundle), str(self.store), "--attempt", str(self.number)]
        agent = {
            "--nodes": len(self.hosts.names),
            "--node-rank": self.hosts.number,
            "--devices": self.devices,
            "--main-address": self.hosts.primary,
            "--main-port": PORT,
            "--grace-seconds": GRACE_SECONDS,
        }
        options = [word for pair in agent.items() for word in map(str, pair)]
        return [sys.executable, "-m", "distdl.agent", *options, "--", *worker]

    def run(self, env: dict[str, str]) -> HostEnd:
        """Returns how this host ended; its code is an exit code."""
        self.store.mkdir(parents=True, exist_ok=True)
        heartbeat = Heartbeat(self.hosts.names, self.hosts.current)
        agent = subprocess.Popen(self.command(), env=env)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, frame: self.pass_on(agent, n, frame))
        end = self.watch(agent, heartbeat)
        if end.code == EXIT_FAILURE and self.stopping:
            end = HostEnd(self.stopped(), "stopped by a signal", time.time())
        heartbeat.report_end(end)
        return end if end.code in AGREED else self.first_cause(end, heartbeat)

    def pass_on(self, agent: subprocess.Popen[bytes], number: int, _: FrameType | None) -> None:
        self.stopping = True
        if agent.poll() is None:
            agent.send_signal(number)

    def watch(self, agent: subprocess.Popen[bytes], heartbeat: Heartbeat) -> HostEnd:
        """Until the ranks here have ended, or another host ends them."""
        since: dict[str, float] = {}
        while (code := agent.poll()) is None:
            for name, end in heartbeat.ends().items():
                since.setdefault(name, time.monotonic())
                if end.code == 0 and name != self.hosts.primary:
                    continue  # only the primary host's success is everybody's end
                # One that ended as agreed leaves the others time to finish.
                agreed = end.code in AGREED or self.stopping
                grace = GRACE_SECONDS if agreed else FAILED_GRACE_SECONDS
                if time.monotonic() - since[name] > grace:
                    self.end(agent)
                    code = EXIT_FAILURE if end.code == VANISHED else end.code
                    return HostEnd(code, end.why, end.time)
            time.sleep(POLL_SECONDS)
        return self.first_error(code if code >= 0 else 128 - code)

    def first_cause(self, mine: HostEnd, heartbeat: Heartbeat) -> HostEnd:
        """Ranks fail because another one did: name the one that began it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and len(heartbeat.ends()) < len(self.hosts.names) - 1:
            time.sleep(POLL_SECONDS)
        failed = [end for end in heartbeat.ends().values() if end.code not in AGREED]
        first = min([mine, *failed], key=lambda end: end.time)
        return HostEnd(mine.code, first.why, first.time)

    def end(self, agent: subprocess.Popen[bytes]) -> None:
        """Ranks die with their agent: nothing that waits for a lost host can be saved here."""
        agent.kill()
        agent.wait()

    def stopped(self) -> int:
        """The agent ends with 1 for any signal; the primary host's status.json knows better."""
        try:
            status = attempt_at(self.folder).status()
        except UserError:  # cut while it was written
            status = {}
        known = self.hosts.number == 0 and status.get("ended")
        return int(status["exit_code"]) if known else EXIT_PREEMPTED

    @property
    def folder(self) -> Path:
        return self.store / "attempts" / f"{self.number:03d}"

    def first_error(self, code: int) -> HostEnd:
        """The earliest failure of a rank on this host, redacted when it was written."""
        if code == 0:
            return HostEnd(0)
        first = attempt_at(self.folder).first_error()
        if first is None:
            return HostEnd(
                code,
                f"the ranks on {self.hosts.current} ended without a recorded error",
                time.time(),
            )
        why = f"rank {first['rank']} on {first['host']}: {first['type']}: {first['message']}"
        return HostEnd(code, why, first["time"])


if __name__ == "__main__":
    sys.exit(main())
