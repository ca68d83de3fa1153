"""What SageMaker starts in the container of every host, as a module of the bundle.

It reads who takes part, fetches the forwarded secrets, starts this host's ranks by `distdl.agent`,
and ends with the other hosts. The code is that of the bundle; SageMaker keeps /opt/ml/checkpoints,
the store, equal to the run's place in S3.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from distdl.job import EXIT_CANCELLED, EXIT_FAILURE, EXIT_PREEMPTED
from distdl.launchers.sagemaker import hosts
from distdl.launchers.sagemaker.hosts import Hosts
from distdl.launchers.sagemaker.request import REGION, SECRETS
from distdl.launchers.sagemaker.together import VANISHED, End, Together

ROOT = "DISTDL_SAGEMAKER_ROOT"  # in place of /opt/ml
PORT = 29500  # where the primary host keeps the ranks' store
POLL_SECONDS = 0.2
# SageMaker leaves 120 s from SIGTERM to SIGKILL; in less than that a host says how it ended.
GRACE_SECONDS = 100
# After another host has failed, its ranks are missing: the others only have to notice.
FAILED_GRACE_SECONDS = 5
SETTLE_SECONDS = 3  # after a failure, for the others to say how they fared
MOST_OF_A_FAILURE = 1024  # characters that SageMaker shows of /opt/ml/output/failure
AGREED = (0, EXIT_PREEMPTED, EXIT_CANCELLED)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one host's share of an attempt and returns the container's exit code."""
    parser = argparse.ArgumentParser("python -m distdl.launchers.sagemaker.entry")
    parser.add_argument("--devices", type=int, required=True, help="ranks on this host")
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args(argv)
    root = Path(os.environ.get(ROOT, "/opt/ml"))
    try:
        here = hosts.read(root)
        print(
            f"distdl: host {here.current}, {here.number + 1} of {len(here.names)}, primary "
            f"{here.primary}, interface {here.interface or 'unknown'}, {options.devices} ranks",
            flush=True,
        )
        env = {**here.environment(), **os.environ, **secrets(os.environ)}
        here.await_primary()
        end = Host(here, root, options.devices, options.attempt).run(env)
        code, why = end.code, end.why
    except Exception as error:
        code, why = EXIT_FAILURE, f"{type(error).__name__}: {error}"
    if code:
        print(f"distdl: {why}", file=sys.stderr, flush=True)
        failure = root / "output" / "failure"
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write_text(why[:MOST_OF_A_FAILURE])
    return code


def secrets(env: Any) -> dict[str, str]:
    """Values of the forwarded variables, asked for as the job's role. They are printed nowhere."""
    names = json.loads(env.get(SECRETS) or "{}")
    if not names:
        return {}
    import boto3

    client = boto3.client("secretsmanager", region_name=env.get(REGION))
    return {
        name: client.get_secret_value(SecretId=secret)["SecretString"]
        for name, secret in names.items()
    }


class Host:
    """This host's ranks, from their start to their end."""

    def __init__(self, here: Hosts, root: Path, devices: int, attempt: int) -> None:
        self.here, self.devices, self.number = here, devices, attempt
        self.store = root / "checkpoints"
        self.bundle = root / "distdl"
        self.told_to_stop = False

    def command(self) -> list[str]:
        worker = [str(self.bundle), str(self.store), "--attempt", str(self.number)]
        agent = {
            "--nodes": len(self.here.names),
            "--node-rank": self.here.number,
            "--devices": self.devices,
            "--main-address": self.here.primary,
            "--main-port": PORT,
            "--grace-seconds": GRACE_SECONDS,
        }
        given = [word for pair in agent.items() for word in map(str, pair)]
        return [sys.executable, "-m", "distdl.agent", *given, "--", *worker]

    def run(self, env: dict[str, str]) -> End:
        """Returns how this host ended; its code is an exit code."""
        self.store.mkdir(parents=True, exist_ok=True)
        together = Together(self.here)
        agent = subprocess.Popen(self.command(), env=env)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda n, frame: self.pass_on(agent, n, frame))
        end = self.watch(agent, together)
        if end.code == EXIT_FAILURE and self.told_to_stop:
            end = End(self.stopped(), "stopped by a signal", time.time())
        together.say_end(end)
        return end if end.code in AGREED else self.first_cause(end, together)

    def pass_on(self, agent: subprocess.Popen[bytes], number: int, _: FrameType | None) -> None:
        self.told_to_stop = True
        if agent.poll() is None:
            agent.send_signal(number)

    def watch(self, agent: subprocess.Popen[bytes], together: Together) -> End:
        """Until the ranks here have ended, or another host ends them."""
        since: dict[str, float] = {}
        while (code := agent.poll()) is None:
            for name, end in together.ends().items():
                since.setdefault(name, time.monotonic())
                if end.code == 0 and name != self.here.primary:
                    continue  # only the primary host's success is everybody's end
                # One that ended as agreed leaves the others time to finish.
                agreed = end.code in AGREED or self.told_to_stop
                grace = GRACE_SECONDS if agreed else FAILED_GRACE_SECONDS
                if time.monotonic() - since[name] > grace:
                    self.end(agent)
                    code = EXIT_FAILURE if end.code == VANISHED else end.code
                    return End(code, end.why, end.time)
            time.sleep(POLL_SECONDS)
        return self.first_error(code if code >= 0 else 128 - code)

    def first_cause(self, mine: End, together: Together) -> End:
        """Ranks fail because another one did: name the one that began it."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and len(together.ends()) < len(self.here.names) - 1:
            time.sleep(POLL_SECONDS)
        failed = [end for end in together.ends().values() if end.code not in AGREED]
        first = min([mine, *failed], key=lambda end: end.time)
        return End(mine.code, first.why, first.time)

    def end(self, agent: subprocess.Popen[bytes]) -> None:
        """Ranks die with their agent: nothing that waits for a lost host can be saved here."""
        agent.kill()
        agent.wait()

    def stopped(self) -> int:
        """The agent says 1 for whatever a signal ended; the primary host's status.json knows."""
        from distdl.run_directory import read_json

        status = read_json(self.folder / "status.json")
        known = self.here.number == 0 and status.get("ended")
        return int(status["exit_code"]) if known else EXIT_PREEMPTED

    @property
    def folder(self) -> Path:
        return self.store / "attempts" / f"{self.number:03d}"

    def first_error(self, code: int) -> End:
        """The earliest failure of a rank on this host, redacted when it was written."""
        from distdl.run_directory import Attempt

        if code == 0:
            return End(0)
        first = Attempt(self.folder).first_error()
        if first is None:
            return End(code, f"the ranks on {self.here.current} ended without a word", time.time())
        why = f"rank {first['rank']} on {first['host']}: {first['type']}: {first['message']}"
        return End(code, why, first["time"])


if __name__ == "__main__":
    sys.exit(main())
