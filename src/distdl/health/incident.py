"""The report of a failed attempt: incident.json and incident.md, and its head for the screen."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl.health import causes
from distdl.health.causes import ranks_text, size_text
from distdl.health.evidence import LENGTH, STOPPED, Evidence, Place, evidence_of, one_line
from distdl.job import EXIT_REFUSED, JobState
from distdl.runs import failures
from distdl.runs.checkpoints import SUFFIX
from distdl.runs.directory import Attempt, RunDirectory, shown
from distdl.runs.files import write_json, write_text
from distdl.util.errors import UserError
from distdl.util.tail import plain

JSON, MARKDOWN = "incident.json", "incident.md"
TAIL_BYTES, LINES = 1 << 16, 12  # of the end of a log
SAMPLES, RANKS = 8, 64  # as many are shown
LOSSES, PATIENCE = ("lost host", "connection"), 2.5  # seconds to find another cause
NO_FAILURE = (JobState.SUCCEEDED, JobState.CANCELLED, JobState.PREEMPTED)


class Incident(Place, frozen=True):
    """Why an attempt failed, as far as its files tell, and where the first rank was.

    Args:
        title: One line: the rank, and what happened to it.
        doing: What it was doing.
        waiting: What the others waited for; "" if they did not.
        cause: A name from `distdl.health.causes`; `evidence` is what speaks for it.
        next: The command to type.
        log_tail: The last lines of the rank's log, and of what it printed.
        ranks: What is known of each rank.
        straggler: Which rank was slow before, and in what; "" if none was.
        report, log: Paths; "" if there is no such file.
    """

    title: str
    doing: str
    waiting: str
    cause: str
    evidence: str
    remedy: str
    next: str
    log_tail: list[str]
    ranks: list[dict[str, Any]]
    straggler: str
    report: str
    log: str


def write(attempt: Attempt) -> Incident | None:
    """Writes the report, again if more is known by now. None if no rank of the attempt failed. If
    it cannot be written, for example on a full disk, it is returned all the same."""
    incident = read(attempt)
    if incident is not None:
        try:
            write_json(attempt.path / JSON, incident.model_dump())
            write_text(attempt.path / MARKDOWN, markdown(incident))
        except OSError:
            return incident.model_copy(update={"report": ""})
    return incident


def await_cause(attempt: Attempt) -> None:
    """Waits a moment for the files of a lost rank, which its monitor may be writing."""
    deadline = time.monotonic() + PATIENCE
    while (report := read(attempt)) and report.cause in LOSSES and time.monotonic() < deadline:
        time.sleep(0.05)


def read(attempt: Attempt) -> Incident | None:
    """What the attempt's files tell. None if no rank failed: it was cancelled, preempted, refused
    (exit code 2), or ended in a debugger."""
    evidence, status = evidence_of(attempt), dict[str, Any]()
    with suppress(UserError):
        status = attempt.status()
    if status.get("state") in NO_FAILURE and (status.get("concluded") or not evidence.errors):
        return None
    cause = causes.find(evidence)
    error = evidence.errors.get(cause.rank, {}) if cause else {}
    if cause is None or error.get("exit_code") == EXIT_REFUSED or error.get("type") == "BdbQuit":
        return None
    rank, log = cause.rank, attempt.logs / f"rank_{cause.rank}.log"
    place = {"rank": rank, "host": evidence.host(rank), "where": evidence.where(rank)}
    return Incident(
        **{**dict(evidence.seen(rank)), **place},
        title=_title(evidence, rank),
        doing=_state(evidence, rank),
        waiting=_waiting(evidence, rank),
        cause=cause.name,
        evidence=one_line(cause.evidence),
        remedy=cause.remedy,
        next=_next(attempt),
        log_tail=[line for path in (log, *_output(attempt, rank)) for line in _tail(path)],
        ranks=[_row(evidence, each) for each in range(evidence.size)],
        straggler=one_line(status.get("straggler") or ""),
        report=shown(attempt.path / MARKDOWN),
        log=shown(log) if log.exists() else "",
    )


def head(incident: Incident, command: bool = True) -> str:
    """At most eight lines for the screen. `command`: with the command to type."""
    samples = incident.samples or []
    few = ", ".join(map(str, samples[:SAMPLES])) + ", ..." * (len(samples) > SAMPLES)
    facts = {
        "cause": f"{incident.cause}: {incident.evidence}",
        "others": incident.waiting,
        "samples": few and f"{few} ({len(samples)} in this rank's batch)",
        "fix": incident.remedy,
        "log": incident.log,
        "report": incident.report,
        "next": incident.next if command else "",
    }
    lines = (f"  {name:7} {value}" for name, value in facts.items() if value)
    return "\n".join([incident.title, *lines])


def markdown(incident: Incident) -> str:
    """The whole report. What comes from files stands in fenced blocks, as it is."""
    memory = {k: v for k, v in incident.memory.items() if v is not None and k != "oom_kills"}
    facts = {
        "doing": incident.doing,
        "samples": ", ".join(map(str, incident.samples or ())),
        "memory": ", ".join(f"{name} {size_text(value)}" for name, value in memory.items()),
        "free": ", ".join(f"{name} {size_text(value)}" for name, value in incident.disk.items()),
        "before": incident.straggler,
    }
    rows = [" | ".join(map(str, row.values())) for row in incident.ranks[:RANKS]]
    more = [f"{len(incident.ranks) - RANKS} more in {JSON}"] * (len(incident.ranks) > RANKS)
    parts = {
        f"Rank {incident.rank}: {incident.cause}": head(incident).splitlines(),
        "Then": [f"{name:7} {value}" for name, value in facts.items() if value],
        "All ranks": [" | ".join(incident.ranks[0]), *rows, *more],
        f"The last lines of rank {incident.rank}": incident.log_tail,
    }
    return "\n".join(f"## {title}\n\n{_fenced(lines)}" for title, lines in parts.items() if lines)


def _fenced(lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}\n"


def _title(evidence: Evidence, rank: int) -> str:
    error, seen = evidence.errors.get(rank), evidence.seen(rank)
    on = f"   ({host})" if (host := evidence.host(rank)) else ""
    if error is not None and evidence.text(rank) and not evidence.waits(rank):
        first = "failed first" if evidence.size > 1 else "failed"
        return f"rank {rank} {first}: {one_line(failures.describe(error))}{on}"
    what = "was killed" if evidence.text(rank) and not error else "did not come"
    step = f"step {seen.step}" if seen.step is not None else ""
    place = ", ".join(filter(None, (step, seen.phase, evidence.where(rank))))
    return f"rank {rank} {what}: {place or 'nothing is known of it'}{on}"


def _state(evidence: Evidence, rank: int) -> str:
    """What a rank was doing, or how it ended."""
    seen, inside = evidence.seen(rank), evidence.inside().get(rank)
    if inside is not None:
        return f"waited in {inside}"
    if text := evidence.text(rank):
        return one_line(text.partition("\n")[0])
    action = seen.action or ("" if rank in evidence.ranks else "left nothing")
    return f"stopped in {action}" if seen.process in STOPPED else action


def _waiting(evidence: Evidence, rank: int) -> str:
    others = [each for each in evidence.waiting() if each != rank]
    inside = next((each for r, each in evidence.inside().items() if r != rank), None)
    verb, call = "waits" if len(others) == 1 else "wait", f" in {inside}" if inside else ""
    return f"{ranks_text(others)} {verb} for it{call}" if others else ""


def _row(evidence: Evidence, rank: int) -> dict[str, Any]:
    seen, where = evidence.seen(rank), evidence.where(rank)
    place = {"rank": rank, "host": evidence.host(rank), "step": seen.step, "phase": seen.phase}
    return {**place, "where": where, "state": _state(evidence, rank)}


def _next(attempt: Attempt) -> str:
    """The command that continues the run; without a checkpoint the one that started it."""
    run = RunDirectory(attempt.path.parents[1])
    with suppress(UserError):
        command = run.provenance().get("command")
        trained = any(run.checkpoints.glob(f"*{SUFFIX}"))
        if not trained and isinstance(command, list) and "distdl" in command:
            words = map(one_line, command[command.index("distdl") + 1 :])
            return shlex.join(["python", "-m", "distdl", *words])
    return f"python -m distdl resume {shlex.quote(shown(run.path))}"


def _output(attempt: Attempt, rank: int) -> list[Path]:
    """The files with what a rank printed, see `distdl.worker.rank_output`."""
    with suppress(UserError):
        node, local = divmod(rank, max(1, attempt.resources().devices))
        paths = attempt.logs.glob(f"agent*/*/*/{local}/std*.log")
        nodes = ("agent", f"agent-{node}")
        return sorted(path for path in paths if path.parents[3].name in nodes)
    return []


def _tail(path: Path) -> list[str]:
    """The last lines of a log. A link, which no run writes, is not followed."""
    with suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
            return [plain(line)[:LENGTH] for line in lines[-LINES:]]
    return []
