"""Sends MLflow what a run has recorded and the server lacks."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from distdl.config import credentials
from distdl.runs.directory import shown
from distdl.runs.records import journals
from distdl.tracking.outbox import Outbox, is_local, redact
from distdl.tracking.refusals import OTHER, described, refusal
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.screen import say

if TYPE_CHECKING:
    from distdl.tracking.delivery import Delivery

SEND_TO = "--send-credentials-to"  # an option of `track sync`
LONG = 5000  # points; from this number on a progress bar is shown
WAITS = (2.0, 4.0)  # seconds before each further try


@dataclass(frozen=True)
class SentMetrics:
    """What a tracking server has of a run."""

    SCHEMA: ClassVar[str] = "track/1"

    server: str
    """Its address, without secrets."""
    sent: int
    """Points that were sent now."""
    left: int
    """Points that were not sent."""
    active: bool = False
    """Whether the run sends its metrics itself, as it is still at work."""


def sync(run: Path, experiment: str | None = None, confirmed: str | None = None) -> Answer:
    """Sends the rest of a run, or the whole run to another experiment. The exit code is 1
    if the server fails. Raises the UserErrors of `server_of`."""
    from distdl.tracking.client import exclusive, prepare_environment
    from distdl.tracking.delivery import Delivery
    from distdl.tracking.mlflow import how_to_open

    outbox = Outbox(run)
    uri = server_of(outbox, confirmed)
    prepare_environment()
    sender = Delivery(outbox, uri, alone=True)
    with contextlib.ExitStack() as locks:
        for node in {0, *journals(outbox.run_dir)}:
            lock = outbox.run_dir / "tracking" / f"mlflow-node{node}.lock"
            if not locks.enter_context(exclusive(lock)):
                say("The run is still active and sends its metrics itself.")
                return Answer(SentMetrics(redact(uri), 0, sender.pending(), active=True))
        outbox.load()  # the run may have ended before the lock was acquired
        if experiment not in (None, outbox.state.experiment):
            outbox.state.experiment = str(experiment)
            outbox.state.run_id = None
            outbox.save()
        say(f"Sending to {redact(uri)} ...")
        try:
            with _bar(sender.pending()) as progress:
                _send(sender, progress)
        except Exception as error:  # of MLflow, its database or its HTTP client
            stays = f"{sender.pending()} points stay in {outbox.run_dir}."
            if refused := refusal(error, uri):
                say(f"MLflow at {redact(uri)} {refused.what}.", to=sys.stderr)
                say(f"{stays} To send them: {refused.remedy}", to=sys.stderr)
                again = f"python -m distdl track sync {shlex.quote(shown(run))}"
                other = " --experiment NAME" if refused.remedy.endswith(OTHER) else ""
                say(f"Then: {again}{other and f', or now: {again}{other}'}", to=sys.stderr)
                return Answer(SentMetrics(redact(uri), sender.delivered, sender.pending()), 1)
            name, later = "server", "the server is back"
            if is_local(uri):
                name, later = "database", "it can be used again"
            say(f"The {name} fails: {described(error, uri)}", to=sys.stderr)
            say(f"{stays} Repeat the command when {later}.", to=sys.stderr)
            return Answer(SentMetrics(redact(uri), sender.delivered, sender.pending()), 1)
    say(f"{sender.delivered} points sent." if sender.delivered else "Nothing was left to send.")
    say("To see it: " + "\n           ".join(how_to_open(uri, outbox)))
    return Answer(SentMetrics(redact(uri), sender.delivered, sender.pending()))


def server_of(outbox: Outbox, confirmed: str | None, typed: str = f"{SEND_TO} ") -> str:
    """The address of the run's MLflow server. `confirmed` is one that the user says may get their
    credentials, by typing `typed` before it.

    Raises:
        UserError: The run was not tracked in MLflow, the server's password is missing, or only the
            run's folder names the server, and it would get credentials.
    """
    if not outbox.exists:
        raise UserError.at(
            str(outbox.run_dir),
            what="was not tracked in MLflow, so there is nothing to send",
            remedy=f"to see its curves, type python -m distdl report {outbox.run_dir}",
            code="incomplete",
        )
    uri = outbox.state.server or outbox.database()
    if "***" in uri:  # a password is never stored
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        raise UserError.at(
            str(outbox.path),
            what=f"the server {outbox.state.server} needs a password, which is never stored",
            remedy="set MLFLOW_TRACKING_URI to the complete address and repeat the command",
            code="missing-key",
        )
    credentials.confirm(str(outbox.path), uri, typed, confirmed)
    return uri


def _send(sender: Delivery, progress: Callable[[int], None]) -> None:
    """Sends everything, in several tries if the server does not answer."""
    for wait in (*WAITS, None):
        try:
            return sender.send_all(progress)
        except Exception as error:  # of MLflow, its database or its HTTP client
            if wait is None or refusal(error, sender.uri):
                raise
        time.sleep(wait)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[int], None]]:
    if total < LONG or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda n: None
        return
    from distdl.util.progress_bar import Bar

    done = 0
    with Bar("points") as bar:

        def advance(count: int) -> None:
            nonlocal done
            done += count
            bar(done, total)

        yield advance
