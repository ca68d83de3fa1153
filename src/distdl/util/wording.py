"""Parts of sentences in messages."""

from __future__ import annotations

from collections.abc import Sequence

FEW = 3


def plural(noun: str, count: float) -> str:
    """The noun as it stands behind a number: 1 class, 0 classes, 1.5 cores."""
    if count == 1:
        return noun
    return f"{noun}es" if noun.endswith("s") else f"{noun}s"


def first_few(names: Sequence[object]) -> str:
    """The first three, and whether there are more: a, b, c, ..."""
    shown = ", ".join(map(str, names[:FEW]))
    return f"{shown}, ..." if len(names) > FEW else shown
