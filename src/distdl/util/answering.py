"""Refuses a folder whose store does not answer, instead of waiting in silence with it."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from distdl.util.errors import UserError

ANSWER_S = 5.0


def refuse_silent(path: Path) -> None:
    """Raises a UserError if the store of a file or folder, which need not exist, does not answer
    in ANSWER_S seconds: then whoever touches it is blocked, and cannot be interrupted."""

    def look() -> None:
        with suppress(OSError):  # an answer
            os.stat(path)

    thread = threading.Thread(target=look, name="store", daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    if thread.is_alive():
        raise UserError.at(
            str(path),
            what=f"its store has not answered for {ANSWER_S:.0f} s (a network mount that hangs?)",
            remedy="try again when it answers: ls has to return",
            code="unreachable",
        )
