"""How far a long piece of work is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0
DRAWN_SECONDS = 0.1


class Bar:
    """Called as a `Progress` of distdl.prepare.source: `bar(done, total)`.

    Args:
        title: What is being done.
        start: What was done before, and says nothing about the speed.
    """

    def __init__(self, title: str, start: int = 0) -> None:
        self.title, self.start = title, start
        self._console = Console(stderr=True)
        self._began = self._told = self._drawn = time.monotonic()
        columns = (
            *(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()),
            *(TextColumn("{task.fields[info]}"), TextColumn("left"), TimeRemainingColumn()),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task(title, total=None, completed=start, info="")

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def __call__(self, done: int, total: int, info: str = "") -> None:
        """Says that `done` of `total` is behind us, and `info` beside it. Cheap: call it often."""
        now = time.monotonic()
        if now - self._drawn >= DRAWN_SECONDS and self._console.is_terminal:
            self._drawn = now
            self._progress.update(self._task, completed=done, total=total, info=info)
        elif now - self._told >= LINE_SECONDS and not self._console.is_terminal:
            self._told = now
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
    """Bytes as people read them: 137.2 GB, 812 MB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            value = count / factor
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return f"{count:.0f} bytes"
