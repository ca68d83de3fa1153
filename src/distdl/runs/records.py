"""Reads and writes the journal's lines. Standard library only, so that the report starts fast."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from distdl.util.answering import refuse_silent
from distdl.util.errors import UserError


@dataclass(frozen=True)
class Record:
    """The metrics that were logged at one moment.

    Args:
        time: Seconds since 1970.
        step: The optimizer step.
        attempt: Which start of the run wrote it, from 1.
        metrics: Name to value, including NaN and infinities.
        end: Byte offset of the end of this record in its file.
    """

    time: float
    step: int
    attempt: int
    metrics: dict[str, float]
    end: int = 0


def journal_path(run_dir: Path, node_rank: int = 0) -> Path:
    """The journal of one node. Each node writes only its own, so that no two hosts share a file."""
    name = "metrics.jsonl" if node_rank == 0 else f"metrics-node{node_rank}.jsonl"
    return Path(run_dir) / "logs" / name


def journals(run_dir: Path) -> dict[int, Path]:
    """Node rank to journal, for the journals that exist."""
    paths = Path(run_dir).glob("logs/metrics*.jsonl")
    ranks = {p.stem.removeprefix("metrics").removeprefix("-node") or "0": p for p in paths}
    return dict(sorted((int(rank), p) for rank, p in ranks.items() if rank.isdigit()))


def encode(time: float, step: int, attempt: int, metrics: Mapping[str, float]) -> bytes:
    """One line with its newline. JSON has no NaN, so non-finite values become strings."""
    safe = {k: v if math.isfinite(v) else str(v) for k, v in metrics.items()}
    line = {"t": round(time, 6), "step": step, "attempt": attempt, "metrics": safe}
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def _decode(line: bytes, end: int) -> Record | None:
    try:
        fields = json.loads(line)
        metrics = {str(k): float(v) for k, v in fields["metrics"].items()}
        step, attempt = int(fields["step"]), int(fields["attempt"])
        float(step)  # an OverflowError, if no axis can show it
        return Record(float(fields["t"]), step, attempt, metrics, end)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None  # cut off by a kill -9, or written by another program


def read(path: Path, offset: int = 0) -> Iterator[Record]:
    """The records of a journal from a byte offset on; unreadable lines are skipped.

    A last line without its newline is either complete (then it is read) or still being written
    (then it is left for the next call): an incomplete JSON object never parses.
    """
    return (record for record in lines(path, offset) if record is not None)


def lines(path: Path, offset: int = 0) -> Iterator[Record | None]:
    """As `read`, with None for each line that cannot be read and is not still being written."""
    with Path(path).open("rb") as file:
        file.seek(offset)
        for line in file:
            offset += len(line)
            record = _decode(line, offset)
            if record is not None or line.endswith(b"\n"):
                yield record


def find_run(text: str) -> Path:
    """Finds the run directory that a user named. If it is not one, raises a UserError that lists
    the runs below it, newest first, or the runs in outputs/ with this name. Also raises one if its
    store does not answer."""
    path = Path(text).expanduser()
    refuse_silent(path)
    if (path / "config.yaml").is_file() or journals(path):
        return path
    if inside := [p for p in path.absolute().parents if (p / "config.yaml").is_file()]:
        near = os.path.relpath(inside[0])
        raise UserError.at(
            text,
            what="is not a run, but lies inside one",
            remedy=f"did you mean {near}?",
            code="wrong-kind",
        )
    if not path.exists():
        named = sorted(str(p.parent) for p in Path("outputs").glob(f"**/{path.name}/config.yaml"))
        remedy = "give a run's own folder"
        if named:
            remedy = f"did you mean {' or '.join(named[:3])}?"
        raise UserError.at(text, what="there is no such folder", remedy=remedy, code="not-found")
    patterns = ("*/config.yaml", "*/*/config.yaml", "*/*/*/config.yaml")  # sweeps are deeper
    below = [p.parent for pattern in patterns for p in path.glob(pattern)]
    below.sort(key=lambda p: p.stat().st_mtime, reverse=True)
    remedy = "runs below it: " + ", ".join(map(str, below[:3])) if below else ""
    raise UserError.at(
        text,
        what="is not a run: it holds neither config.yaml nor logs/metrics.jsonl",
        remedy=remedy or "give a run's own folder",
        code="wrong-kind",
    )
