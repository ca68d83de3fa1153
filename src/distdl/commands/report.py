"""`python -m distdl report RUN`: one HTML page with a run's curves, attempts and config."""

from __future__ import annotations

import argparse
import html
import os
import time
from collections.abc import Sequence
from pathlib import Path

from distdl.commands import _report_data as data
from distdl.errors import Problem, UserError
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
    page = render(data.load(run))
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, output)
    print(output)
    return 0


def render(run: data.Run) -> str:
    """The whole page; nothing in it points to the network or to another file."""
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8">{MARK}',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(run.run_id)}</title><style>{STYLE}</style></head><body>",
        _header(run),
        _table("Summary", (), data.summary(run)),
        _benchmark(run),
        _curves(run),
        _attempts(run),
    ]
    if run.config:
        parts.append(f"<h2>config.yaml</h2><pre>{html.escape(run.config)}</pre>")
    return "\n".join([*parts, "</body></html>", ""])


def _header(run: data.Run) -> str:
    lines = [f'<h1>{_text(run.run_id)} <span class="state {run.state}">{run.state}</span></h1>']
    git = run.provenance.get("git") or {}
    facts = [f"commit {git['commit']}"] if git.get("commit") else []
    if git.get("dirty"):
        facts[-1] += " with local changes"
    facts += [f"Python {run.provenance['python']}"] if run.provenance.get("python") else []
    facts.append(f"written {_clock(time.time())}")
    lines.append(f'<p class="dim">{_text(" · ".join(facts))}</p>')
    command = run.provenance.get("command")
    if command:
        text = command if isinstance(command, str) else " ".join(map(str, command))
        lines.append(f"<p><code>{_text(text)}</code></p>")
    for opener in _openers(run.path):
        lines.append(f'<p class="dim">All curves: <code>{_text(opener)}</code></p>')
    return "\n".join(lines)


def _openers(run: Path) -> list[str]:
    found = []
    outbox = Outbox(run)
    if outbox.found:
        from distdl.tracking.mlflow import how_to_open

        server = outbox.state.server or outbox.database()
        found.append(how_to_open(server, outbox.state.run_id))
    if (run / "logs" / "tensorboard").is_dir():
        found.append(f"tensorboard --logdir {os.path.relpath(run / 'logs' / 'tensorboard')}")
    return found


def _curves(run: data.Run) -> str:
    if not run.series:
        return '<h2>Curves</h2><p class="dim">Nothing has been logged yet.</p>'
    from distdl.commands._report_plots import charts, draw

    start = min(s.times[0] for s in run.series.values())
    figures = []
    for chart in charts(run.series):
        svg, legend = draw(chart, start)
        items = []
        for label, colour in legend:
            name = _text(label.removeprefix("system/"))
            items.append(f'<span><i style="background: {colour}"></i>{name}</span>')
        figures.append(f"<figure>{svg}<figcaption>{' '.join(items)}</figcaption></figure>")
    return '<h2>Curves</h2><div class="charts">' + "\n".join(figures) + "</div>"


def _benchmark(run: data.Run) -> str:
    from distdl.commands import _report_benchmark

    return _report_benchmark.section(run.path, _table)


def _attempts(run: data.Run) -> str:
    rows = []
    for a in run.attempts:
        took = data.duration(a.ended - a.started) if a.started and a.ended else ""
        changed = "\n".join(f"{k}: {v}" for k, v in a.changed.items())
        # The first line of an error; the whole of it is in the attempt's own folder.
        error = a.error.strip().split("\n")[0][:300]
        rows.append(
            (
                str(a.number),
                a.task,
                a.state,
                _clock(a.started),
                _clock(a.ended),
                took,
                changed,
                error,
            )
        )
    head = ("", "task", "state", "start", "end", "took", "changed", "error")
    return _table("Attempts", head, rows)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    used = [i for i in range(len(rows[0])) if any(row[i] for row in rows)]
    cells = ["<tr>" + "".join(f"<td>{_text(row[i])}</td>" for i in used) + "</tr>" for row in rows]
    top = "<tr>" + "".join(f"<th>{_text(head[i])}</th>" for i in used) + "</tr>" if head else ""
    body = "\n".join([top, *cells])
    return f'<h2>{title}</h2><div class="scroll"><table>{body}</table></div>'


def _text(value: str) -> str:
    return html.escape(value).replace("\n", "<br>")


def _clock(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
