"""Reports each image that cannot be decoded once, and counts them; or ends the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from distdl.util.errors import UserError

log = logging.getLogger(__name__)

OnDamaged = Literal["skip", "error"]


class Damage:
    """Damaged images of this rank.

    Workers only mark damage in a sample. The main process reports it here, so that the error has
    no worker's traceback.

    Args:
        on_damaged: "skip": another image replaces it; "error": the run ends.
    """

    def __init__(self, on_damaged: OnDamaged = "skip") -> None:
        self.on_damaged = on_damaged
        self.in_epoch = 0
        self._known: set[str] = set()

    def note(self, damaged: Sequence[str], file: Path | None) -> None:
        """Reports a batch's "damaged" field.

        Args:
            damaged: One text per sample, "" for an intact one.
            file: Each text is appended to it as a line, once over all attempts of a run.

        Raises:
            UserError: For the first damaged image, with on_damaged="error".
        """
        messages = [text for text in damaged if text]
        if messages and self.on_damaged == "error":
            what = (
                "copy or prepare its shard again"
                if ".tar:" in messages[0]
                else "replace or remove it"
            )
            remedy = f"{what}, or leave such images out: data.on_damaged=skip"
            raise UserError.at("data.root", f"cannot decode {messages[0]}", remedy)
        self.in_epoch += len(messages)
        for text in messages:
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
    except OSError as error:  # a failed write must not end the run
        log.warning("%s: %s", file, error)
