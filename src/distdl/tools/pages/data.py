"""The contents of a report, read from a run directory. Every file may be absent."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median_high
from typing import Any

import yaml

from distdl.config import task_facts
from distdl.config.recipe import unit_of
from distdl.job import JobState
from distdl.runs.attempt import moment
from distdl.runs.checkpoints import judged_by
from distdl.runs.directory import Attempt, RunDirectory
from distdl.runs.records import Record, journal_path, journals, lines
from distdl.util.errors import Damaged
from distdl.util.strict_json import numbers
from distdl.util.wording import plural

MOST_VALUES = 8  # of the validation, in the summary
# COCO's numbers, such as val/box_ap_small: -1 is its word for "there is no such object".
OF_COCO = re.compile(r"(val|test)/(\w+_)?(ap|ar)\d*(_small|_medium|_large)?$")


@dataclass
class MetricSeries:
    """One metric: optimizer steps, times (seconds since 1970) and values, in order."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass
class ReportedAttempt:
    """One start of the run; times are seconds since 1970. `task` is "" for training.

    Args:
        state: The recorded one; FAILED if it cannot be under way any more.
        ended: When it ended; of one that was killed, when it last logged; None: unknown.
    """

    number: int
    task: str
    state: str
    started: float | None
    ended: float | None
    changed: dict[str, Any]
    error: str
    parameters: dict[str, Any]
    data: str  # identifies the data set; "" if it is unknown
    metrics: dict[str, Any]  # at its end
    launch: dict[str, Any]  # its launch.yaml


@dataclass
class ReportedRun:
    """A complete run. `series` holds the latest attempt's value of each step."""

    path: Path
    run_id: str
    attempts: list[ReportedAttempt]
    provenance: dict[str, Any]
    config: str
    series: dict[str, MetricSeries]
    damage: list[str] = field(default_factory=list)  # one text for each damaged file

    def values(self, name: str) -> list[float]:
        """The values of a metric; empty if it was not logged."""
        return self.series[name].values if name in self.series else []

    def settings(self) -> dict[str, Any]:
        """The config; empty if it cannot be read."""
        return _parsed(self.config, safe_yaml)

    @property
    def state(self) -> str:
        return self.attempts[-1].state if self.attempts else "UNKNOWN"

    @property
    def unit(self) -> str:
        """The unit of `perf/images_per_second`."""
        return unit_of(mapping(self.settings().get("data")).get("_target_"))


def load(path: Path, *, is_copy: bool = False) -> ReportedRun:
    """Reads a run. `is_copy` says that its files were fetched from a store: then no process of this
    machine tells whether it is under way."""
    folders = sorted(p for p in path.glob("attempts/*") if p.name.isdigit())
    launches = {f: _parsed(_read(f / "launch.yaml", path), safe_yaml) for f in folders}
    run_ids = [str(launch["run_id"]) for launch in launches.values() if launch.get("run_id")]
    logged, unreadable = _logged(path)
    attempts = [_attempt(folder, launch, path) for folder, launch in launches.items()]
    _end_lost(attempts, logged, None if is_copy else RunDirectory(path))
    return ReportedRun(
        path=path,
        run_id=run_ids[-1] if run_ids else "/".join(path.absolute().parts[-2:]),
        attempts=attempts,
        provenance=read_json(path / "provenance.json", path),
        config=_read(path / "config.yaml", path),
        series=_series(logged),
        damage=[*_damage(RunDirectory(path)), *_damaged_journals(path, folders, unreadable)],
    )


def _end_lost(
    attempts: Sequence[ReportedAttempt], logged: Iterable[Record], run: RunDirectory | None
) -> None:
    """Ends attempts that were killed before they could record it, at the last thing they logged: a
    run trains once at a time, so one is over if another one began to train after it."""
    times: dict[int, float] = {}
    for record in logged:
        times[record.attempt] = max(record.time, times.get(record.attempt, 0.0))
    trainings = [each.number for each in attempts if not each.task]
    for attempt in attempts:
        if attempt.ended is not None or attempt.started is None:
            continue
        if attempt.state == JobState.RUNNING:
            followed = not attempt.task and attempt.number < trainings[-1]
            attempt.state = JobState.FAILED if followed else _state_now(attempt, run)
        last = times.get(attempt.number, 0.0)
        if attempt.state != JobState.RUNNING and last > attempt.started:
            attempt.ended = last


def _state_now(attempt: ReportedAttempt, run: RunDirectory | None) -> str:
    """The state as far as this machine knows it, see `Attempt.state`."""
    if run is None:
        return attempt.state
    try:
        return Attempt(run.path / "attempts" / f"{attempt.number:03d}").state()
    except Damaged:  # which the page names
        return JobState.UNKNOWN


def _damage(run: RunDirectory) -> list[str]:
    """A message for each damaged file."""
    checks: dict[Path, Callable[[], object]] = {run.path / "config.yaml": run.check_config}
    if not run.exists:
        checks = {run.path / "provenance.json": run.provenance}
    for attempt in run.attempts():
        checks[attempt.path / "launch.yaml"] = attempt.check_launch
        checks[attempt.path / "status.json"] = partial(_check_status, attempt)
        checks[attempt.path / "job.json"] = attempt.job
    damage = []
    for path, check in checks.items():
        if is_of(path, run.path):
            try:
                check()
            except Damaged as error:
                damage.append(str(error))
    return damage


def _check_status(attempt: Attempt) -> None:
    """Raises `Damaged` if the attempt's status.json cannot be read, or has values that the page
    cannot show."""
    status = attempt.status()
    counts = status.get("parameters") or {}
    left_out = {}
    for name in ("started", "ended"):
        if status.get(name) and moment(status[name]) is None:
            left_out[name] = status[name]
    for name in ("total", "trainable"):
        if name in counts and _number(counts[name]) is None:
            left_out[f"parameters.{name}"] = counts[name]
    if left_out:
        what = ", ".join(f"{name} is {str(value)[:40]!r}" for name, value in left_out.items())
        raise Damaged(attempt.path / "status.json", what, "the page leaves this out")


def _damaged_journals(
    run: Path, attempts: Sequence[Path], unreadable: Mapping[Path, int]
) -> Iterator[str]:
    """A message for each journal of which something is missing."""
    recorded = [read_json(folder / "status.json", run).get("journal_bytes") for folder in attempts]
    most = max((each for each in recorded if isinstance(each, int)), default=0)
    journal = journal_path(run)
    size = journal.stat().st_size if is_of(journal, run) else 0
    if size < most:
        what = f"{size:,} of the {most:,} bytes that the run has written are left"
        yield str(Damaged(journal, what, "what it logged after that is missing: copy it again"))
    for path, count in unreadable.items():
        what = f"{count} {plural('line', count)} cannot be read, and are left out"
        yield str(Damaged(path, what, "a kill -9 or a full disk may have cut them off"))


def _attempt(folder: Path, launch: dict[str, Any], run: Path) -> ReportedAttempt:
    status = read_json(folder / "status.json", run)
    error = status.get("error") or ""
    if isinstance(error, dict):
        error = error.get("message") or json.dumps(error)
    task = mapping(mapping(launch.get("where")).get("task")).get("_target_")
    return ReportedAttempt(
        number=int(folder.name),
        task="" if not task or task_facts.of_target(task).trains else str(task).rpartition(".")[2],
        state=str(status.get("state") or "UNKNOWN"),
        started=moment(status.get("started")),
        ended=moment(status.get("ended")),
        changed=mapping(status.get("changed")) or mapping(launch.get("changes")),
        error=str(error),
        parameters=mapping(status.get("parameters")),
        data=str(status.get("data") or ""),
        metrics=numbers(mapping(status.get("metrics"))),
        launch=launch,
    )


def _logged(run: Path) -> tuple[list[Record], dict[Path, int]]:
    """What all nodes have logged, and how many lines of which journals cannot be read."""
    logged: list[Record] = []
    unreadable: dict[Path, int] = {}
    for path in journals(run).values():
        if not is_of(path, run):
            continue
        for record in lines(path):
            if record is None:
                unreadable[path] = unreadable.get(path, 0) + 1
            else:
                logged.append(record)
    return logged, unreadable


def _series(logged: Iterable[Record]) -> dict[str, MetricSeries]:
    """Every metric of every node.

    After a crash, steps are repeated. Where a later attempt covers a range of steps, its values
    replace all values of earlier attempts in that range, even at steps that it did not log. System
    metrics belong to a time, not to a step, and all are kept.
    """
    named: dict[str, dict[int, list[tuple[int, float, float]]]] = {}  # name, attempt -> points
    for record in logged:
        for name, value in record.metrics.items():
            points = named.setdefault(name, {}).setdefault(record.attempt, [])
            points.append((record.step, record.time, value))
    series = {}
    for name, attempts in named.items():
        kept: list[tuple[int, float, float]] = []
        by_time = name.startswith("system/")
        for _, points in sorted(attempts.items()):
            if not by_time:
                points = list({point[0]: point for point in points}.values())
                first, last = min(points)[0], max(points)[0]
                kept = [point for point in kept if not first <= point[0] <= last]
            kept += points
        kept.sort(key=itemgetter(1 if by_time else 0))
        series[name] = MetricSeries(*map(list, zip(*kept, strict=True)))
    return series


def summary(run: ReportedRun) -> list[tuple[str, str]]:
    """The few lines that most readers look for in a report."""
    rows = _validation(run)
    for counted in [a.parameters for a in run.attempts if a.parameters][-1:]:
        total, trainable = (_number(counted.get(name)) for name in ("total", "trainable"))
        if total is not None and trainable is not None:
            rows.append(("parameters", f"{total:,.0f} ({trainable:,.0f} trainable)"))
    if speed := run.values("perf/images_per_second"):
        rows.append(("throughput", f"{median(speed):,.0f} {run.unit} (median)"))
    if wait := run.values("perf/data_wait"):
        rows.append(("data_wait", f"{100 * median(wait):.1f} % of the time (median)"))
    if took := seconds(run):
        rows.append(("duration", duration(took)))
    return rows


def seconds(run: ReportedRun, attempt: ReportedAttempt | None = None) -> float:
    """How long the attempts that train have taken together, or one attempt."""
    counted = [a for a in run.attempts if not a.task] if attempt is None else [attempt]
    times = ((each.started, _end(each)) for each in counted)
    return sum(end - started for started, end in times if started and end)


def _validation(run: ReportedRun) -> list[tuple[str, str]]:
    """The values of the validation: that by which best.ckpt is chosen, others, losses."""
    checkpoint = mapping(run.settings().get("checkpoint"))
    folder = RunDirectory(run.path).checkpoints
    chosen = str(checkpoint.get("monitor"))
    main, mode = judged_by(folder, chosen, str(checkpoint.get("mode")))
    names = sorted(n for n in run.series if n.startswith("val/") and n != "val/samples")
    losses = [name for name in names if "loss" in name]
    others = [name for name in names if name not in losses]
    known = dict.fromkeys((str(main), *others, *losses, "train/loss"))
    ordered = [name for name in known if name in run.series]
    rows = []
    for name in ordered[:MOST_VALUES]:
        there = [value for value in run.values(name) if value == value]
        values = [value for value in there if not is_absent(name, value)]
        best_of = better(name, mode if name == main else "")
        if values:
            best = f" (best {shown_value(name, best_of(values))})" if best_of else ""
            rows.append((name, f"{shown_value(name, values[-1])}{best}"))
        elif there:
            rows.append((name, "none: there is no such object"))
    if left := ordered[MOST_VALUES:]:
        rows.append(("more", f"{len(left)} more metrics have curves below"))
    return rows


def is_absent(name: str, value: float) -> bool:
    """Whether a metric says by this value that it has none."""
    return value == -1 and OF_COCO.match(name) is not None


def better(name: str, mode: str) -> Callable[[list[float]], float] | None:
    """Whether the best value is the least or the greatest; None: nobody knows."""
    if mode in ("min", "max"):
        return min if mode == "min" else max
    if "loss" in name:
        return min
    return max if "acc" in name else None


def _end(attempt: ReportedAttempt) -> float | None:
    """When an attempt ended, or this moment; None: nobody knows."""
    return time.time() if attempt.state == JobState.RUNNING else attempt.ended


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def shown_value(name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if "acc" in name and 0 <= value <= 1 else f"{value:.4g}"


def median(values: list[float]) -> float:
    finite = [v for v in values if v == v]
    return median_high(finite) if finite else math.nan


def _number(value: object) -> float | None:
    if not isinstance(value, int | float):
        return None
    # Neither NaN nor infinity, nor an integer of hundreds of digits.
    return float(value) if abs(value) <= sys.float_info.max else None


class _Unfolded(yaml.SafeLoader):
    """Reads no aliases, which distdl never writes: nine lines of them can stand for a billion
    values."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


def safe_yaml(text: str) -> object:
    """The value of a YAML text that may come from anyone.

    Raises:
        YAMLError: It is no YAML, or has an alias.
    """
    return yaml.load(text, Loader=_Unfolded)


def mapping(value: object) -> dict[str, Any]:
    """A file's mapping; empty for any other type."""
    return value if isinstance(value, dict) else {}


def read_json(path: Path, run: Path) -> dict[str, Any]:
    """A JSON mapping of a run; empty if there is none."""
    return _parsed(_read(path, run), json.loads)


def _parsed(text: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        return mapping(parse(text))
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}


def _read(path: Path, run: Path) -> str:
    """The text of a run's file; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace") if is_of(path, run) else ""
    except OSError:
        return ""


def is_of(path: Path, run: Path) -> bool:
    """Whether a path is a file inside the run's folder. A link that leads out could put a private
    file of the reader into a page, which may be passed on."""
    return path.is_file() and path.resolve().is_relative_to(run.resolve())
