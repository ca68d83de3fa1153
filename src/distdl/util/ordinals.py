"""Ordinal numbers in messages."""

from __future__ import annotations

_ENDINGS = {1: "st", 2: "nd", 3: "rd"}


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th, 22nd."""
    teens = 10 <= number % 100 < 20
    return f"{number}{'th' if teens else _ENDINGS.get(number % 10, 'th')}"
