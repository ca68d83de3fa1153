"""The progress of long work: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import Progress, Task
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LINE_SECONDS = 10.0
DRAWN_SECONDS = 0.1
# Columns: the minimum and maximum width of the bar, and the length at which a name is cut.
NARROW, WIDE, NAME = 5, 40, 17


class Line(Progress):
    """One line for the task that was added last, in any width."""

    def __init__(self, console: Console) -> None:
        # If stdout is a file, it is not redirected to the bar's console.
        super().__init__(console=console, transient=True, redirect_stdout=sys.stdout.isatty())

    def get_renderables(self) -> Iterable[Table]:
        return [drawn(task, self.console.width) for task in self.tasks[-1:]]


def drawn(task: Task, width: int) -> Table:
    """A task in one line of `width` columns: title, count and times, then as many parts of its
    `info` as fit; the bar takes the rest. With `percent`, it shows `30 %` instead of `12/40`."""
    count = f"{task.completed:.0f}" + ("" if task.total is None else f"/{task.total:.0f}")
    if task.fields.get("percent"):
        count = "" if task.total is None else f"{task.percentage:.0f} %"
    left = "-:--" if task.time_remaining is None else duration(task.time_remaining)
    times = f"{duration(task.elapsed or 0)}<{left}"
    title = task.description
    most = max(NAME, width // 3)
    fixed = [title if len(title) <= most else f"{title[: most - 1]}…", count, times]
    room = width - len(" ".join(fixed)) - 1
    info = fitting(task.fields.get("info", ()), room - 1)
    bar = min(WIDE, (room - len(info) - 2) // NARROW * NARROW)  # in steps, so that it stays steady
    cells: list[Text | ProgressBar] = [
        Text(text, style, no_wrap=True, overflow="ellipsis")
        for text, style in zip([*fixed, info], ("", "green", "cyan", ""), strict=True)
    ]
    if bar >= NARROW:
        total = task.total or 100
        pulse = task.total is None
        cells.insert(1, ProgressBar(total, task.completed, width=bar, pulse=pulse))
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_row(*cells)
    return table


def fitting(parts: Sequence[str], room: int) -> str:
    """As many parts as fit into `room` columns; long names are cut if not all parts fit."""
    joined = "  ".join(parts)
    if len(joined) <= room:
        return joined
    text = ""
    for part in parts:
        name, _, value = part.rpartition(" ")
        if len(name) > NAME:
            part = f"{name[: NAME // 2]}…{name[-(NAME // 2) :]} {value}"
        longer = f"{text}  {part}" if text else part
        text = longer if len(longer) <= room else text
    return text


class Bar:
    """Called as a `Progress` of distdl.tools.prepare.source: `bar(done, total)`. The speed does not
    count work that was done before (`start`)."""

    def __init__(self, title: str, start: int = 0) -> None:
        self.title = title
        self.start = start
        self._console = Console(stderr=True)
        self._began = self._printed = self._drawn = time.monotonic()
        self._progress = Line(self._console)
        self._task = self._progress.add_task(title, total=None, completed=start, percent=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __call__(self, done: int, total: int, info: str = "") -> None:
        """Shows that `done` of `total` is finished, with `info` beside it. May be called often."""
        now = time.monotonic()
        if now - self._drawn >= DRAWN_SECONDS and self._console.is_terminal:
            self._drawn = now
            self._progress.update(self._task, completed=done, total=total, info=info.split("  "))
        elif now - self._printed >= LINE_SECONDS and not self._console.is_terminal:
            self._printed = now
            speed = (done - self.start) / max(self.seconds, 1e-9)
            left = f"  {duration((total - done) / speed)} left" if speed > 0 else ""
            share = f"{100 * done / max(total, 1):.0f} %"
            print(f"{self.title}: {share}{f'  {info}' if info else ''}{left}", flush=True)

    def __enter__(self) -> Bar:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()


def duration(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(count: float) -> str:
    """Bytes with a unit: 137.2 GB, 812 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            value = count / factor
            return f"{value:.{0 if value >= 100 else 1}f} {unit}"
    return f"{count:.0f} bytes"
