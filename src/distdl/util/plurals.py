"""The plural of a noun in messages."""

from __future__ import annotations


def plural(noun: str, count: float) -> str:
    """The noun as it stands behind a number: 1 class, 0 classes, 1.5 cores."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"
