"""A trial that is under way: how it is, what it has logged, what it is told, and what it leaves.

Nothing here decides anything: `search` does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from distdl.job import JobState
from distdl.launch import jobs
from distdl.runs.verdicts import Word
from distdl.tools.search.patience import PATIENCE_S
from distdl.tools.search.trials import SearchTrial
from distdl.util.errors import Damaged, UserError
from distdl.util.screen import escaped, say

MOST_PAUSE_S = 30.0  # between two tries to fetch


def states(trials: Sequence[SearchTrial]) -> list[JobState]:
    """RUNNING until a trial's process, or its job, has ended."""
    own = [trial for trial in trials if trial.process is not None]
    ended = {id(trial) for trial in own if trial.process_ended()}
    others = [trial for trial in trials if trial not in own]
    last = [trial.last_attempt for trial in others]
    asked = iter(jobs.states([attempt for attempt in last if attempt is not None]))
    by_others = {
        id(trial): JobState.FAILED if attempt is None else next(asked)
        for trial, attempt in zip(others, last, strict=True)
    }
    return [
        by_others[id(trial)] if id(trial) in by_others else _state_here(trial, ended)
        for trial in trials
    ]


def _state_here(trial: SearchTrial, ended: set[int]) -> JobState:
    if id(trial) not in ended:
        return JobState.RUNNING
    last = trial.last_attempt
    try:
        return last.state() if last else JobState.FAILED
    except Damaged:
        return JobState.FAILED


def read_on(trial: SearchTrial) -> None:
    """Reads on in the journal of a trial whose platform keeps it elsewhere."""
    before = trial.unseen
    trial.unseen = ""
    try:
        if job := trial.job:
            trial.curve.bring(job)
    except (OSError, UserError) as error:
        trial.unseen = _trouble(trial, "followed", error, said=bool(before))


def tell(trial: SearchTrial, word: Word) -> None:
    """Tells a run how it goes on. `unheard` is why it could not be told, if so."""
    before = trial.unheard
    trial.unheard = ""
    try:
        trial.say(word)
    except (OSError, UserError) as error:
        trial.unheard = _trouble(trial, "told", error, said=bool(before))


def fetch(trial: SearchTrial) -> bool:
    """Copies what a job has written, if its platform keeps that elsewhere. False: it cannot be
    copied now."""
    last = trial.last_attempt
    if last is None or not last.job():
        return True
    job = jobs.job_of(last)
    until = time.monotonic() + PATIENCE_S
    pause = 1.0
    while job.is_remote:
        try:
            job.fetch(trial.run.path)
        except UserError as error:
            what = f"note    trial {trial.number} is not fetched: {error.problems[0].what}"
            lasts = any(problem.code != "unreachable" for problem in error.problems)
            if lasts or time.monotonic() > until:
                say(escaped(f"{what}. It stays open: the same command fetches it"))
                return False
            if pause == 1.0:
                say(escaped(f"{what}: trying again"))
        else:
            break
        time.sleep(pause)
        pause = min(2 * pause, MOST_PAUSE_S)
    return True


def _trouble(trial: SearchTrial, done: str, error: OSError | UserError, *, said: bool) -> str:
    """Why a trial cannot be followed or told now, which is said once until it has gone."""
    reason = error.problems[0].what if isinstance(error, UserError) else str(error)
    if not said:
        say(escaped(f"note    trial {trial.number} cannot be {done} ({reason}): trying again"))
    return reason
