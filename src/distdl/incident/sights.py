"""What is written about a rank when a job fails: health/rank_N.json and stacks_N.txt."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl.incident import incident
from distdl.runs import failures
from distdl.runs.directory import Attempt
from distdl.runs.files import write_json, write_text
from distdl.util.exit_codes import EXIT_HUNG
from distdl.util.redact import redact


def write(attempt: Path, sight: Mapping[str, Any], stacks: str = "") -> None:
    """Writes the first sight of a rank, and the stacks of its threads; later ones are of its
    shutdown."""
    folder = attempt / "health"
    rank = sight["rank"]
    with suppress(OSError):  # a full disk, or a lost one, must not hide the failure
        if (folder / f"rank_{rank}.json").exists():
            return
        failures.release(attempt / "errors", rank)
        write_json(folder / f"rank_{rank}.json", sight)
        if stacks:
            write_text(folder / f"stacks_{rank}.txt", redact(stacks))


def record_hang(attempt: Path, sight: Mapping[str, Any], what: str, stacks: str = "") -> None:
    """Records as a rank's failure that it made no progress."""
    known = {key: sight[key] for key in ("where", "step", "enqueued") if sight.get(key) is not None}
    known["waiting"] = bool(sight.get("collective"))
    folder = attempt / "errors"
    trace = redact(stacks)
    failures.record(folder, sight["rank"], failures.HANG, what, trace, EXIT_HUNG, **known)


def conclude(attempt: Path, sight: Mapping[str, Any], alone: bool) -> None:
    """Records the failure of an attempt whose rank 0 cannot do so, and shows it if no other process
    will: `alone` says that the job is this one process."""
    if sight["rank"] != 0:
        return
    if first := failures.first(attempt / "errors"):
        with suppress(OSError):  # the report puts its own verdict there
            Attempt(attempt).fail(f"rank {first['rank']}: {failures.describe(first)}", EXIT_HUNG)
    if (report := incident.write(Attempt(attempt))) and alone:
        print(incident.head(report), file=sys.stderr, flush=True)
