"""`python -m distdl report RUN`: one HTML page with a run's curves, attempts and config."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from distdl.commands import _report_data as data
from distdl.errors import Problem, UserError
from distdl.tailing import plain
from distdl.tracking.outbox import Outbox
from distdl.tracking.records import find_run

MARK = '<meta name="generator" content="distdl report">'

STYLE = """
:root { color-scheme: light dark; --fg: #1d2733; --bg: #ffffff; --soft: #f3f5f8; --grid: #dfe4ea;
  --dim: #5b6876; }
@media (prefers-color-scheme: dark) { :root { --fg: #dde4ec; --bg: #14191f; --soft: #1d242c;
  --grid: #323c47; --dim: #94a1af; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1360px; padding: 24px; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 4px 0; }
.dim { color: var(--dim); }
.state { font-size: 13px; font-weight: 600; padding: 2px 8px; border: 1px solid; border-radius: 9px;
  vertical-align: 4px; margin-left: 8px; }
.SUCCEEDED { color: #19a979; } .FAILED { color: #d64545; } .RUNNING { color: #2f7ed8; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: 4px 20px 4px 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { font-weight: 600; }
.scroll { overflow-x: auto; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr));
  gap: 16px; }
.charts figure { margin: 0; padding: 12px; background: var(--soft); border-radius: 8px; }
figcaption { font-size: 13px; color: var(--dim); }
figcaption span { display: inline-block; margin-right: 14px; overflow-wrap: anywhere; }
figcaption i { display: inline-block; width: 14px; height: 3px; margin-right: 6px;
  vertical-align: middle; }
svg { width: 100%; height: auto; display: block; }
svg text { font-family: inherit !important; }
pre, code { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; }
pre { background: var(--soft); padding: 12px; border-radius: 8px; overflow-x: auto; }
"""


def main(argv: Sequence[str]) -> int:
    """Write the page.

    Raises:
        UserError: RUN is no run, or the output is a file that no report wrote.
    """
    parser = argparse.ArgumentParser(prog="distdl report", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument("--output", metavar="FILE", help="default: RUN/report.html")
    options = parser.parse_args(argv)
    run = find_run(options.run)
    output = Path(options.output).expanduser() if options.output else run / "report.html"
    if output.is_dir():
        output = output / "report.html"
    if output.exists() and MARK not in output.read_text(errors="replace")[:1000]:
        what = "exists and is not a report: it is left as it is"
        raise UserError(Problem(str(output), what, "choose another name: --output FILE"))
    found = data.load(run)
    page = render(found)
    output.parent.mkdir(parents=True, exist_ok=True)
    # A new file under a name that nobody could have laid a link at.
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=output.parent, prefix=f".{output.name}.", delete=False
    ) as file:
        file.write(page)
    os.chmod(file.name, 0o666 & ~_umask())
    os.replace(file.name, output)
    for damaged in found.damage:
        print(f"warning: {plain(damaged)}", file=sys.stderr)
    print(output)
    return 0


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


@dataclass
class Table:
    """Rows of cells, without the columns in which nothing stands."""

    title: str
    head: Sequence[str]
    rows: list[list[str]]

    @classmethod
    def of(cls, title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        used = [i for i in range(len(rows[0])) if any(row[i] for row in rows)] if rows else []
        kept = [[row[i] for i in used] for row in rows]
        return cls(title, [head[i] for i in used] if head else (), kept)


@dataclass
class Figure:
    """What matplotlib drew, and its legend as (label, colour)."""

    svg: Markup
    legend: list[tuple[str, str]]


@dataclass
class Benchmark:
    table: Table
    figure: Figure


def render(run: data.Run) -> str:
    """The whole page; nothing in it points to the network or to another file.

    What a run's files say may come from anybody: the template escapes every value by itself.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    pages.filters["lines"] = lambda text: Markup("<br>").join(str(text).split("\n"))
    git = data.mapping(run.provenance.get("git"))
    facts = [f"commit {git['commit']}"] if git.get("commit") else []
    if facts and git.get("dirty"):
        facts[-1] += " with local changes"
    facts += [f"Python {run.provenance['python']}"] if run.provenance.get("python") else []
    facts.append(f"written {_clock(time.time())}")
    command = run.provenance.get("command") or ""
    page = pages.get_template("report.html.jinja").render(
        mark=Markup(MARK),
        style=Markup(STYLE),
        run=run,
        facts=" · ".join(facts),
        command=" ".join(map(str, command)) if isinstance(command, list) else command,
        openers=_openers(run.path),
        summary=Table.of("Summary", (), data.summary(run)),
        benchmark=_benchmark(run.path),
        figures=_figures(run),
        attempts=_attempts(run),
    )
    return page.strip() + "\n"


def _openers(run: Path) -> list[str]:
    found = []
    outbox = Outbox(run)
    if outbox.found:
        from distdl.tracking.mlflow import how_to_open

        server = outbox.state.server or outbox.database()
        found += how_to_open(server, outbox)
    if (run / "logs" / "tensorboard").is_dir():
        folder = os.path.relpath(run / "logs" / "tensorboard")
        found.append(f"tensorboard --logdir {shlex.quote(folder)}")
    return found


def _figures(run: data.Run) -> list[Figure]:
    if not run.series:
        return []
    from distdl.commands._report_plots import charts, draw

    start = min(s.times[0] for s in run.series.values())
    figures = []
    for chart in charts(run.series, run.unit):
        svg, legend = draw(chart, start)
        # matplotlib escapes the texts that it writes into an SVG.
        shown = [(label.removeprefix("system/"), colour) for label, colour in legend]
        figures.append(Figure(Markup(svg), shown))
    return figures


def _benchmark(run: Path) -> Benchmark | str:
    """What `task=benchmark` left; empty for a run without one."""
    from distdl.commands import _report_benchmark

    found = data.read_json(run / _report_benchmark.FILE, run)
    if not found:
        return ""
    try:
        table = Table.of("Benchmark", (), _report_benchmark.rows(found))
        svg, legend = _report_benchmark.draw(found)
    except (KeyError, TypeError, ValueError):
        return f"{_report_benchmark.FILE} holds something else than a benchmark's result."
    return Benchmark(table, Figure(Markup(svg), legend))


def _attempts(run: data.Run) -> Table:
    rows = []
    for a in run.attempts:
        took = data.duration(a.ended - a.started) if a.started and a.ended else ""
        changed = "\n".join(f"{k}: {v}" for k, v in a.changed.items())
        # The first line of an error; the whole of it is in the attempt's own folder.
        error = a.error.strip().split("\n")[0][:300]
        times = (_clock(a.started), _clock(a.ended), took)
        rows.append((str(a.number), a.task, a.state, *times, changed, error))
    head = ("", "task", "state", "start", "end", "took", "changed", "error")
    return Table.of("Attempts", head, rows)


def _clock(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
