"""A submitted job: its state and log, and how it ended, according to Slurm's controller."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distdl.job import JobState
from distdl.launchers.queried_job import QueriedJob
from distdl.launchers.slurm import commands
from distdl.util.errors import Forgotten

# Source: https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
NAMES = {
    JobState.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD "
    "SPECIAL_EXIT",
    JobState.RUNNING: "RUNNING COMPLETING RESIZING SIGNALING STAGE_OUT STOPPED SUSPENDED",
    JobState.SUCCEEDED: "COMPLETED",
    JobState.FAILED: "FAILED BOOT_FAIL DEADLINE LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY "
    "RECONFIG_FAIL TIMEOUT",
    JobState.CANCELLED: "CANCELLED REVOKED",
    JobState.PREEMPTED: "PREEMPTED",
}
STATES = {name: state for state, names in NAMES.items() for name in names.split()}
# States of a job that Slurm itself ended. A rank notices at most a signal.
KILLS = ("BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
# Lines in the log. The batch script writes one at each start; srun then writes one for each task
# that failed, in the order of failure, such as "srun: error: n2: task 1: Killed".
START = re.compile(r"slurm job \d+, start \d+, on ")
TASK_END = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<rank>\d{1,7})[\d,-]*: "
    r"(Exited with exit code (?P<code>\d{1,3})|(?P<signal>.+?)( \(core dumped\))?)$"
)
SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


@dataclass
class SlurmJob(QueriedJob[commands.Status]):
    """A job `123`, or one task `123_0` of an array. While the job is watched, the controller is
    queried every `poll_seconds`. If `log` is None, it is also asked for the path of the log."""

    number: str
    poll_seconds: float = 5
    log: Path | None = None
    failed: bool = field(default=False, init=False)  # by itself, not ended by Slurm

    @property
    def handle(self) -> str:
        return f"slurm://{self.number}"

    @property
    def platform(self) -> str:
        return "Slurm"

    def _query(self) -> commands.Status:
        return commands.query(self.number)

    @classmethod
    def _query_all(cls, jobs: Sequence[SlurmJob]) -> Iterator[tuple[SlurmJob, Any]]:
        missing = list(jobs)
        for statuses in commands.query_all([job.number for job in jobs]):
            yield from ((job, statuses[job.number]) for job in missing if job.number in statuses)
            missing = [job for job in missing if job.number not in statuses]
        yield from ((job, commands.forgotten_job(job.number)) for job in missing)

    def _state_from(self, answer: commands.Status) -> JobState:
        self.killed = f"ended by Slurm: {answer}" if answer.state in KILLS else ""
        self.failed = answer.state == "FAILED"
        return STATES.get(answer.state, JobState.UNKNOWN)

    def first_end(self, logs: Path) -> tuple[int, int, str] | None:
        """The rank that failed first, its exit code (-N for signal N) and its host, from srun's
        line in the log; None if the job did not fail by itself, or the log names no rank. A rank
        cannot record this itself if srun has killed it."""
        log = logs / f"slurm-{self.number}.log"
        if not self.failed or not log.is_file():
            return None
        first: re.Match[str] | None = None
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                first = None if START.match(line) else first or TASK_END.search(line)
        if first is None:
            return None
        code = int(first["code"]) if first["code"] else -SIGNALS.get(first["signal"], 0)
        return (int(first["rank"]), code, first["host"]) if code else None

    def wait(self) -> JobState:
        """Waits until the job has ended; UNKNOWN if Slurm has forgotten it."""
        try:
            return super().wait()
        except Forgotten:
            return JobState.UNKNOWN

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The log; with `follow` also why the job waits, and its state at the end."""
        from distdl.util.tail import tail

        last = ""
        while follow:
            answer = self._awaited()
            if self._state_from(answer) is not JobState.PENDING:
                break
            if str(answer) != last:
                last = str(answer)
                yield f"{self.handle}: {last}"
            time.sleep(self.poll_seconds)
        path = self.log or (answer if follow else self._query()).log
        if path is None or not (follow or path.exists()):
            return
        yield from tail(path, self._under_way() if follow else lambda: False)
        if follow:
            yield f"{self.handle}: {self._awaited()}"

    def cancel(self) -> None:
        commands.cancel(self.number)

    def _under_way(self) -> Callable[[], bool]:
        """A function that returns whether the job may still write to its log."""
        queried = time.monotonic()
        ended = False

        def under_way() -> bool:
            nonlocal queried, ended
            if not ended and time.monotonic() - queried >= self.poll_seconds:
                with suppress(commands.Unreachable):
                    try:
                        ended = self._state_from(self._query()).ended
                    except Forgotten:
                        ended = True
                queried = time.monotonic()
            return not ended

        return under_way
