"""The search itself: asks the engine, runs what it proposes, and tells it how that ended."""

from __future__ import annotations

import errno
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distdl.job import JobState
from distdl.launch import planning, sweeps
from distdl.launch.jobs import Platforms
from distdl.launch.planning import Plan
from distdl.runs.directory import RunDirectory, shown
from distdl.tools.search import following
from distdl.tools.search.engine import Proposal, SearchEngine, TrialEnd
from distdl.tools.search.objectives import OPTION, Objective, instead
from distdl.tools.search.patience import Patience, store_fails, try_store, unwritable
from distdl.tools.search.pruning import Pruning
from distdl.tools.search.slots import Slot
from distdl.tools.search.spaces import Searched
from distdl.tools.search.trials import SearchTrial, TrialCurve
from distdl.util.errors import Unfinished, UserError
from distdl.util.screen import escaped, say

POLL_S = 0.1  # between two looks at the trials
ASK_S = 5.0  # between two questions to a platform
ENOUGH = 2  # trials that are refused, before any has a value
DISK_FULL = os.strerror(errno.ENOSPC)
MOST_RESTARTS = 3  # of a trial that was preempted or killed

Told = Callable[["Search", SearchTrial], None]


class Search:
    """One command's part of a study.

    Args:
        first: The plan of some trial, whose classes were checked.
        trials: How many the study gets, those of earlier commands included.
        seconds: After which no trial is started; None: no limit.
        discards: Whether pruned trials lose their checkpoints.
        told: Called with each trial that has ended.
    """

    def __init__(
        self,
        searched: Searched,
        engine: SearchEngine,
        first: Plan,
        slots: Sequence[Slot],
        *,
        trials: int,
        seconds: float | None,
        pruning: Pruning | None = None,
        discards: bool = False,
        told: Told | None = None,
    ) -> None:
        self.searched = searched
        self.engine = engine
        self.objective: Objective = engine.objectives[0]
        self.folder = first.run.path.parent
        self.settings: Mapping[str, Any] = first.config.get("checkpoint") or {}
        self.is_local = first.launch.in_turn
        self.checked: dict[tuple[object, ...], Plan] = {}
        self.free = [*slots]
        self.most = trials if engine.count is None else min(trials, engine.count)
        self.began = time.monotonic()
        self.deadline = math.inf if seconds is None else self.began + seconds
        self.pruning = pruning
        self.discards = discards
        self.told = told
        self.trials: list[SearchTrial] = []
        self.left: list[SearchTrial] = []
        self.stopped = False
        self.patience = Patience()
        self.platforms = Platforms()
        self._by_run: dict[RunDirectory, SearchTrial] = {}
        self._refusals = 0
        self._asked_at = -math.inf

    # ------------------------------------------------------------------------ what is known

    @property
    def under_way(self) -> list[SearchTrial]:
        return [trial for trial in self.trials if trial.slot is not None]

    @property
    def complete(self) -> list[SearchTrial]:
        return [trial for trial in self.trials if trial.end is TrialEnd.COMPLETE]

    @property
    def paused(self) -> list[SearchTrial]:
        """Those that wait for a rung to be full; at the end of a command, for the next one."""
        return [t for t in self.trials if t.end is None and t.slot is None and t not in self.left]

    @property
    def best(self) -> SearchTrial | None:
        """By the first objective; None if no trial is complete."""
        best: SearchTrial | None = None
        for trial in self.complete:
            if best is None or self.objective.better(trial.results[0], best.results[0]):
                best = trial
        return best

    @property
    def is_over(self) -> bool:
        """Whether the time is used up."""
        return time.monotonic() >= self.deadline

    @property
    def closed(self) -> bool:
        """Whether no further trial will be proposed to this study."""
        return len(self.trials) >= self.most

    def seconds_left(self) -> float | None:
        """An estimate by the trials that have ended; None: nobody knows."""
        took = [trial.seconds for trial in self.trials if trial.end and trial.seconds]
        if not took:
            return None
        left = self.most - sum(trial.end is not None for trial in self.trials)
        places = max(1, len(self.free) + len(self.under_way))
        until = statistics.fmean(took) * left / places
        return max(0.0, min(until, self.deadline - time.monotonic()))

    # ---------------------------------------------------------------------------- the loop

    def run(self) -> None:
        """Until all trials have ended, the time is used up, or `stop` was called.

        Raises:
            UserError: Trials are refused, each for the reason that holds for all.
        """
        for proposal in self.engine.known():
            self._discard(self._join(proposal))
        self.finish()

    def finish(self) -> None:
        """The rest of `run`, from where it was interrupted."""
        while True:
            self._fill()
            if not self.under_way and (self.stopped or not self.patience.waits):
                return
            time.sleep(POLL_S)
            self._look()

    def stop(self) -> None:
        """Asks the trials of this machine to end; jobs of a platform go on. Nothing is started."""
        self.stopped = True
        for trial in self.under_way:
            trial.stop()
            if not self.is_local:
                self.free.append(trial.free())

    def _join(self, proposal: Proposal) -> SearchTrial:
        """Makes a trial of a proposal. One that has ended, or must be started, is known as such."""
        text = self.searched.text(proposal.values)
        words = self.searched.overrides(proposal.values)
        run = RunDirectory(self.folder / sweeps.name_of(words, self.searched.keys))
        curve = TrialCurve(run.path, self.objective.metric)
        trial = SearchTrial(proposal, text, run, curve, self.settings, end=proposal.end)
        trial.platforms = self.platforms
        trial.results = [*proposal.results]
        trial.repeats = self._by_run.get(run)
        self._by_run.setdefault(run, trial)
        self.trials.append(trial)
        trial.curve.read()
        if trial.end is None and trial.repeats is None:
            self.left.append(trial)
        elif trial.end is None:
            self._follow_repeats()
        return trial

    def _fill(self) -> None:
        """Starts what may be started: first what was under way, then what is resumed, then new
        trials."""
        if self.patience.is_early:
            return
        if self.pruning is not None:
            for lost in self.pruning.lost(self.trials, closed=self.closed):
                self._end(lost, TrialEnd.PRUNED)
        while self.free and not self.stopped:
            trial = self._next()
            if trial is None:
                self.patience.end()
                return
            if not self._start(trial):
                return

    def _next(self) -> SearchTrial | None:
        """The trial to start now; None: there is none."""
        while self.left:
            trial = self.left.pop(0)
            if not self._settled(trial):
                return trial
        if self.is_over:
            return None
        if self.pruning is not None:
            due = self.pruning.resumable(self.trials, closed=self.closed)
            if due:
                return due[0]
        while not self.closed:
            trial = self._join(self.engine.propose())
            self.left = [each for each in self.left if each is not trial]
            if trial.repeats is None and not self._settled(trial):
                return trial
        return None

    def _settled(self, trial: SearchTrial) -> bool:
        """Whether the run of a trial needs no start, as it has ended before: the command was killed
        before it told the engine. A run that was lost with its process, or preempted, goes on."""
        recorded = trial.recorded
        if recorded is JobState.FAILED and trial.failed_with_store:
            return False
        if recorded in (JobState.SUCCEEDED, JobState.FAILED):
            if not following.fetch(trial):
                return True
            trial.curve.read()
            if trial.recorded is not JobState.PRUNED:
                self._conclude(trial, recorded)
                return True
        if trial.recorded is JobState.PRUNED:
            if self.pruning is None or not self.pruning.pauses:
                self._end(trial, TrialEnd.PRUNED)
            return True
        return False

    def _start(self, trial: SearchTrial) -> bool:
        """Starts a trial; False if its platform does not take it now, or the disk is full."""
        slot = self.free.pop(0)
        try:
            try_store(self.folder)
            judged = self.pruning is not None
            trial.start(self._planned(trial), slot, key=self.engine.key, judged=judged)
        except UserError as error:
            trial.slot = None
            self.free.insert(0, slot)
            return self._refused(trial, error)
        except OSError as error:
            trial.slot = None
            self.free.insert(0, slot)
            self.patience.wait(unwritable(self.folder, error))
            self.left.insert(0, trial)
            return False
        except BaseException:  # Ctrl-C, or a bug: the trial holds no slot either way
            trial.slot = None
            self.free.insert(0, slot)
            raise
        self.patience.end()
        trial.failed_with_store = False
        self.engine.note_run(trial.number, str(trial.run.path))
        if self.pruning is not None and trial.curve.values:
            self._judge(trial, self.pruning)  # a command before this one may not have come to it
        return True

    def _planned(self, trial: SearchTrial) -> Plan:
        """The next attempt of the trial's run. Trials with the same options share one check of
        their classes, unless it fetches files for each run."""
        values = trial.proposal.values
        plan = sweeps.plan(self.searched.overrides(values), self.searched.keys, ())
        spaces = self.searched.spaces
        options = tuple(values[space.key] for space in spaces if not space.is_numeric)
        known = self.checked.get(options)
        if known is None:
            planning.check_classes(plan, apart=True)
            if not plan.inputs:
                self.checked[options] = plan
        else:
            plan = replace(plan, imported=known.imported, started=known.started)
        return plan

    def _refused(self, trial: SearchTrial, error: UserError) -> bool:
        """A trial that could not be started: its values do not go together, or its platform does
        not take it. False: it is tried again later."""
        codes = {problem.code for problem in error.problems}
        if codes <= {"unreachable", "platform-refuses"}:
            self._wait_for_platform(error)
            self.left.insert(0, trial)
            return False
        trial.why = error.problems[0].what
        self._refuse_all(error)
        self._end(trial, TrialEnd.FAILED)
        return True

    def _wait_for_platform(self, error: UserError) -> None:
        """Raises the error, if the platform has taken no trial, or none for minutes."""
        if not self.under_way and not any(t.end or t.run.exists for t in self.trials):
            raise error
        self.patience.wait(error)

    def _refuse_all(self, error: UserError) -> None:
        """Raises an error for which a trial was refused, if it seems to hold for all of them."""
        self._refusals += 1
        has_results = any(trial.curve.values or trial.results for trial in self.trials)
        if not has_results and self._refusals >= min(ENOUGH, self.most):
            raise error

    # ---------------------------------------------------------------------- trials under way

    def _look(self) -> None:
        trials = self.under_way
        is_due = self.is_local or time.monotonic() >= self._asked_at + ASK_S
        states = following.states(trials) if is_due else [JobState.RUNNING] * len(trials)
        if is_due:
            self._asked_at = time.monotonic()
        for trial, state in zip(trials, states, strict=True):
            if self.pruning is not None and is_due and not (self.is_local or state.ended):
                following.read_on(trial)
            has_news = trial.curve.read() or (is_due and trial.unheard)
            if has_news and self.pruning is not None and not state.ended:
                self._judge(trial, self.pruning)
            if state.ended:
                self._ended(trial, state)

    def _judge(self, trial: SearchTrial, pruning: Pruning) -> None:
        """Tells a run how it goes on. One that cannot be told trains on, and is told later."""
        following.tell(trial, pruning.word(trial))

    def _ended(self, trial: SearchTrial, state: JobState) -> None:
        self.free.append(trial.free())
        if not following.fetch(trial):
            return
        trial.curve.read()
        trial.unheard = ""
        if self.pruning is not None:
            self.pruning.word(trial)  # the engine gets to know the last values, too
        if state is JobState.SUCCEEDED and trial.recorded is JobState.PRUNED:
            state = JobState.PRUNED  # its platform sees exit code 0 alone
        trial.note_refusal()
        if trial.refused or state is JobState.SUCCEEDED:
            self._refuse_unlogged(trial)
        if trial.refused:
            self._refuse_all(self._refusal(trial))
        failed = state is JobState.FAILED and not trial.refused
        lost = failed and (not trial.recorded.ended or self._wanted_disk(trial))
        if state is JobState.PRUNED:
            if self.pruning is None or not self.pruning.pauses:
                self._end(trial, TrialEnd.PRUNED)
        elif (state is JobState.PREEMPTED or lost) and self.stopped:
            return  # it stays open in the study, and the same command resumes it
        elif state is JobState.CANCELLED and self.stopped:
            return
        elif (state is JobState.PREEMPTED or lost) and trial.restarts < MOST_RESTARTS:
            trial.restarts += 1
            self.left.insert(0, trial)
        else:
            self._conclude(trial, state)

    def _wanted_disk(self, trial: SearchTrial) -> bool:
        """Whether a failed trial would not have failed with a disk that it can write to."""
        trial.failed_with_store = DISK_FULL in trial.error or store_fails(self.folder)
        return trial.failed_with_store

    def _refuse_unlogged(self, trial: SearchTrial) -> None:
        """Raises an error, after the first trial, if its module logs no metric of that name."""
        if any(each.results for each in self.trials):
            return
        names = trial.logged
        for objective in self.engine.objectives:
            if trial.lacks(objective):
                what = f"{objective.metric} is not logged; trial {trial.number} has logged "
                raise Unfinished.at(
                    OPTION,
                    what=what + ", ".join(names),
                    remedy=f"{instead(objective, names)} name=STUDY: a study keeps its metric",
                    code="not-found",
                )

    def _refusal(self, trial: SearchTrial) -> UserError:
        return Unfinished.at(
            f"trial {trial.number}",
            what=f"is refused, as the trials before it: {trial.error or f'see {shown(trial.log)}'}",
            remedy="change the command, and name=STUDY",
            code="failed",
        )

    def _conclude(self, trial: SearchTrial, state: JobState) -> None:
        """Tells how the run of a trial ended."""
        values = [trial.value_of(objective) for objective in self.engine.objectives]
        if state is JobState.SUCCEEDED and all(map(math.isfinite, values)):
            trial.results = values
            self._end(trial, TrialEnd.COMPLETE)
            return
        lacking = ", ".join(
            objective.metric
            for objective, value in zip(self.engine.objectives, values, strict=True)
            if not math.isfinite(value)
        )
        unvalued = f"it has no finite {lacking}" if state is JobState.SUCCEEDED else ""
        trial.why = trial.error or unvalued or state.lower()
        self._end(trial, TrialEnd.FAILED)

    def _end(self, trial: SearchTrial, end: TrialEnd) -> None:
        self.engine.tell(trial.number, end, trial.results)
        trial.end = end
        self._discard(trial)
        if self.told is not None:
            self.told(self, trial)
        self._follow_repeats()

    def _discard(self, trial: SearchTrial) -> None:
        """Removes the checkpoints of a trial that is pruned for the engine, so for good."""
        if not self.discards or trial.end is not TrialEnd.PRUNED or trial.repeats is not None:
            return
        try:
            trial.discard()
        except OSError as error:
            say(escaped(f"note    trial {trial.number} keeps its checkpoints ({error})"))

    def _follow_repeats(self) -> None:
        """A trial with the values of an earlier one ends as that did: nothing is trained twice."""
        for trial in self.trials:
            before = trial.repeats
            if trial.end is None and before is not None and before.end is not None:
                trial.results = [*before.results]
                trial.why = f"as trial {before.number}, with the same values"
                self.engine.tell(trial.number, before.end, trial.results)
                trial.end = before.end
                if self.told is not None:
                    self.told(self, trial)
