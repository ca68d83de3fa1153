"""What people read in a terminal: nothing that it would act on, and no line wider than it is."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TextIO

COMMAND = re.compile(r"(?:python -m distdl|pip install) ")
# A word, with the blanks before it. A blank inside quotes does not end it.
WORD = re.compile(r"""\s*(?:(?<![^\s=])'[^']*'|(?<![^\s=])"[^"]*"|\S)+""")
# Words between which only one blank stands: `val/loss 2.31`, where two stand before the next.
PHRASE = re.compile(r"\s*\S+(?: \S+)*")
GAP = "  "
LABEL = re.compile(r"\s*\S+(?: \S+)*?(?::?\s{2,}|: )")
FURTHER = 4  # blanks before what a command has in its next line


def escaped(text: str) -> str:
    """Writes control characters, and others that do not show, as Python does (`\\x1b`): a terminal
    does not act on them then. Line ends and tabs stay."""
    if text.isprintable():
        return text
    shown = (c if c.isprintable() or c in "\n\t" else _escape(c) for c in text)
    return "".join(shown)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def say(text: str = "", to: TextIO | None = None) -> None:
    """Prints a text for people, at once, fitted to their terminal.

    Args:
        to: sys.stderr, for example; None: sys.stdout.
    """
    stream = to or sys.stdout
    print(fitted(text, terminal_width(stream)), file=stream, flush=True)


def terminal_width(stream: TextIO | None = None) -> int | None:
    """The characters of a line of the terminal that a stream (stdout) is; None if it is a file or a
    pipe."""
    stream = stream or sys.stdout
    if not stream.isatty():
        return None
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    with suppress(OSError):  # a stream of somebody else's, which only says that it is one
        return os.get_terminal_size(stream.fileno()).columns or None
    return None


def cells_of(text: str) -> int:
    """How many places a text takes in a terminal; a Chinese character takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fitted(text: str, width: int | None) -> str:
    """A text whose lines have at most `width` places; None: as it is.

    Lines are broken between words. What follows stands below the text of the line: behind its
    label, if it has one (`note    ...`). A command goes on behind a backslash, so that it can be
    copied. A word that is longer than a line, such as a path, stays whole.
    """
    if width is None:
        return text
    return "\n".join(_fitted(line, width) for line in text.split("\n"))


def _fitted(line: str, width: int) -> str:
    if cells_of(line) <= width:
        return line
    label = LABEL.match(line)
    indent = label.end() if label and label.end() <= width // 2 else 0
    indent = indent or len(line) - len(line.lstrip())
    command = COMMAND.search(line)
    if command is None:
        return _broken(line, indent, width)
    before = line[: command.start()]
    typed = _broken(" " * indent + line[command.start() :], indent + FURTHER, width, " \\")
    if not before.strip():
        return typed
    if len(before) == indent:  # the label alone
        return before + typed[indent:]
    return f"{_broken(before.rstrip(), indent, width)}\n{typed}"


def _broken(line: str, indent: int, width: int, end: str = "") -> str:
    """A line as several, all but the first of which begin with blanks; `end` stands behind all but
    the last."""
    words = [*_words(line, indent, width)]
    if indent + max(cells_of(word.strip()) for word in words) > width:
        indent = len(line) - len(line.lstrip()) + len(GAP)
    lines = []
    current = ""
    for word in words:
        if current.strip() and cells_of(current + word + end) > width:
            lines.append(current)
            current = " " * indent + word.lstrip()
        else:
            current += word
    return f"{end}\n".join([*lines, current])


def _words(line: str, indent: int, width: int) -> Iterator[str]:
    """What a line is broken between, each with the blanks before it."""
    if GAP not in line[indent:].strip():
        yield from WORD.findall(line)
        return
    for phrase in PHRASE.findall(line):
        whole = cells_of(phrase.strip()) <= width - indent
        yield from [phrase] if whole else WORD.findall(phrase)
