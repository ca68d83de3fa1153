"""This machine: one rank runs in this process; several, or one that is to be started again after it
was killed, run under torch's elastic agent."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from distdl.job import JobBase, JobSpec, JobState, LauncherBase
from distdl.launchers.common import Count, LauncherSettings
from distdl.launchers.queried_job import wait_until_ended
from distdl.util.errors import UserError


@dataclass(frozen=True)
class LocalRequest:
    """The worker's command line and the number of processes."""

    spec: JobSpec
    grace_seconds: int
    standby: bool = False

    @property
    def in_process(self) -> bool:
        return self.spec.resources.world_size == 1 and not self.standby

    @property
    def env(self) -> dict[str, str]:
        ids = self.spec.resources.device_ids
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids else {}
        launcher = "single" if self.in_process else "local"
        return {"DISTDL_LAUNCHER": launcher, **visible, **self.spec.env}

    def render(self) -> str:
        module, name, bundle, store, *options = self.spec.worker()
        variables = [f"{key}={shlex.quote(value)}" for key, value in self.env.items()]
        words = [["python", module, name], [bundle], [store], options]
        command = " \\\n  ".join([*variables, *map(shlex.join, words)])
        count = self.spec.resources.devices
        where = f"{count} processes" if count > 1 else "a process of its own"
        where += f" under torch's elastic agent{', each' if count > 1 else ''}:"
        return f"# {'in this process' if self.in_process else where}\n{command}"


class LocalLauncher(LauncherSettings, LauncherBase[LocalRequest]):
    """Runs a job on this machine, in the foreground. The ranks inherit every variable, not only
    those of `forward_env`. The command line counts attempts, and applies `max_attempts`."""

    foreground: ClassVar = True

    max_attempts: Count = 0
    """How often a failed or preempted run is started again; a checkpoint gives all starts back.

    With more than 0 one device has a process of its own as well, which may be killed (no
    breakpoint() then)."""

    grace_seconds: Count = 30
    """Seconds for a checkpoint after a signal, before the workers are killed."""

    def request(self, spec: JobSpec) -> LocalRequest:
        return LocalRequest(spec, self.grace_seconds, standby=self.max_attempts > 0)

    def submit(self, request: LocalRequest) -> LocalJob:
        return LocalJob(request.spec.folder, request)

    def attach(self, handle: str) -> LocalJob:
        """The job of an attempt (`local:///.../attempts/001`), to query or cancel it."""
        folder = Path(handle.removeprefix("local://"))
        if not (folder / "launch.yaml").exists():
            raise UserError.at(
                handle, what="this folder is not an attempt of a run", code="wrong-kind"
            )
        return LocalJob(folder, None)


class LocalJob(JobBase):
    """A foreground job: `wait` starts it, and it ends with this process."""

    def __init__(self, folder: Path, request: LocalRequest | None) -> None:
        from distdl.runs.directory import Attempt

        self._request = request
        self._attempt = Attempt(folder)
        self.preempted_here = False  # whether a signal asked this process to end, not only a rank

    @property
    def handle(self) -> str:
        return f"local://{self._attempt.path}"

    def state(self) -> JobState:
        return self._attempt.state()

    def wait(self) -> JobState:
        """Runs the job. If it belongs to another shell, only waits for its end."""
        if self._request is None:
            return wait_until_ended(self, 0.5)
        try:
            run = _in_this_process if self._request.in_process else self._under_agent
            code = run(self._request)
            self.preempted_here = self._request.in_process or code < 0
            return self._conclude(code)
        except KeyboardInterrupt as interrupt:  # before the job has installed its own handlers
            from distdl.ranks import stopping

            return self._conclude(-stopping.signal_number(interrupt))

    def logs(self, follow: bool = False) -> Iterator[str]:
        from distdl.util.tail import tail

        path = self._attempt.logs / "rank_0.log"
        if path.exists() or follow:
            yield from tail(path, lambda: follow and not self.state().ended)

    def cancel(self) -> None:
        """Does what Ctrl-C in the job's shell would do."""
        pid = self._attempt.status().get("pid")
        # The pid comes from a file. 0 and below would signal process groups, and 1 is init.
        if isinstance(pid, int) and pid > 1 and self.state() is JobState.RUNNING:
            os.kill(pid, signal.SIGINT)

    def _under_agent(self, request: LocalRequest) -> int:
        from distdl.agent import agent

        return agent.run(
            request.spec.worker(),
            name=request.spec.name,
            devices=request.spec.resources.devices,
            attempt=self._attempt,
            grace_seconds=request.grace_seconds,
            env=request.env,
            standby=request.standby,
        )

    def _conclude(self, code: int) -> JobState:
        from distdl.ranks import stopping

        return self._attempt.conclude(stopping.state_after_exit(code), code)


def _in_this_process(request: LocalRequest) -> int:
    from distdl.ranks import process_exit
    from distdl.worker import main

    os.environ.update(request.env)
    try:
        return main.main(request.spec.worker()[2:])
    finally:
        process_exit.report_waiting_threads()
