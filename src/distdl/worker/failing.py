"""What a rank records of the error that ends it."""

from __future__ import annotations

import bdb
import contextlib
import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distdl.config.own_code import last_user_line
from distdl.health.watchdog import Watchdog
from distdl.incident import incident
from distdl.job import JobState
from distdl.program.running import ProgramFailed
from distdl.runs import failures
from distdl.runs.directory import Attempt
from distdl.util.errors import NotRun, UserError
from distdl.util.exit_codes import EXIT_REFUSED
from distdl.util.redact import redact

log = logging.getLogger("distdl.worker")


@contextlib.contextmanager
def lightnings_refusals() -> Iterator[None]:
    """Raises the `refusal` instead of an error that has one."""
    try:
        yield
    except Exception as error:  # anything that Lightning raises; raised again
        if refused := refusal(error):
            raise refused from error
        raise


def refusal(error: BaseException) -> UserError | None:
    """The UserError for an error that Lightning's code raises on purpose, whose cause the user can
    correct. The traceback is only in the log file."""
    from distdl.validation import misfits

    plain = (ValueError, TypeError, RuntimeError, NotImplementedError, ModuleNotFoundError)
    if isinstance(error, Exception) and (problem := misfits.explained(error)):
        return UserError(problem)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    raised = (frame.line or "").startswith("raise ") and type(error) in plain
    of_lightning = "/lightning/pytorch/" in Path(frame.filename).as_posix()
    if type(error).__name__ == "MisconfigurationException" or (raised and of_lightning):
        return UserError.at("", what=f"Lightning refuses it: {error}", code="failed")
    return None


def record_failure(
    attempt: Attempt, rank: int, error: BaseException, watchdog: Watchdog | None = None
) -> int:
    """Records this rank's first failure and logs it at once, since the process may be killed before
    it ends. Returns the exit code. That of a program is recorded already."""
    if isinstance(error, ProgramFailed):
        return error.code
    code = JobState.FAILED.exit_code
    if isinstance(error, UserError):
        code = error.exit_code
    elif isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code or code  # exit(0) in the middle is a failure
    text = redact("".join(traceback.format_exception(error)))
    more: dict[str, Any] = {}
    if failures.is_consequence(error):
        more["lost_peer"] = True
    where = last_user_line(text)
    if where:
        more["where"] = where
    if watchdog and code != EXIT_REFUSED:
        more |= watchdog.failed(error)
    if isinstance(error, UserError):
        more["problems"] = [
            {key: redact(value) for key, value in problem.record().items()}
            for problem in error.problems
        ]
    message = redact(str(error))
    if not attempt.record_error(rank, type(error).__name__, message, text, code, **more):
        return code
    first = attempt.first_error()
    quit_debugger = isinstance(error, bdb.BdbQuit)
    caused = first and first["rank"] != rank and first.get("exit_code") == EXIT_REFUSED
    says_all = isinstance(error, UserError | NotRun)
    if quit_debugger or caused or says_all:
        log.debug("%s", text)  # the traceback goes only to the file
    if quit_debugger:
        log.error("ended in the debugger")
    elif first and caused and not isinstance(error, UserError):
        log.error("this rank ends because rank %s failed first", first["rank"])
    elif isinstance(error, NotRun):
        log.error("%s", message)
    elif not isinstance(error, UserError):
        log.error("%s%s", text, f"at {where}" if where else "")
    return code


def fail(
    attempt: Attempt, rank: int, error: BaseException, watchdog: Watchdog | None = None
) -> int:
    """Records this rank's failure, on rank 0 also that of the attempt. Returns the exit code."""
    code = record_failure(attempt, rank, error, watchdog)
    if rank == 0:
        facts = {"type": type(error).__name__, "message": redact(str(error)), "exit_code": code}
        with contextlib.suppress(OSError):  # the store has failed, and the error says so
            attempt.fail(failures.describe(facts), code)
            incident.await_monitors(attempt)
            incident.write(attempt)  # again by whoever follows the job, if anybody does
    return code
