"""A search in the terminal: one line for each trial that has ended, and a table at the end."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping

from omegaconf import OmegaConf

from distdl.config.recipe import time_text, twice_time
from distdl.runs.directory import shown
from distdl.tools.compare.screen import print_note
from distdl.tools.pages import data
from distdl.tools.search import study_page
from distdl.tools.search.engine import TrialEnd
from distdl.tools.search.preparing import MAX_TIME, PreparedSearch
from distdl.tools.search.search import Search
from distdl.tools.search.spaces import Searched
from distdl.tools.search.trials import SearchTrial
from distdl.util import table
from distdl.util.progress_bar import size
from distdl.util.redact import redact_command
from distdl.util.screen import escaped, say
from distdl.util.wording import plural

MOST_ROWS = 20
LONGER = 2  # the factor of epochs of the next training
WORDS = {TrialEnd.COMPLETE: "complete", TrialEnd.PRUNED: "pruned", TrialEnd.FAILED: "failed"}


def spaces(searched: Searched) -> None:
    """Says what is searched."""
    for short, full in searched.rewritten.items():
        say(escaped(f"note    {short} is {full}"))
    for space in searched.spaces:
        say(escaped(f"space   {space.key}: {space}"))


def dry(prepared: PreparedSearch, options: Mapping[str, object]) -> None:
    """Says how it would be searched. `options`: of the command, by their flags."""
    names = ", ".join(map(str, prepared.objectives))
    slots = len(prepared.slots)
    at_once = f", {slots} at once" if slots > 1 else ""
    given = "".join(f", {flag} {value}" for flag, value in options.items() if value is not None)
    say(escaped(f"study   {shown(prepared.first.run.path.parent)}: by {names}{at_once}{given}"))


def begin(search: Search, sampler: str) -> None:
    """Says how it is searched, and where that is kept."""
    slots = len(search.free)
    at_once = f", {slots} at once" if slots > 1 else ""
    names = ", ".join(map(str, search.engine.objectives))
    say(f"study   {shown(search.folder)}: {search.most} trials{at_once}, {sampler}, by {names}")
    say(escaped(f"kept    {search.engine.place}"))
    shared = [core for slot in search.free for core in slot.cores]
    cores = len({*shared})
    if cores < len(shared):
        say(f"note    {slots} trials at once share {cores} {plural('core', cores)}: each is slower")


def told(search: Search, trial: SearchTrial) -> None:
    """Prints the line of a trial that has just ended."""
    parts = [f"trial {trial.number:3}", f"{value_text(trial):10}"]
    parts.append(f"{data.duration(trial.seconds) if trial.seconds else '':>6}")
    parts.append(trial.text)
    if trial.why:
        parts.append(f"({trial.why})")
    if trial.freed:
        parts.append(f"({size(trial.freed)} freed)")
    best = search.best
    ending = []
    if best is not None:
        ending.append(f"best {_number(best.results[0])} (trial {best.number})")
    ending += _left(search)
    if ending:
        parts.append(f"[{', '.join(ending)}]")
    say(escaped("  ".join(parts)))


def _left(search: Search) -> Iterator[str]:
    left = search.most - sum(trial.end is not None for trial in search.trials)
    if left <= 0:
        return
    seconds = search.seconds_left()
    about = "" if seconds is None else f", about {data.duration(seconds)}"
    yield f"{left} left{about}"


def value_text(trial: SearchTrial) -> str:
    """The values of a trial, or how it ended without one."""
    if trial.end is TrialEnd.COMPLETE:
        return " ".join(map(_number, trial.results))
    values = trial.curve.values
    after = f" {_number(values[-1])} after {len(values)}" if values else ""
    if trial.end is None:
        return f"open{after}"
    return f"{WORDS[trial.end]}{after if trial.end is TrialEnd.PRUNED else ''}"


def _number(value: float) -> str:
    return f"{value:.4g}"


def end(search: Search, prepared: PreparedSearch) -> tuple[str | None, str]:
    """Prints the best trials, writes the study's page, and prints what to type next. Returns the
    page's path and the next command."""
    ranked = ranking(search)
    names = [each.metric for each in search.engine.objectives]
    columns = ("trial", "end", *names, *search.searched.keys, "run")
    rows = [_row(search, trial) for trial in ranked[:MOST_ROWS]]
    if rows:
        table.show(columns, rows)
    left_out = len(ranked) - len(rows)
    if left_out > 0:
        say(f"{left_out} more {plural('trial', left_out)} on the page")
    print_note("trials", counts(search))
    if freed := [trial.freed for trial in search.trials if trial.freed]:
        whose = f"the checkpoints of {len(freed)} pruned {plural('trial', len(freed))}"
        say(f"freed   {size(sum(freed))}: {whose}")
    page = None
    try:
        page = study_page.write(search)
    except Exception as error:  # of drawing, too: the results of the trials stay what they are
        print_note("note", f"there is no page of this study: {error}")
    else:
        say(f"page    {page}")
    command = following(search, prepared)
    if command:
        say(escaped(f"next    {command}"))
    if any(trial.end is None for trial in search.trials) or not search.closed:
        say(escaped(f"go on   {again()}"))
    return page, command


def counts(search: Search) -> str:
    """How many trials have ended, and how."""
    found = {word: sum(t.end is kind for t in search.trials) for kind, word in WORDS.items()}
    found["open"] = sum(trial.end is None for trial in search.trials)
    found["repeated"] = sum(trial.repeats is not None for trial in search.trials)
    return ", ".join(f"{count} {word}" for word, count in found.items() if count) or "none"


def _row(search: Search, trial: SearchTrial) -> tuple[str, ...]:
    values = trial.results or [math.nan] * len(search.engine.objectives)
    texts = ["" if math.isnan(value) else _number(value) for value in values]
    if not trial.results and trial.curve.values:
        texts[0] = f"{_number(trial.curve.values[-1])} after {len(trial.curve.values)}"
    spaces = search.searched.spaces
    varied = (space.text(trial.proposal.values[space.key]) for space in spaces)
    mark = ", best" if trial is search.best else ""
    word = "open" if trial.end is None else WORDS[trial.end]
    return (str(trial.number), f"{word}{mark}", *texts, *varied, shown(trial.run.path))


def ranking(search: Search) -> list[SearchTrial]:
    """Complete trials first, the best of them at the top; then those with some value."""
    sign = -1 if search.objective.mode == "max" else 1

    def place(trial: SearchTrial) -> tuple[int, float, int]:
        if trial.results:
            return 0, sign * trial.results[0], trial.number
        values = trial.curve.values
        if values and math.isfinite(values[-1]):
            return 1, sign * values[-1], trial.number
        return 2, 0.0, trial.number

    return sorted((trial for trial in search.trials if trial.repeats is None), key=place)


def again() -> str:
    """The command that was typed: it goes on with the study."""
    return shlex.join(["python", "-m", "distdl", *redact_command(sys.argv[1:])])


def following(search: Search, prepared: PreparedSearch) -> str:
    """The command that trains with the best values for longer; empty if no trial is complete."""
    best = search.best
    if best is None:
        return ""
    values = best.proposal.values
    words = [word for word in prepared.own if not word.startswith("name=")]
    words += [f"{space.typed}={space.text(values[space.key])}" for space in search.searched.spaces]
    for key in ("trainer.max_epochs", "trainer.max_steps"):
        length = OmegaConf.select(prepared.first.config, key)
        if isinstance(length, int) and length > 0 and key not in search.searched.keys:
            words = [word for word in words if not word.startswith(f"{key}=")]
            words.append(f"{key}={LONGER * length}")
    if prepared.trial_seconds is not None:
        words.append(f"{MAX_TIME}={twice_time(time_text(prepared.trial_seconds))}")
    return shlex.join(["python", "-m", "distdl", *redact_command(words)])
