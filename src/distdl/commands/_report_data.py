"""What a report tells, read from a run directory. Everything may be absent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from distdl.config import TRAIN, unit_of
from distdl.run_directory import RunDirectory
from distdl.run_files import Damaged
from distdl.tracking.records import journals, read


@dataclass
class Series:
    """One metric: optimizer steps, times (seconds since 1970) and values, in order."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class Attempt:
    """One start of the run; times are seconds since 1970. `task`: "" is the training."""

    number: int
    task: str
    state: str
    started: float | None
    ended: float | None
    changed: dict[str, Any]
    error: str
    metrics: dict[str, float]
    parameters: dict[str, Any]


@dataclass
class Run:
    """All of it. `series` holds what the latest attempt says about each step."""

    path: Path
    run_id: str
    attempts: list[Attempt]
    provenance: dict[str, Any]
    config: str
    series: dict[str, Series]
    damage: list[str] = field(default_factory=list)  # one text for each file that is damaged

    @property
    def state(self) -> str:
        return self.attempts[-1].state if self.attempts else "UNKNOWN"

    @property
    def unit(self) -> str:
        """Of what `perf/images_per_second` counts."""
        return unit_of(mapping(_parsed(self.config).get("data")).get("_target_"))


def load(path: Path) -> Run:
    """Read a run directory."""
    folders = sorted(p for p in path.glob("attempts/*") if p.name.isdigit())
    launches = [_yaml(folder / "launch.yaml", path) for folder in folders]
    absolute = path.absolute()
    run_id = next((str(x["run_id"]) for x in reversed(launches) if x.get("run_id")), "")
    return Run(
        path=path,
        run_id=run_id or f"{absolute.parent.name}/{absolute.name}",
        attempts=[_attempt(f, launch, path) for f, launch in zip(folders, launches, strict=True)],
        provenance=read_json(path / "provenance.json", path),
        config=_read(path / "config.yaml", path),
        series=_series(path),
        damage=_damage(RunDirectory(path)),
    )


def _damage(run: RunDirectory) -> list[str]:
    """What is wrong with each file that is there."""
    config, provenance = run.path / "config.yaml", run.path / "provenance.json"
    asks: list[tuple[Path, Callable[[], object]]] = [
        (config, run.check_config) if run.exists else (provenance, run.provenance)
    ]
    for attempt in run.attempts():
        asks.append((attempt.path / "launch.yaml", attempt.check_launch))
        asks.append((attempt.path / "status.json", attempt.status))
        asks.append((attempt.path / "job.json", attempt.job))
    found = []
    for path, ask in asks:
        if _is_of(path, run.path):
            try:
                ask()
            except Damaged as damaged:
                found.append(str(damaged))
    return found


def _attempt(folder: Path, launch: dict[str, Any], run: Path) -> Attempt:
    status = read_json(folder / "status.json", run)
    error = status.get("error") or ""
    if isinstance(error, dict):
        error = error.get("message") or json.dumps(error)
    metrics = mapping(status.get("metrics"))
    task = mapping(mapping(launch.get("where")).get("task"))
    target = str(task.get("_target_") or TRAIN)
    return Attempt(
        number=int(folder.name),
        task="" if target == TRAIN else target.rpartition(".")[2],
        state=str(status.get("state") or "UNKNOWN"),
        started=_moment(status.get("started")),
        ended=_moment(status.get("ended")),
        changed=mapping(status.get("changed")) or mapping(launch.get("changes")),
        error=str(error),
        metrics={k: v for k, v in metrics.items() if _number(v) is not None},
        parameters=mapping(status.get("parameters")),
    )


def _series(run: Path) -> dict[str, Series]:
    """Every metric of every node.

    A crash makes steps happen twice. Where a later attempt covers a range of steps, its values
    replace what the earlier ones say there, also where it logged at other steps of that range.
    System metrics belong to a time and are kept whole.
    """
    found: dict[str, dict[int, list[tuple[int, float, float]]]] = {}  # name -> attempt -> points
    for path in journals(run).values():
        if not _is_of(path, run):
            continue
        for record in read(path):
            for name, value in record.metrics.items():
                points = found.setdefault(name, {}).setdefault(record.attempt, [])
                points.append((record.step, record.time, value))
    series = {}
    for name, attempts in found.items():
        kept: list[tuple[int, float, float]] = []
        if name.startswith("system/"):
            kept = sorted((p for points in attempts.values() for p in points), key=lambda p: p[1])
        else:
            for number in sorted(attempts):
                points = list({p[0]: p for p in attempts[number]}.values())
                first, last = min(p[0] for p in points), max(p[0] for p in points)
                kept = [p for p in kept if not first <= p[0] <= last] + points
            kept.sort()
        series[name] = Series(*map(list, zip(*kept, strict=True)))
    return series


def summary(run: Run) -> list[tuple[str, str]]:
    """The few lines that most people open a report for."""
    rows: list[tuple[str, str]] = []
    for name in ("val/acc1", "val/acc5", "val/acc", "val/loss", "train/loss"):
        if name in run.series:
            values = [v for v in run.series[name].values if v == v]
            if values:
                best = min(values) if "loss" in name else max(values)
                rows.append((name, f"{_shown(name, values[-1])} (best {_shown(name, best)})"))
    for counted in [a.parameters for a in run.attempts if a.parameters][-1:]:
        total, trainable = (_number(counted.get(name)) for name in ("total", "trainable"))
        if total is not None and trainable is not None:
            rows.append(("parameters", f"{total:,.0f} ({trainable:,.0f} trainable)"))
    speed = run.series.get("perf/images_per_second")
    if speed:
        rows.append(("throughput", f"{_median(speed.values):,.0f} {run.unit} (median)"))
    wait = run.series.get("perf/data_wait")
    if wait:
        rows.append(("data_wait", f"{100 * _median(wait.values):.1f} % of the time (median)"))
    trained = [a for a in run.attempts if not a.task]
    seconds = sum(end - a.started for a in trained if a.started and (end := _end(run, a)))
    if seconds:
        rows.append(("duration", duration(seconds)))
    return rows


def _end(run: Run, attempt: Attempt) -> float | None:
    """When an attempt ended; of one that could not say so, the last thing that it logged."""
    if attempt.ended or attempt.state == "RUNNING":
        return attempt.ended or time.time()
    times = [t for s in run.series.values() for t in s.times[-1:]]
    last = max(times, default=None)
    return last if last and attempt.started and last > attempt.started else None


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _shown(name: str, value: float) -> str:
    if "acc" in name and 0 <= value <= 1:
        return f"{100 * value:.2f} %"
    return f"{value:.4g}"


def _median(values: list[float]) -> float:
    finite = sorted(v for v in values if v == v)
    return finite[len(finite) // 2] if finite else float("nan")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None


def _moment(value: Any) -> float | None:
    found = _number(value)
    return found if found is not None and abs(found) < 1e11 else None  # what a clock can show


def mapping(value: Any) -> dict[str, Any]:
    """A file's mapping; empty for whatever else stands there."""
    return value if isinstance(value, dict) else {}


def read_json(path: Path, run: Path) -> dict[str, Any]:
    """A JSON mapping of a run; empty if there is none."""
    try:
        return mapping(json.loads(_read(path, run)))
    except (ValueError, RecursionError):
        return {}


def _yaml(path: Path, run: Path) -> dict[str, Any]:
    return _parsed(_read(path, run))


def _parsed(text: str) -> dict[str, Any]:
    try:
        return mapping(yaml.safe_load(text))
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}


def _read(path: Path, run: Path) -> str:
    """The text of a run's file; empty if there is none."""
    try:
        return path.read_text(errors="replace") if _is_of(path, run) else ""
    except OSError:
        return ""


def _is_of(path: Path, run: Path) -> bool:
    """Whether it is a file in the run's folder: a link that leads out would put somebody's own file
    into a page that he may give away."""
    return path.is_file() and path.resolve().is_relative_to(run.resolve())
