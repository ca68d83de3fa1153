"""The records of failed ranks (errors/rank_N.json), and which of the failures is the cause.

A rank that fails takes the others with it: each records that it lost its peer and, by the clock of
another host, perhaps as the first. So the kind of a failure decides before its time does.
"""

from __future__ import annotations

import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

from distdl.job import EXIT_REFUSED
from distdl.ranks import stopping
from distdl.runs.files import read_json, write_json

KILLED, ENDED = "Killed", "Ended"  # types of what a rank could not record itself
# What gloo, NCCL, torch's store and MPI say when the process at the other end is gone.
LOST_PEER = re.compile(
    r"connection (was likely )?(closed|reset|refused|aborted)|closed by peer|broken pipe"
    r"|socket closed|failed to recv|recvvalue failed|remote process exit|ncclremoteerror"
    r"|ncclcommabort|timed out (waiting|after)|wait timeout|network error",
    re.IGNORECASE,
)


def record(
    folder: Path,
    rank: int,
    kind: str,
    message: str,
    traceback: str = "",
    exit_code: int = 1,
    **more: Any,
) -> bool:
    """Writes down how a rank failed. Its first failure stays: what follows while it takes itself
    down is not the cause.

    Args:
        folder: The attempt's errors/.
        kind: The exception's type, KILLED or ENDED.
        more: Instead of, and besides, what is the same for all: `host`, `time`, `signal`,
            `lost_peer`.

    Returns:
        Whether this is the rank's first one.
    """
    path = folder / f"rank_{rank}.json"
    if path.exists():
        return False
    fields = {
        "time": time.time(),
        "rank": rank,
        "host": socket.gethostname(),
        "type": kind,
        "message": message,
        "exit_code": exit_code,
        "run": str(_run_of(folder)),
    }
    write_json(path, {**fields, **more, "traceback": traceback})
    return True


def record_end(folder: Path, rank: int, code: int, at: float, host: str = "") -> bool:
    """Writes down the end of a rank that was there no longer to do so itself.

    Args:
        code: -N if signal N ended it.
        at: When, in seconds since 1970 and by this host's clock.
        host: Where it ran, empty for this one.
    """
    host = host or socket.gethostname()
    if code >= 0:
        what = f"ended with exit code {code} on {host}, and said nothing"
        return record(folder, rank, ENDED, what, exit_code=code, time=at, host=host)
    name = signal_name(-code)
    what = f"killed by {name} on {host}"
    if -code == signal.SIGKILL:
        what += " (out of memory? dmesg tells there)"
    return record(folder, rank, KILLED, what, exit_code=128 - code, time=at, host=host, signal=name)


def record_first_end(folder: Path, rank: int, code: int, host: str) -> bool:
    """Writes down the end of the rank that ended before all others, as its platform saw it, unless
    it was asked to end.

    Args:
        code, host: See `record_end`.
    """
    if -code in stopping.MEANING:
        return False
    at = time.time()
    if -code == signal.SIGKILL:  # what the others recorded meanwhile is its consequence
        at = min([at, *(error["time"] - 0.001 for error in recorded(folder))])
    return record_end(folder, rank, code, at, host)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def first(folder: Path) -> dict[str, Any] | None:
    """The failure that the others follow from, None if no rank has recorded one."""
    return min(recorded(folder), key=lambda e: (_weight(e), e["time"]), default=None)


def recorded(folder: Path) -> list[dict[str, Any]]:
    """What the ranks have left. Of a run that was copied or moved since, what they advise names
    the folder where it is now."""
    errors = list(filter(is_complete, map(read_json, folder.glob("rank_*.json"))))
    folder_now = str(_run_of(folder))
    for error in errors:
        if isinstance(before := error.get("run"), str) and before not in ("", "/", folder_now):
            name = re.compile(re.escape(before) + r"(?![\w-]|\.\w)")
            error["message"] = name.sub(lambda _: folder_now, error["message"])
    return errors


def _run_of(folder: Path) -> Path:
    """The run of an attempt's errors/."""
    return folder.resolve().parents[2]


def is_complete(error: dict[str, Any]) -> bool:
    """Whether it is a record at all: a rank may have died while it wrote."""
    kinds = {"rank": int, "time": int | float, "type": str, "message": str}
    return all(isinstance(error.get(key), kind) for key, kind in kinds.items())


def _weight(error: dict[str, Any]) -> int:
    if error.get("lost_peer"):
        return 2
    # NCCL's watchdog aborts a process whose peer has gone.
    return 1 if error.get("signal") == "SIGABRT" else 0


def is_consequence(error: BaseException) -> bool:
    """Whether it only says that another rank is gone. What it was raised from, or while it was
    being handled, came first and decides."""
    seen: set[int] = set()  # `raise error.__cause__ from None` closes a ring
    while (before := error.__cause__ or error.__context__) and id(before) not in seen:
        seen.add(id(before))
        error = before
    return bool(LOST_PEER.search(str(error)))


def facts(error: dict[str, Any]) -> dict[str, Any]:
    """Of a failure, what a program asks: which rank, where, by which signal."""
    return {key: error[key] for key in ("rank", "host", "signal", "exit_code") if key in error}


def describe(error: dict[str, Any]) -> str:
    """A recorded failure in a line. A refusal and a kill need no type; other failures name it."""
    refused = error.get("exit_code") == EXIT_REFUSED and error["type"] != "SystemExit"
    plain = refused or error["type"] in (KILLED, ENDED)
    if plain:
        return str(error["message"])
    if error["type"] == "BdbQuit":
        return "ended in the debugger"
    where = f" (at {error['where']})" if error.get("where") else ""
    return f"{error['type']}: {error['message']}{where}"
