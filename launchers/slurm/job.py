"""A submitted job, as the controller knows it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from distdl.errors import Problem, UserError
from distdl.job import JobState
from distdl.launchers.slurm import controller

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
# Ends that Slurm brings about, and that a rank at most sees as a signal.
KILLS = ("BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
# In the log, what the batch script says at each start, and what srun says of each task that ends
# badly, in this order: "srun: error: n2: task 1: Killed".
START = re.compile(r"slurm job \d+, start \d+, on ")
TASK_END = re.compile(
    r"srun: error: (?P<host>[\w.-]+): tasks? (?P<rank>\d{1,7})[\d,-]*: "
    r"(Exited with exit code (?P<code>\d{1,3})|(?P<signal>.+?)( \(core dumped\))?)$"
)
SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}


@dataclass
class SlurmJob:
    """A job, or one task of an array.

    Args:
        number: `123`, or `123_0`.
        poll_seconds: Between two questions to the controller.
        log: Where its output goes; None asks the controller.
    """

    number: str
    poll_seconds: float = 5
    log: Path | None = None
    url: None = field(default=None, init=False)
    why: str = field(default="", init=False)
    killed: str = field(default="", init=False)
    failed: bool = field(default=False, init=False)  # by itself: Slurm did not end it
    _answers: list[controller.Look | str | None] = field(default_factory=list, init=False)

    @property
    def handle(self) -> str:
        return f"slurm://{self.number}"

    @staticmethod
    def ask(jobs: Sequence[SlurmJob]) -> None:
        """Asks Slurm once, for the next `state` of each."""
        try:
            found = controller.look_at([job.number for job in jobs])
        except controller.Unreachable as error:
            for job in jobs:
                job._answers = [str(error)]
            return
        for job in jobs:
            job._answers = [found.get(job.number)]

    def state(self) -> JobState:
        try:
            found = self._answers.pop() if self._answers else controller.look(self.number)
        except controller.Unreachable as error:
            found = str(error)
        if isinstance(found, str):
            self.why = found
            return JobState.UNKNOWN
        self.why = "" if found else "Slurm does not know it, or has forgotten it (MinJobAge)"
        self.killed = f"ended by Slurm: {told(found)}" if found and found.state in KILLS else ""
        self.failed = found is not None and found.state == "FAILED"
        return state_of(found)

    def first_end(self, logs: Path) -> tuple[int, int, str] | None:
        """The rank that ended badly before all others, by srun's word in the log: it ends them
        with SIGKILL, and a rank that is killed can record nothing.

        Args:
            logs: Where the log is, unless `launcher.sbatch` sends it elsewhere.

        Returns:
            The rank, its exit code (-N for signal N) and its host; None if Slurm ended the job, or
            nothing is said.
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
        """Until it has ended, or Slurm has forgotten it (UNKNOWN)."""
        while True:
            try:
                found = controller.look(self.number)
                if found is None or state_of(found).ended:
                    return state_of(found)
            except controller.Unreachable:
                pass  # a controller that restarts; the job goes on meanwhile
            time.sleep(self.poll_seconds)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The log; with `follow` also why the job waits, and Slurm's word for how it ended.

        Raises:
            UserError: Slurm does not answer, or has forgotten the job.
        """
        from distdl.tailing import tail

        said = ""
        while follow and state_of(found := self._look()) is JobState.PENDING:
            if told(found) != said:
                said = told(found)
                yield f"{self.handle}: {said}"
            time.sleep(self.poll_seconds)
        path = self.log or self._look().log
        if path is None or not (follow or path.exists()):
            return
        yield from tail(path, self._under_way() if follow else lambda: False)
        if follow:
            yield f"{self.handle}: {told(self._look())}"

    def cancel(self) -> None:
        controller.cancel(self.number)

    def _look(self) -> controller.Look:
        try:
            found = controller.look(self.number)
        except controller.Unreachable as error:
            raise UserError(Problem(self.handle, str(error))) from None
        if found is None:
            raise UserError(
                Problem(
                    self.handle,
                    "Slurm has forgotten this job",
                    "its log is in the run's attempts/NNN/logs/",
                )
            )
        return found

    def _under_way(self) -> Callable[[], bool]:
        """Whether it may still write; asks the controller only now and then."""
        asked, alive = time.monotonic(), True

        def under_way() -> bool:
            nonlocal asked, alive
            if alive and time.monotonic() - asked >= self.poll_seconds:
                try:
                    found = controller.look(self.number)
                    alive = found is not None and not state_of(found).ended
                except controller.Unreachable:
                    pass
                asked = time.monotonic()
            return alive

        return under_way


def state_of(found: controller.Look | None) -> JobState:
    return STATES.get(found.state, JobState.UNKNOWN) if found else JobState.UNKNOWN


def told(found: controller.Look) -> str:
    return f"{found.state} ({found.reason})" if found.reason else found.state
