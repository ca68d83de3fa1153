"""This machine: one device runs in this very process, several under torch's elastic agent."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distdl.job import EXIT_REFUSED, JobSpec, JobState

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


@dataclass(frozen=True)
class LocalRequest:
    """What will run: the worker's command line and how many of it."""

    spec: JobSpec
    grace_seconds: int

    @property
    def in_process(self) -> bool:
        return self.spec.resources.world_size == 1

    @property
    def env(self) -> dict[str, str]:
        ids = self.spec.resources.device_ids
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, ids))} if ids else {}
        launcher = "single" if self.in_process else "local"
        return {"DISTDL_LAUNCHER": launcher, **visible, **self.spec.env}

    def render(self) -> str:
        command = shlex.join(["python", *self.spec.command])
        variables = " ".join(f"{k}={v}" for k, v in self.env.items())
        if self.in_process:
            return f"# in this process\n{variables} {command}"
        count = self.spec.resources.devices
        return f"# {count} processes under torch's elastic agent, each:\n{variables} {command}"


class LocalLauncher:
    """Runs a job here, in the foreground.

    Args:
        max_attempts: How often a failed or preempted run is started again; the command line counts.
        forward_env: Variables a worker may need; here every variable is inherited anyway.
        grace_seconds: From a signal until the workers are killed.
    """

    def __init__(
        self,
        max_attempts: int = 0,
        forward_env: list[str] | None = None,
        grace_seconds: int = 30,
    ) -> None:
        self.max_attempts = max_attempts
        self.forward_env = forward_env or []
        self.grace_seconds = grace_seconds

    def request(self, spec: JobSpec) -> LocalRequest:
        return LocalRequest(spec, self.grace_seconds)

    def submit(self, request: LocalRequest) -> LocalJob:
        return LocalJob(request)

    def attach(self, handle: str) -> LocalJob:
        raise ValueError(f"{handle}: a local job lives and ends with the process that started it")


class LocalJob:
    """A job in the foreground: it begins when it is waited for, and ends with this process."""

    url = None

    def __init__(self, request: LocalRequest) -> None:
        from distdl.run_directory import Attempt

        self._request = request
        command = request.spec.command
        number = int(command[command.index("--attempt") + 1])
        self._attempt = Attempt(Path(request.spec.store) / "attempts" / f"{number:03d}")

    @property
    def handle(self) -> str:
        return f"local://{self._request.spec.store}"

    def state(self) -> JobState:
        return self._attempt.state()

    def wait(self) -> JobState:
        run = self._here if self._request.in_process else self._under_agent
        return run()

    def logs(self, follow: bool = False) -> Iterator[str]:
        for path in sorted(self._attempt.logs.glob("rank_0.log")):
            yield from path.read_text().splitlines()

    def cancel(self) -> None:
        pid = self._attempt.status().get("pid")
        if pid and self.state() is JobState.RUNNING:
            os.kill(int(pid), 2)

    def _here(self) -> JobState:
        from distdl import worker

        os.environ.update(self._request.env)
        code = worker.main(self._request.spec.command[2:])
        return self._ended(code)

    def _under_agent(self) -> JobState:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        count = self._request.spec.resources.devices
        os.environ.update(self._request.env)
        # One thread per process unless asked: what torchrun does, without its warning.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Rank 0 keeps the terminal; what the others print goes to a file.
        quiet = dict.fromkeys(range(1, count), Std.ALL)
        options: dict[str, Any] = {
            "min_nodes": 1,
            "max_nodes": 1,
            "nproc_per_node": count,
            "run_id": self._request.spec.name.replace("/", "_"),
            "rdzv_backend": "c10d",
            "rdzv_endpoint": "127.0.0.1:0",
            "max_restarts": 0,
            "monitor_interval": 0.1,
            "logs_specs": DefaultLogsSpecs(
                log_dir=str(self._attempt.logs / "agent"), redirects=quiet
            ),
            "signals_to_handle": SIGNALS,
            "shutdown_timeout": self._request.grace_seconds,
        }
        known = {f.name for f in dataclasses.fields(LaunchConfig)}
        config = LaunchConfig(**{k: v for k, v in options.items() if k in known})
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = SIGNALS
        code = 0
        try:
            elastic_launch(config, sys.executable)(*self._request.spec.command)
        except ChildFailedError as error:
            code = error.get_first_failure()[1].exitcode
        except SignalException:
            code = 1  # the status says what the workers made of it
        return self._ended(code)

    def _ended(self, code: int) -> JobState:
        """The state on record; a rank that died without a word has failed."""
        state = JobState(self._attempt.status().get("state", "UNKNOWN"))
        first = self._attempt.first_error()
        failed = first is not None or (code != 0 and state is JobState.SUCCEEDED)
        if failed or state in (JobState.RUNNING, JobState.PENDING, JobState.UNKNOWN):
            error = (
                f"rank {first['rank']}: {first['type']}: {first['message']}"
                if first
                else (f"a worker ended with exit code {code}")
            )
            state = JobState.FAILED
            self._attempt.end(state, error=error)
            if code == EXIT_REFUSED:
                self._attempt.update(exit_code=EXIT_REFUSED)
        return state
