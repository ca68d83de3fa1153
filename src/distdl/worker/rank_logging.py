"""The log of one rank: a file, and the part that the terminal shows."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import TextIO

from distdl.runs.directory import Attempt
from distdl.util.imports import ignore_warnings_for_authors, log_early
from distdl.util.redact import RedactingFilter
from distdl.util.screen import fitted, terminal_width

QUIET = ("urllib3",)  # logs each retry; its callers report the outcome
HANDLER = "distdl"  # the name of our log handlers
WARNINGS = "py.warnings"  # the logger of Python's warnings, which begin with a file
PACKAGES = re.compile(r"\S*/site-packages/")  # the part of its path that tells nothing
# Loggers whose INFO lines the terminal shows: ours, and the one that prints `debug=profile`.
SHOWN = ("distdl", "lightning.pytorch.profilers")


class ScreenHandler(logging.StreamHandler[TextIO]):
    """Writes to the current stderr, which a live progress bar replaces."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name == WARNINGS:
            text = PACKAGES.sub("", text, count=1)
        return fitted(text, terminal_width(sys.stderr))


def start_logging(attempt: Attempt, rank: int) -> None:
    """Logs this rank to its file, and to the screen: all of rank 0, the errors of other ranks."""
    attempt.logs.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    # If the user's code has called basicConfig, its handler would show each line twice.
    screens = (sys.stderr, sys.stdout)
    for old in [*root.handlers]:
        plain = type(old) is logging.StreamHandler and old.stream in screens
        if old.name == HANDLER or plain:
            root.removeHandler(old)
    file = logging.FileHandler(attempt.logs / f"rank_{rank}.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = ScreenHandler()
    screen.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s" if rank else "%(message)s"))
    screen.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    screen.addFilter(
        lambda record: (
            record.name.startswith(SHOWN)
            or (record.levelno >= logging.WARNING and not record.name.startswith(QUIET))
        )
    )
    for handler in (file, screen):
        handler.name = HANDLER
        handler.addFilter(RedactingFilter())
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("distdl.worker").setLevel(logging.DEBUG)  # shows which variable gave the rank
    logging.captureWarnings(True)
    ignore_warnings_for_authors()
    # Lightning does not know that our loaders resume; distdl.data.loader_notes warns of others.
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
    # Lightning warns if srun is available and unused. Our launcher uses Slurm in another way.
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    if rank:
        warnings.filterwarnings("ignore")
    log_early()


def adopt_lightnings_loggers() -> None:
    """Removes the handlers that Lightning's import installs, so that ours log its lines."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
