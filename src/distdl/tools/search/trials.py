"""One trial of a search: an ordinary run, in a process of its own or as a job of a platform."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from distdl.job import JobBase, JobState
from distdl.launch import submitting, sweeps
from distdl.launch.jobs import Platforms
from distdl.launch.planning import Plan
from distdl.ranks import stopping
from distdl.runs import judging, records, verdicts
from distdl.runs.checkpoints import CheckpointStore
from distdl.runs.directory import Attempt, RunDirectory
from distdl.runs.verdicts import SearchVerdict, Word
from distdl.tools.search.engine import Proposal, TrialEnd
from distdl.tools.search.objectives import OF_VALIDATION, Objective
from distdl.tools.search.slots import Slot
from distdl.util.errors import Damaged
from distdl.util.exit_codes import EXIT_REFUSED
from distdl.util.orphans import end_with_parent

# What takes seconds to import, and does nothing then.
IMPORTED = ("distdl.worker.performing", "distdl.worker.registration", "distdl.tasks.train")


class TrialCurve:
    """The values of one metric that a run has logged, read from its journal as that grows."""

    def __init__(self, run: Path, metric: str) -> None:
        self.path = records.journal_path(run)
        self.metric = metric
        self.names: set[str] = set()  # of all metrics that the run has logged
        self._offset = 0
        self._values: dict[int, float] = {}

    def bring(self, job: JobBase) -> None:
        """Adds to the journal here what that of a job has got, if its platform keeps that
        elsewhere. Raises a UserError if it cannot be read, and an OSError."""
        name = self.path.relative_to(self.path.parents[1]).as_posix()
        here = self.path.stat().st_size if self.path.exists() else 0
        new = job.read_on(name, here)
        if new is None:  # of a run that was started anew
            self.path.unlink()
            new = job.read_on(name, 0)
        if new:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("ab") as file:
                file.write(new)

    def read(self) -> bool:
        """Whether there are new values. A store that fails has none."""
        before = len(self._values)
        with suppress(OSError):
            if self.path.stat().st_size < self._offset:  # of a run that was started anew
                self._offset = 0
                self._values = {}
            for record in records.read(self.path, self._offset):
                self._offset = record.end
                self.names |= record.metrics.keys()
                if self.metric in record.metrics:
                    # A validation that a resumed run repeats has the step of before.
                    self._values.setdefault(record.step, record.metrics[self.metric])
        return len(self._values) > before

    @property
    def values(self) -> list[float]:
        """One for each validation, in their order."""
        return [value for _, value in sorted(self._values.items())]

    @property
    def last_step(self) -> int:
        return max(self._values, default=-1)


@dataclass
class SearchTrial:
    """A proposal, and the run that tries it.

    Args:
        text: What tells it apart: `optimizer.lr=0.1`.
        settings: The section `checkpoint` of its config.
        end: How it ended for the engine; None: it has not.
        why: Why it ended so, if it is no plain end.
        seconds: For which it was under way.
        repeats: The trial before it that has the same values, whose run is its own.
        freed: The bytes of its checkpoints, if they were removed.
        failed_with_store: Whether its run has failed while nothing could be written, and goes on.
        unheard: Why the search's newest word has not reached its run; empty: it has.
        unseen: Why its journal cannot be read now; empty: it can.
    """

    proposal: Proposal
    text: str
    run: RunDirectory
    curve: TrialCurve
    settings: Mapping[str, Any]
    plan: Plan | None = None
    slot: Slot | None = None
    process: BaseProcess | None = None
    restarts: int = 0
    end: TrialEnd | None = None
    results: list[float] = field(default_factory=list)
    why: str = ""
    seconds: float = 0.0
    began: float = 0.0
    repeats: SearchTrial | None = None
    refused: bool = False
    freed: int = 0
    failed_with_store: bool = False
    unheard: str = ""
    unseen: str = ""
    platforms: Platforms | None = None
    reported: int = 0  # validations that the engine knows
    _job: tuple[Attempt, JobBase] | None = None

    @property
    def number(self) -> int:
        return self.proposal.number

    @property
    def last_attempt(self) -> Attempt | None:
        return self.run.last_attempt() if self.run.exists else None

    @property
    def job(self) -> JobBase | None:
        """That of its last attempt on a platform; None: there is none."""
        last = self.last_attempt
        if last is None or not last.job():
            return None
        if self._job is None or self._job[0] != last:
            self.platforms = self.platforms or Platforms()
            self._job = (last, self.platforms.job(last))
        return self._job[1]

    @property
    def is_paused(self) -> bool:
        """Whether its run has stopped at the search's word, and may go on."""
        return self.end is None and self.recorded is JobState.PRUNED

    def note_refusal(self) -> None:
        """Of a job on a platform, which no exit code of a process tells."""
        last = self.last_attempt
        if last is not None and last.status().get("exit_code") == EXIT_REFUSED:
            self.refused = True

    @property
    def recorded(self) -> JobState:
        """The state that the run has recorded itself; UNKNOWN: it has not."""
        last = self.last_attempt
        with suppress(Damaged):
            if last is not None:
                return JobState(last.status().get("state") or "UNKNOWN")
        return JobState.UNKNOWN

    @property
    def error(self) -> str:
        """What the run's last attempt says of its end; empty: nothing."""
        last = self.last_attempt
        return str(last.status().get("error") or "") if last else ""

    def value_of(self, objective: Objective) -> float:
        """The run's value: the best one of the metric that chooses its best.ckpt, else the last one
        of its training; NaN: it has none."""
        last = self.last_attempt
        metrics = (last.status().get("metrics") if last else None) or {}
        score = judging.score(self.run.checkpoints, self.settings, metrics)
        if score.judged.monitor == objective.metric:
            return score.value
        value = metrics.get(objective.metric)
        return float(value) if isinstance(value, int | float) else math.nan

    @property
    def logged(self) -> list[str]:
        """The names of all metrics that its run has logged."""
        last = self.last_attempt
        metrics = (last.status().get("metrics") if last else None) or {}
        return sorted(self.curve.names | metrics.keys())

    def lacks(self, objective: Objective) -> bool:
        """Whether the run has ended, or was refused after a validation, and has logged no metric of
        that name."""
        names = self.logged
        validated = any(name.startswith(OF_VALIDATION) for name in names)
        return bool(names) and objective.metric not in names and (validated or not self.refused)

    def start(self, plan: Plan, slot: Slot, *, key: str, judged: bool) -> None:
        """Starts the run, or follows it if it is under way already.

        Args:
            key: Of the study, for trackers.
            judged: Whether its validations wait for the search's verdicts.
        """
        plan.search = {"key": key, "trial": self.number, "judged": judged}
        self.plan = plan
        self.slot = slot
        self.began = time.monotonic()
        plan.launch = plan.launch.followed()
        last = plan.last_attempt
        if last is not None and last.state() in (JobState.PENDING, JobState.RUNNING):
            return
        if self.run.exists and judged:
            self.say(Word.GO_ON)
        if not plan.launch.in_turn:
            submitting.move_failed_run(plan)
            submitting.submit(plan, sys.argv)
            return
        context = _context(plan)
        arguments = (plan, sys.argv, str(self.log), slot)
        with stopping.deferred():  # else a signal may leave a process that nobody knows
            self.process = context.Process(target=run_quietly, args=arguments)
            self.process.start()

    @property
    def log(self) -> Path:
        """What its process prints, where it runs on this machine."""
        return self.run.path.parent / "logs" / f"trial-{self.number:04d}.log"

    def say(self, word: Word) -> None:
        """Raises an OSError if the run's folder fails, and a UserError if its platform does."""
        verdict = SearchVerdict(word, self.curve.last_step)
        verdicts.write(self.run.path, verdict)
        if job := self.job:
            job.leave(verdicts.FILE, verdicts.encoded(verdict))

    def discard(self) -> None:
        """Removes the checkpoints of a run that was pruned, unless somebody has trained it since.
        Raises an OSError if the run's store fails."""
        if self.recorded is JobState.PRUNED and not self.run.checkpoints.is_symlink():
            self.freed += CheckpointStore(self.run.checkpoints).clear()

    def process_ended(self) -> bool:
        """Whether its process on this machine has ended; True, too, if there is none."""
        if self.process is None:
            return True
        if self.process.is_alive():
            return False
        self.process.join()
        self.refused = self.process.exitcode == EXIT_REFUSED
        self.process = None
        return True

    def stop(self) -> None:
        """Asks the process on this machine to end; a job of a platform goes on."""
        if self.process is not None and self.process.pid:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)

    def free(self) -> Slot:
        """Gives its slot back."""
        slot = self.slot
        assert slot is not None
        self.seconds += time.monotonic() - self.began
        self.slot = None
        return slot


def _context(plan: Plan) -> ForkServerContext | SpawnContext:
    """How a trial's process starts: as a fork of one that has imported torch and Lightning, and has
    done nothing else. On GPUs each starts anew: a fork of a process that knows CUDA cannot use it.
    """
    can_fork = "forkserver" in multiprocessing.get_all_start_methods()
    if plan.resources.accelerator != "cpu" or not can_fork:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*IMPORTED])
    return context


def run_quietly(plan: Plan, command: list[str], log: str, slot: Slot) -> None:
    """Runs a trial in this process, which was made for it, and whose output goes to a file."""
    end_with_parent()  # the parent of a fork lives as long as the trials do
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    slot.enter()
    sweeps.start_here(plan, command, os.getppid())
