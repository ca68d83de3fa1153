"""The records of failed ranks (errors/rank_N.json), and which failure is the cause.

A rank that fails makes the others fail. Each of them records that it lost its peer, and the clock
of another host may give that record the earliest time. So the kind of a failure, and how many
collectives its rank had started, count before its time.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl.ranks import stopping
from distdl.runs.files import read_json, write_json
from distdl.util.atomic_files import write_bytes
from distdl.util.errors import Problem
from distdl.util.exit_codes import EXIT_REFUSED, as_shell
from distdl.util.redact import redact

# Types of failures that a rank could not record itself.
KILLED = "Killed"
ENDED = "Ended"
RESERVED = 1 << 16  # bytes for what is written about the failure of one rank
HANG = "Hang"  # of a rank without progress: the watchdog recorded it
# The messages of gloo, NCCL, torch's store and MPI when a peer process is gone.
LOST_PEER = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|closed by peer|broken pipe"
    r"|socket closed|failed to recv|recvvalue failed|remote process exit|ncclremoteerror"
    r"|ncclcommabort|timed out (waiting|after)|wait timeout|network error",
    re.IGNORECASE,
)


def record(
    folder: Path, rank: int, kind: str, message: str, trace: str = "", code: int = 1, **more: object
) -> bool:
    """Records how a rank failed, without secrets in its free text. Only its first failure is kept:
    errors during its shutdown are not the cause.

    Args:
        folder: The attempt's errors/.
        kind: The exception's type, KILLED or ENDED.
        more: `signal`, `lost_peer`, `waiting` (for other ranks), `enqueued` (the number of
            collectives that it had started), or other values of the common fields.

    Returns:
        Whether this is the rank's first failure.
    """
    path = folder / f"rank_{rank}.json"
    with suppress(OSError):  # the store has failed: nothing can be kept there
        if path.exists():
            return False
    release(folder, rank)
    fields = {
        "time": time.time(),
        "rank": rank,
        "host": socket.gethostname(),
        "type": kind,
        "message": redact(message),
        "exit_code": code,
        "run": str(_run_of(folder)),
    }
    with suppress(OSError):  # the disk is so full that the failure is only in the log
        write_json(path, {**fields, **more, "traceback": redact(trace)})
    return True


def reserve(folder: Path, rank: int) -> None:
    """Keeps space on the disk for what is written about a rank's failure. `folder` is as above."""
    with suppress(OSError):
        write_bytes(reserved(folder, rank), os.urandom(RESERVED), durable=False)


def reserved(folder: Path, rank: int) -> Path:
    """The file that keeps the space for a rank."""
    return folder.parent / f".reserve-{rank}"


def release(folder: Path, rank: int) -> None:
    """Frees the space that was kept for a rank."""
    with suppress(OSError):  # a disk that cannot be written must not hide the failure
        reserved(folder, rank).unlink(missing_ok=True)


def record_end(folder: Path, rank: int, code: int, at: float, host: str = "") -> bool:
    """Records the end of a rank that could not do so itself. It ended on `host` (empty: this one)
    at `at` (seconds since 1970), with the exit code `code`, which is -N if signal N ended it."""
    host = host or socket.gethostname()
    if code >= 0:
        what = f"ended with exit code {code} on {host}, without an error message"
        return record(folder, rank, ENDED, what, code=code, time=at, host=host)
    known = -code in {*signal.Signals}
    name = signal.Signals(-code).name if known else f"signal {-code}"
    what = f"killed by {name} on {host}"
    if -code == signal.SIGKILL:
        what += " (out of memory? see dmesg there)"
    return record(folder, rank, KILLED, what, code=as_shell(code), time=at, host=host, signal=name)


def record_first_end(folder: Path, rank: int, code: int, host: str) -> bool:
    """As `record_end`, for the rank that ended first according to its platform. Records nothing if
    the rank was asked to end."""
    if -code in stopping.STATE_AFTER:
        return False
    at = time.time()
    if -code == signal.SIGKILL:  # the other ranks' records are consequences
        at = min([at, *(error["time"] - 0.001 for error in recorded(folder))])
    return record_end(folder, rank, code, at, host)


def first(folder: Path) -> dict[str, Any] | None:
    """The failure that caused the others, None if no rank has recorded one."""
    return earliest(recorded(folder))


def earliest(errors: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Of several failures the one that caused the others. The clocks of two hosts are compared only
    if nothing else decides."""
    least = min(map(_weight, errors), default=0)
    errors = [error for error in errors if _weight(error) == least]
    fewest = min((e["enqueued"] for e in errors if "enqueued" in e), default=0)
    first = (error for error in errors if error.get("enqueued", fewest) == fewest)
    return min(first, key=lambda error: error["time"], default=None)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """The recorded failures. If the run was copied or moved since, the paths in their messages are
    replaced by the current folder."""
    errors = list(filter(is_complete, map(read_json, folder.glob("rank_*.json"))))
    folder_now = str(_run_of(folder))
    for error in errors:
        if not isinstance(error.get("enqueued"), int):
            error.pop("enqueued", None)
        if isinstance(before := error.get("run"), str) and before not in ("", "/", folder_now):
            name = re.compile(re.escape(before) + r"(?![\w-]|\.\w)")
            error["message"] = name.sub(lambda _: folder_now, error["message"])
    return errors


def _run_of(folder: Path) -> Path:
    """The run to which an attempt's errors/ belongs."""
    return folder.resolve().parents[2]


def is_complete(error: dict[str, Any]) -> bool:
    """Whether it is a complete record: a rank may have died while writing it."""
    kinds = {"rank": int, "time": int | float, "type": str, "message": str}
    return all(isinstance(error.get(key), kind) for key, kind in kinds.items())


def _weight(error: dict[str, Any]) -> int:
    if error.get("lost_peer"):
        return 3
    if error.get("waiting"):
        return 2
    # NCCL's watchdog aborts a process whose peer is gone.
    return 1 if error["type"] == HANG or error.get("signal") == "SIGABRT" else 0


def is_consequence(error: BaseException) -> bool:
    """Whether an error only reports that another rank is gone, or has failed. In a chain of
    exceptions (raised from, or while handling, each other) the earliest one decides."""
    seen: set[int] = set()  # `raise error.__cause__ from None` makes a cycle
    while (before := error.__cause__ or error.__context__) and id(before) not in seen:
        seen.add(id(before))
        error = before
    return getattr(error, "of_peer", False) or bool(LOST_PEER.search(str(error)))


def facts(error: dict[str, Any]) -> dict[str, Any]:
    """The fields of a failure that programs use: which rank, where, by which signal."""
    return {key: error[key] for key in ("rank", "host", "signal", "exit_code") if key in error}


def is_refusal(error: dict[str, Any]) -> bool:
    """Whether a rank refused the input. A program may end with the same exit code for a reason of
    its own."""
    refused = error.get("exit_code") == EXIT_REFUSED and not error.get("program")
    return refused and error.get("type") != "SystemExit"


def problems(error: dict[str, Any]) -> list[Problem]:
    """Why a rank has refused its input; empty if it failed otherwise, or if no rank wrote this."""
    listed = error.get("problems")
    if not is_refusal(error) or not isinstance(listed, list):
        return []
    return [
        Problem(each["path"], what=each["message"], remedy=each["remedy"], code=each["code"])
        for each in listed
        if isinstance(each, dict)
        and all(isinstance(each.get(key), str) for key in ("path", "message", "remedy", "code"))
    ]


def describe(error: dict[str, Any]) -> str:
    """A recorded failure in one line, with the exception's type, except for refusals and kills."""
    if is_refusal(error) or error["type"] in (KILLED, ENDED):
        return str(error["message"])
    if error["type"] == "BdbQuit":
        return "ended in the debugger"
    where = f" (at {error['where']})" if error.get("where") else ""
    return f"{error['type']}: {error['message']}{where}"
