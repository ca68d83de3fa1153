"""Sends MLflow what a run has recorded and the server lacks."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from distdl.runs.records import journals
from distdl.tracking.outbox import Outbox, redact
from distdl.util.errors import UserError

LONG = 5000  # points; from this number on a progress bar is shown
WAITS = (2.0, 4.0)  # seconds before each further try


def sync(run: Path) -> int:
    """Sends the rest of a run. Returns 1 if the server fails, else 0. Raises a UserError if the run
    was not tracked in MLflow, or if the server's password is missing."""
    from distdl.tracking.client import exclusive, prepare_environment
    from distdl.tracking.delivery import Delivery
    from distdl.tracking.mlflow import how_to_open

    outbox = Outbox(run)
    uri = server_of(outbox)
    prepare_environment()
    sender = Delivery(outbox, uri, alone=True)
    with contextlib.ExitStack() as locks:
        for node in {0, *journals(outbox.run_dir)}:
            lock = outbox.run_dir / "tracking" / f"mlflow-node{node}.lock"
            if not locks.enter_context(exclusive(lock)):
                print("The run is still active and sends its metrics itself.")
                return 0
        outbox.load()  # the run may have ended before the lock was acquired
        print(f"Sending to {redact(uri)} ...", flush=True)
        try:
            with _bar(sender.pending()) as progress:
                for wait in WAITS:
                    with contextlib.suppress(Exception):
                        sender.send_all(progress)
                        break
                    time.sleep(wait)
                else:
                    sender.send_all(progress)
        except Exception as error:
            text = str(error).replace(uri, redact(uri))[:300]
            print(
                f"The server fails: {text}\n{sender.pending()} points stay in {outbox.run_dir}. "
                "Repeat the command when the server is back.",
                file=sys.stderr,
            )
            return 1
    print(f"{sender.delivered} points sent." if sender.delivered else "Nothing was left to send.")
    print("To see it: " + "\n           ".join(how_to_open(uri, outbox)))
    return 0


def server_of(outbox: Outbox) -> str:
    """The address of the run's MLflow server.

    Raises:
        UserError: The run was not tracked in MLflow, or the server's password is missing.
    """
    if not outbox.exists:
        what = "was not tracked in MLflow, so there is nothing to send"
        remedy = f"to see its curves, type python -m distdl report {outbox.run_dir}"
        raise UserError.at(str(outbox.run_dir), what, remedy)
    uri = outbox.state.server or outbox.database()
    if "***" in uri:  # a password is never stored
        uri = os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        what = f"the server {outbox.state.server} needs a password, which is never stored"
        remedy = "set MLFLOW_TRACKING_URI to the complete address and repeat the command"
        raise UserError.at(str(outbox.path), what, remedy)
    return uri


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
