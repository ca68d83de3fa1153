"""Text that somebody else may have chosen, for the terminal: values of a config, names of files."""

from __future__ import annotations


def escaped(text: str) -> str:
    """Writes control characters, and others that do not show, as Python does (`\\x1b`): a terminal
    does not act on them then. Line ends and tabs stay."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)
    return "".join(shown)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
