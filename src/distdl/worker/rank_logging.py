"""The log of one rank: its own file, and the part of it that is shown on the terminal."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TextIO

from distdl.runs.directory import Attempt
from distdl.util.imports import ignore_warnings_for_authors, log_early
from distdl.util.redact import RedactingFilter

QUIET = ("urllib3",)  # it logs each retry; its callers report the outcome
HANDLER = "distdl"  # the name of our log handlers
# Loggers whose INFO lines are shown: ours, and the table of `debug=profile`.
SHOWN = ("distdl", "lightning.pytorch.profilers")


class ScreenHandler(logging.StreamHandler[TextIO]):
    """Writes to the current stderr, which a live progress bar replaces."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def start_logging(attempt: Attempt, rank: int) -> None:
    """Logs every rank to its own file; rank 0, and other ranks' errors, also to the screen."""
    attempt.logs.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    # A basicConfig in the user's code, imported earlier, would show each line twice.
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
    logging.getLogger("distdl.worker").setLevel(logging.DEBUG)  # which variable gave which rank
    logging.captureWarnings(True)
    ignore_warnings_for_authors()
    # Lightning cannot see that our loaders resume; distdl.data.loading names those that do not.
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
    # Lightning knows only its own way to use Slurm.
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    if rank:
        warnings.filterwarnings("ignore")
    log_early()


def adopt_lightnings_loggers() -> None:
    """Replaces the handlers that Lightning's import installs by ours."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True
