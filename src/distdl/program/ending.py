"""How a program ended, as its rank records it: by the exit code, and by its last lines."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Sequence
from typing import Any

from distdl.incident import causes
from distdl.ranks import stopping
from distdl.runs import failures
from distdl.runs.directory import Attempt
from distdl.util.exit_codes import as_shell

# The line behind a traceback of Python: `torch.OutOfMemoryError: CUDA out of memory`.
_RAISED = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?")
_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch's prefix of a rank's traceback
_ASKED = re.compile("KeyboardInterrupt|SystemExit|SIGTERM|Terminated", re.IGNORECASE)
_BEGINS = "Traceback (most recent call last):"
SEARCHED = 40  # of the last lines, for what they name: a full disk, a peer that was lost


def record(attempt: Attempt, rank: int, code: int, tail: Sequence[str], **more: object) -> None:
    """Records the end of a rank's program that failed: the exception, if Python shows one, or the
    signal, or the exit code with the last line."""
    if code < 0:
        failures.record_end(attempt.errors, rank, code, time.time())
        return
    kind, message, trace = exception_of(tail)
    if not kind:
        kind = failures.ENDED
        last = causes.telling(tail[-SEARCHED:]).strip()
        message = f"the program ended with exit code {code} on {socket.gethostname()}"
        message += f": {last[:300]}" if last else ", and printed nothing"
    known: dict[str, Any] = {"program": True, **more}
    if failures.LOST_PEER.search("\n".join(trace.splitlines() or tail[-SEARCHED:])):
        known["lost_peer"] = True
    attempt.record_error(rank, kind, message, trace, as_shell(code), **known)


def is_own(code: int, tail: Sequence[str]) -> bool:
    """Whether a program ended for a reason of its own, although its rank was asked to end in the
    same moment. Slurm and systemd send the signal to the program as well, so an exit code alone
    does not say so: another signal does, and an exception that names none."""
    if code < 0:
        return -code not in stopping.STATE_AFTER
    kind, message, _ = exception_of(tail)
    return bool(kind) and not _ASKED.search(f"{kind}: {message}")


def exception_of(tail: Sequence[str]) -> tuple[str, str, str]:
    """Type, message and traceback of the first uncaught exception in a program's last lines; empty
    if they show none. A launcher in between (torchrun) raises one of its own after it."""
    tail = [_RANK.sub("", line) for line in tail]
    begins = [n for n, line in enumerate(tail) if line.strip().endswith(_BEGINS)]
    for begin in begins:
        indent = len(tail[begin]) - len(tail[begin].lstrip())
        for number in range(begin + 1, len(tail)):
            line = tail[number]
            found = _RAISED.fullmatch(line.strip())
            if found and len(line) - len(line.lstrip()) <= indent:
                following = [each for each in tail[number + 1 : number + 4] if each.strip()]
                chained = any("exception" in each and "above" in each for each in following)
                if chained:
                    break
                trace = "\n".join(tail[begin : number + 1])
                return found[1].rpartition(".")[2], found[2] or "", trace
    return "", "", ""
