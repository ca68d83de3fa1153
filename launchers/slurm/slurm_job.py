"""A submitted job: its state, its log and its end, according to Slurm's controller."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distdl.job import JobState
from distdl.launchers.common import AskedJob, Forgotten
from distdl.launchers.slurm import commands

# Source: https://slurm.schedmd.com/squeue.html#SECTION_JOB-STATE-CODES
STATES = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD"),
        JobState.PENDING,
    ),
    "SPECIAL_EXIT": JobState.PENDING,  # requeued and held
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"),
        JobState.RUNNING,
    ),
    "COMPLETED": JobState.SUCCEEDED,
    **dict.fromkeys(
        ("FAILED", "BOOT_FAIL", "DEADLINE", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        JobState.FAILED,
    ),
    "RECONFIG_FAIL": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
    "CANCELLED": JobState.CANCELLED,
    "REVOKED": JobState.CANCELLED,
    "PREEMPTED": JobState.PREEMPTED,
}
# States in which Slurm itself ended the job; a rank sees at most a signal.
KILLS = ("BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
# Lines in the log: the batch script's line at each start, and after it srun's line for each task
# that failed, in the order of failure: "srun: error: n2: task 1: Killed".
START = re.compile(r"slurm job \d+, start \d+, on ")
TASK_END = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<rank>\d{1,7})[\d,-]*: "
    r"(Exited with exit code (?P<code>\d{1,3})|(?P<signal>.+?)( \(core dumped\))?)$"
)
SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


@dataclass
class SlurmJob(AskedJob):
    """A job, or one task of an array.

    Args:
        number: `123`, or `123_0`.
        poll_seconds: Seconds between two queries to the controller.
        log: The file that its output goes to; None asks the controller.
    """

    number: str
    poll_seconds: float = 5
    log: Path | None = None
    url: None = field(default=None, init=False)
    killed: str = field(default="", init=False)
    failed: bool = field(default=False, init=False)  # by itself: not ended by Slurm

    @property
    def handle(self) -> str:
        return f"slurm://{self.number}"

    def _look(self) -> commands.Look:
        return commands.look(self.number)

    @classmethod
    def _listed(cls, jobs: Sequence[SlurmJob]) -> Iterator[tuple[SlurmJob, Any]]:
        try:
            looks = commands.look_at([job.number for job in jobs])
        except commands.Unreachable as error:
            yield from ((job, error) for job in jobs)
            return
        for job in jobs:
            yield job, looks.get(job.number) or commands.forgotten(job.number)

    def _meaning(self, answer: commands.Look) -> JobState:
        self.killed = f"ended by Slurm: {answer}" if answer.state in KILLS else ""
        self.failed = answer.state == "FAILED"
        return STATES.get(answer.state, JobState.UNKNOWN)

    def first_end(self, logs: Path) -> tuple[int, int, str] | None:
        """The rank that failed first, from srun's line in the log. srun then ends the other ranks
        with SIGKILL, and a killed rank cannot record anything.

        Args:
            logs: The folder of the log.

        Returns:
            The rank, its exit code (-N for signal N) and its host; None if the job did not fail by
            itself, or if the log names no rank.
        """
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
        """The log; with `follow` also why the job waits, and Slurm's state at its end.

        Raises:
            UserError: Slurm does not answer, or has forgotten the job.
        """
        from distdl.util.tail import tail

        shown = ""
        while follow and self._meaning(answer := self._look()) is JobState.PENDING:
            if str(answer) != shown:
                shown = str(answer)
                yield f"{self.handle}: {shown}"
            time.sleep(self.poll_seconds)
        path = self.log or self._look().log
        if path is None or not (follow or path.exists()):
            return
        yield from tail(path, self._under_way() if follow else lambda: False)
        if follow:
            yield f"{self.handle}: {self._look()}"

    def cancel(self) -> None:
        commands.cancel(self.number)

    def _under_way(self) -> Callable[[], bool]:
        """A function that tells whether the job may still write to its log. It queries the
        controller at most every `poll_seconds`."""
        asked, ended = time.monotonic(), False

        def under_way() -> bool:
            nonlocal asked, ended
            if not ended and time.monotonic() - asked >= self.poll_seconds:
                try:
                    ended = self._meaning(self._look()).ended
                except Forgotten:
                    ended = True
                except commands.Unreachable:
                    pass
                asked = time.monotonic()
            return not ended

        return under_way
