"""The page of a report: fills the template and writes the file."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from markupsafe import Markup

from distdl.runs.files import write_text
from distdl.runs.records import find_run
from distdl.tools.measure import FILE as BENCHMARK
from distdl.tools.pages import data, plots
from distdl.tools.pages.parts import ReportFigure, ReportTable
from distdl.tools.pages.writing import mark_of, output_of, template
from distdl.tools.report import benchmark, pictures
from distdl.tracking.outbox import Outbox


@dataclass(frozen=True)
class WrittenPage:
    """A report that was written."""

    SCHEMA: ClassVar[str] = "report/1"

    page: str
    """The HTML file."""
    damaged: Sequence[str]
    """The run's files that could not be read, with the reason; the page does without them."""


def write(name: str, to: str | None) -> tuple[Path, list[str]]:
    """Writes the page of the run in the folder `name`, to RUN/report.html, or to the file or folder
    `to`. Returns the page's file, and a text for each damaged file of the run.

    Raises:
        UserError: There is no such run, or the output is a file that no report wrote.
    """
    run = find_run(name)
    output = output_of(to, run, "report")
    contents = data.load(run)
    write_text(output, render(contents))
    return output, contents.damage


def render(run: data.ReportedRun) -> str:
    """The page; nothing in it refers to the network or to another file."""
    start = min((s.times[0] for s in run.series.values()), default=0.0)
    charts = plots.charts(run.series, run.unit)
    command = run.provenance.get("command") or ""
    page = template("report.html.jinja", Path(__file__).parent).render(
        mark=Markup(mark_of("report")),
        run=run,
        git=data.mapping(run.provenance.get("git")),
        now=_clock(time.time()),
        command=" ".join(map(str, command)) if isinstance(command, list) else command,
        openers=_openers(run.path),
        summary=ReportTable("Summary", (), data.summary(run)),
        benchmark=_benchmark(run.path),
        figures=[ReportFigure(*plots.draw(chart, start)) for chart in charts],
        drawn=pictures.drawn(run.path),
        attempts=_attempts(run),
    )
    return page.strip() + "\n"


def _openers(run: Path) -> list[str]:
    """Commands that show all curves."""
    commands = []
    outbox = Outbox(run)
    if outbox.exists:
        from distdl.tracking.mlflow import how_to_open

        commands += how_to_open(outbox.state.server or outbox.database(), outbox)
    folder = run / "logs" / "tensorboard"
    if folder.is_dir():
        commands.append(f"tensorboard --logdir {shlex.quote(os.path.relpath(folder))}")
    return commands


def _benchmark(run: Path) -> dict[str, Any]:
    """Table and figure of `task=benchmark`, or why there are none; empty without a benchmark."""
    result = data.read_json(run / BENCHMARK, run)
    if not result:
        return {}
    try:
        return {
            "table": ReportTable("Benchmark", (), benchmark.rows(result)),
            "figure": ReportFigure(*benchmark.draw(result)),
        }
    except (KeyError, TypeError, ValueError):
        return {"wrong": f"{BENCHMARK} does not hold the result of a benchmark."}


def _attempts(run: data.ReportedRun) -> ReportTable:
    rows = []
    for a in run.attempts:
        took = data.duration(a.ended - a.started) if a.started and a.ended else ""
        changed = "\n".join(f"{k}: {v}" for k, v in a.changed.items())
        error = a.error.strip().split("\n")[0][:300]  # the attempt's folder has the complete error
        start, end = _clock(a.started), _clock(a.ended)
        rows.append((str(a.number), a.task, a.state, start, end, took, changed, error))
    head = ("", "task", "state", "start", "end", "took", "changed", "error")
    return ReportTable("Attempts", head, rows)


def _clock(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
