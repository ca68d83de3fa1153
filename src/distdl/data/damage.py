"""Images that cannot be decoded: said once, by name; counted; or the end of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError

log = logging.getLogger(__name__)

ON_DAMAGED = ("skip", "error")


class Damage:
    """What this rank has met.

    The workers only mark it in a sample; this is the main process's, whose message can end the run
    without a worker's traceback.

    Args:
        on_damaged: "skip": another image takes its place, and the run goes on; "error": it ends.
    """

    def __init__(self, on_damaged: str = "skip") -> None:
        self.on_damaged = on_damaged
        self.in_epoch = 0
        self._known: set[str] = set()

    @staticmethod
    def check(config: Mapping[str, Any]) -> Iterable[Problem]:
        """What is wrong with `data.on_damaged`; paths are relative to the data node."""
        given = config.get("on_damaged", "skip")
        if given not in ON_DAMAGED:
            yield Problem("on_damaged", f"is {given!r}", "skip or error")

    def note(self, damaged: Sequence[str], file: Path | None) -> None:
        """Takes a batch's "damaged": one text per sample, "" where there is nothing to say.

        Args:
            file: Names are added to it, one a line, each once over all attempts of a run.

        Raises:
            UserError: On the first one, with on_damaged "error".
        """
        found = [text for text in damaged if text]
        if found and self.on_damaged == "error":
            what = (
                "copy or prepare its shard again" if ".tar:" in found[0] else "replace or remove it"
            )
            remedy = f"{what}, or leave such images out: data.on_damaged=skip"
            raise UserError(Problem("data.root", f"cannot decode {found[0]}", remedy))
        self.in_epoch += len(found)
        for text in found:
            if text not in self._known:
                self._known.add(text)
                log.warning("left out, since it cannot be decoded: %s", text)
                if file is not None:
                    _add_line(file, text)


def _add_line(file: Path, text: str) -> None:
    line = text.replace("\n", " ") + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+", encoding="utf-8") as lines:
            lines.seek(0)
            if line not in lines:
                lines.write(line)
    except OSError as error:  # a list is no reason to lose a run
        log.warning("%s: %s", file, error)
