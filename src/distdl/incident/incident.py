"""The report of a failed attempt: incident.json and incident.md, and its head for the screen."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl.incident import causes
from distdl.incident.causes import ranks_text, size_text
from distdl.incident.evidence import ABORTED, LENGTH, Place, Rank, Text, one_line, ranks_of
from distdl.job import JobState
from distdl.runs import failures
from distdl.runs.attempt import STATUS
from distdl.runs.checkpoints import SUFFIX
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.runs.files import read_json, write_json, write_text
from distdl.util.errors import UserError
from distdl.util.exit_codes import EXIT_REFUSED
from distdl.util.redact import redact
from distdl.util.tail import plain

JSON, MARKDOWN = "incident.json", "incident.md"
TAIL_BYTES = 1 << 16  # as many are read from the end of a log,
LINES = 12  # and as many lines of them are shown
SAMPLES = 8  # as many are shown
PATIENCE = 2.5  # seconds
ROW = {"rank", "host", "step", "phase", "where"}
NO_FAILURE = (JobState.SUCCEEDED, JobState.PRUNED, JobState.CANCELLED, JobState.PREEMPTED)


class Incident(Place, frozen=True):
    """Why an attempt failed, as far as its files tell, and where the first rank was.

    Args:
        title: One line: the rank, and what happened to it.
        waiting: What the others waited for; "" if they did not.
        cause: A name from `distdl.incident.causes`; `evidence` is what speaks for it.
        next: The command to type.
        log_tail: The last lines of the rank's log, and of what it printed.
        ranks: What is known of each rank.
        straggler: Which rank was slow before, and in what; "" if none was.
        not_restarted: Why distdl did not start the run again; "" if it did, or was not to.
        would_fit: After a lack of device memory, lines on what would have fit; none if unknown.
        report, log: Paths, of files that may not exist.
    """

    title: str
    waiting: str
    cause: str
    evidence: Text
    remedy: str
    next: str
    log_tail: list[str]
    ranks: list[dict[str, Any]]
    straggler: Text
    not_restarted: Text
    would_fit: list[Text]
    report: str
    log: str


def write(attempt: Attempt) -> Incident | None:
    """Writes the report, again if more is known by now, and its verdict into status.json: both name
    one rank. None if no rank of the attempt failed. If it cannot be written, for example on a full
    disk, it is returned all the same."""
    incident = read(attempt)
    if incident is not None:
        with suppress(OSError, UserError):  # a damaged status.json
            record_verdict(attempt, incident)
        with suppress(OSError):
            write_json(attempt.path / JSON, without_secrets(incident.model_dump()))
            write_text(attempt.path / MARKDOWN, redact(markdown(incident)))
    return incident


def without_secrets(value: object) -> object:
    """The same value with its texts redacted: they come from exceptions and from logs."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: without_secrets(each) for key, each in value.items()}
    return [*map(without_secrets, value)] if isinstance(value, list) else value


def record_verdict(attempt: Attempt, incident: Incident) -> None:
    """Writes the rank that the report names into the status.json of an attempt that has failed.
    `Attempt.conclude`, which knows only the exceptions, may have written another one."""
    status = attempt.status()
    if status.get("state") != JobState.FAILED or status.get("killed"):
        return
    recorded = {error["rank"]: error for error in failures.recorded(attempt.errors)}
    error = recorded.get(incident.rank, {})
    known = f"{incident.cause}: {incident.evidence}"
    if error and not error.get("lost_peer") and not error.get("waiting"):
        known = failures.describe(error)
    first = failures.facts(error) or {"rank": incident.rank, "host": incident.host}
    attempt.update(error=redact(f"rank {incident.rank}: {known}"), first_error=first)


def await_monitors(attempt: Attempt) -> None:
    """Waits a moment for what the monitors of ranks that are gone may still be writing."""
    deadline = time.monotonic() + PATIENCE
    while _incomplete(attempt) and time.monotonic() < deadline:
        time.sleep(0.05)


def _incomplete(attempt: Attempt) -> bool:
    """Whether only the monitor of a rank that is gone can tell more."""
    first = attempt.first_error() or {}
    gone = first.get("lost_peer") or first.get("type") == failures.KILLED
    return bool(gone) and all(r.sight.how not in ("died", ABORTED) for r in ranks_of(attempt))


def read(attempt: Attempt) -> Incident | None:
    """What the attempt's files tell. None if no rank failed: it was cancelled, preempted, refused
    (exit code 2), or ended in a debugger."""
    status = read_json(attempt.path / STATUS)
    if status.get("state") in NO_FAILURE and (status.get("concluded") or not attempt.first_error()):
        return None
    ranks = ranks_of(attempt)
    cause = causes.find(ranks)
    if cause is None and status.get("state") == JobState.RUNNING:
        with suppress(UserError):  # a damaged file
            cause = causes.vanished(ranks) if attempt.state() is JobState.FAILED else None
    if cause is None:
        return None
    first = cause.rank
    refused = first.error.get("exit_code") == EXIT_REFUSED and not first.error.get("program")
    if refused or first.error.get("type") == "BdbQuit":
        return None
    log = attempt.logs / f"rank_{first.sight.rank}.log"
    return Incident(
        **dict(first.sight),
        title=_title(first, len(ranks)),
        waiting=_waiting([rank for rank in ranks if rank.waits and rank is not first]),
        cause=cause.name,
        evidence=cause.evidence,
        remedy=cause.remedy,
        next=_next(attempt),
        log_tail=_log_tail(attempt, log, first.sight.rank),
        ranks=[{**rank.sight.model_dump(include=ROW), "state": _state(rank)} for rank in ranks],
        straggler=str(status.get("straggler") or ""),
        not_restarted=str(status.get("not_restarted") or ""),
        would_fit=[str(each) for each in status.get("would_fit") or ()],
        report=shown(attempt.path / MARKDOWN),
        log=shown(log),
    )


def head(incident: Incident, command: bool = True) -> str:
    """At most eight lines for the screen. `command`: with the command to type."""
    samples = incident.samples or []
    few = ", ".join(map(str, samples[:SAMPLES]))
    if len(samples) > SAMPLES:
        few += ", ..."
    paths = (("log", incident.log), ("report", incident.report))
    facts = {
        "cause": f"{incident.cause}: {incident.evidence}",
        "others": incident.waiting,
        "samples": few and f"{few} ({len(samples)} in this rank's batch)",
        "fix": incident.remedy,
        **{key: path for key, path in paths if Path(path).exists()},
        "next": incident.next if command else "",
    }
    lines = (f"  {name:7} {value}" for name, value in facts.items() if value)
    return "\n".join([incident.title, *lines])


def markdown(incident: Incident) -> str:
    """The whole report. What comes from files is indented by 4, and so shown as it is."""
    sizes = incident.memory | {f"free on {name}": free for name, free in incident.disk.items()}
    kills = f"processes killed for lack of memory: {sizes.pop('oom_kills', 'unknown')}"
    samples = f"samples {incident.samples}" if incident.samples else ""
    memory = ", ".join(f"{name} {size_text(value)}" for name, value in sizes.items())
    rows = [incident.ranks[0], *(row.values() for row in incident.ranks)]
    doing = incident.ranks[incident.rank]["state"]
    blocks = {
        f"Rank {incident.rank}: {incident.cause}": head(incident).splitlines(),
        "What it was doing": [doing, samples, memory, kills, incident.straggler],
        "What would have fit": incident.would_fit,
        "Restarts": [incident.not_restarted] if incident.not_restarted else [],
        "All ranks": [" | ".join("" if v is None else str(v) for v in row) for row in rows],
        f"The last lines of rank {incident.rank}": incident.log_tail,
    }
    lines = []
    for title, block in blocks.items():
        if block:
            lines += [f"## {title}", "", *(f"    {line}" for line in block if line), ""]
    return "\n".join(lines)


def _title(rank: Rank, size: int) -> str:
    seen = rank.sight
    on = f"   ({rank.sight.host})" if rank.sight.host else ""
    if rank.text and not rank.waits and rank.error:
        first = "failed first" if size > 1 else "failed"
        return f"rank {seen.rank} {first}: {one_line(failures.describe(rank.error))}{on}"
    step = f"step {seen.step}" if seen.step is not None else ""
    place = ", ".join(filter(None, (step, seen.phase, seen.where))) or "nothing is known of it"
    killed = rank.text.startswith("Killed: ")
    return f"rank {seen.rank} {'was killed' if killed else 'did not come'}: {place}{on}"


def _state(rank: Rank) -> str:
    """What a rank was doing, or how it ended."""
    if rank.inside is not None:
        return f"waited in {rank.inside}"
    return one_line(rank.text.partition("\n")[0]) or rank.sight.action or "left nothing"


def _waiting(others: Sequence[Rank]) -> str:
    inside = next((f" in {rank.inside}" for rank in others if rank.inside), "")
    verb = "waits" if len(others) == 1 else "wait"
    return f"{ranks_text(others)} {verb} for it{inside}" if others else ""


def _next(attempt: Attempt) -> str:
    """The command that continues the run; without a checkpoint the one that started it."""
    run = RunDirectory(attempt.path.parents[1])
    with suppress(UserError):
        command = run.provenance().get("command")
        # A program's files have any name.
        pattern = "*" if run.recipe().get("program") is not None else f"*{SUFFIX}"
        trained = any(run.checkpoints.glob(pattern))
        if not trained and isinstance(command, list) and "distdl" in command:
            words = map(one_line, command[command.index("distdl") + 1 :])
            return shlex.join(["python", "-m", "distdl", *words])
    return f"python -m distdl resume {shlex.quote(shown(run.path))}"


def _log_tail(attempt: Attempt, log: Path, rank: int) -> list[str]:
    """The last lines of a rank's log, and of what it printed (`distdl.agent.rank_output`). Links,
    which no run writes, are not followed."""
    paths = [log]
    lines = list[str]()
    with suppress(UserError):
        node, local = divmod(rank, max(1, attempt.resources().devices))
        for folder in ("agent", f"agent-{node}"):
            paths += sorted(attempt.logs.glob(f"{folder}/*/*/{local}/std*.log"))
    for path in paths:
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                text = file.read(TAIL_BYTES).decode(errors="replace")
            last = [plain(line)[:LENGTH] for line in text.splitlines()[-LINES:]]
            lines += [line for line in last if line not in lines]
    return lines
