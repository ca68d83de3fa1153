"""Reads a large JSON object entry by entry, in little memory: `{"images": [{...}, ...], ...}`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, NoReturn

PIECE = 1 << 20  # bytes that are read at once
MOST = 64 << 20  # bytes of one entry
MARK = "\xef\xbb\xbf"  # of UTF-8, which some editors write first
NEAR = 16  # characters of a value that the end of a piece may have cut
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonEntry(NamedTuple):
    """An entry of a list, or the value of another key. Each list begins with a `value` of None and
    a `length` of 0.

    Args:
        key: Of the list or the value, in the object.
        offset, length: Where the entry's text is, in bytes.
        value: The text in Python's types. Texts in it may be wrong unless they are ASCII: `parsed`
            of its bytes is right.
    """

    key: str
    offset: int
    length: int
    value: Any


def entries(file: BinaryIO) -> Iterator[JsonEntry]:
    """Each entry of each list of a JSON object, in the order of the file.

    Raises:
        ValueError: It is not a JSON object, is cut short, or has an entry larger than MOST bytes.
    """
    text = _Text(file)
    text.take("{")
    first = True
    while text.next() != "}":
        if not first:
            text.take(",")
        first = False
        key, _, _ = text.value()
        if not isinstance(key, str):
            text.wrong("a name in quotes is missing")
        text.take(":")
        if text.next() != "[":
            value, offset, length = text.value()
            yield JsonEntry(key, offset, length, value)
            continue
        yield JsonEntry(key, text.offset, 0, None)
        text.take("[")
        begun = False
        while text.next() != "]":
            if begun:
                text.take(",")
            begun = True
            value, offset, length = text.value()
            yield JsonEntry(key, offset, length, value)
        text.take("]")
    text.take("}")
    if text.next():
        text.wrong("more follows behind its end")


def parsed(data: bytes) -> object:
    """The value of an entry's bytes; raises ValueError if they are not JSON."""
    try:
        return _DECODER.decode(data.decode())
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_not_json)


class _Text:
    """A file's text from a place on. Each byte is one character, so that places are bytes: the
    bytes of UTF-8 beyond ASCII occur only inside quotes."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.text = ""
        self.at = 0
        self.before = 0  # bytes of the file before `text`
        self.ended = False
        self._more()
        if self.text.startswith(MARK):
            self.at = len(MARK)

    @property
    def offset(self) -> int:
        return self.before + self.at

    def next(self) -> str:
        """The next character that is no space, which stays the next; "" at the end."""
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self._more()

    def take(self, character: str) -> None:
        found = self.next()
        if found != character:
            self.wrong(f"{found!r} instead of {character!r}" if found else "it is cut short")
        self.at += 1

    def value(self) -> tuple[object, int, int]:
        """The next value, and where its text begins and how many bytes it has."""
        self.next()
        while True:
            held = len(self.text) - self.at
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:  # else a number may go on
                    offset = self.offset
                    length = end - self.at
                    self.at = end
                    return value, offset, length
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos + NEAR > len(self.text)
                if self.ended or not cut:
                    self.wrong("it is cut short" if cut else error.msg, error.pos)
            except RecursionError:
                self.wrong("is nested too deeply")
            except ValueError as error:
                self.wrong(str(error))
            if held > MOST:
                self.wrong(f"an entry has more than {MOST >> 20} MiB")
            self._more(held)

    def wrong(self, what: str, at: int | None = None) -> NoReturn:
        place = self.before + (self.at if at is None else at)
        raise ValueError(f"{what} (at byte {place:,})")

    def _more(self, least: int = 0) -> None:
        """Reads on: `least` bytes or more, so that a long value is not looked at too often."""
        piece = self.file.read(max(PIECE, least))
        self.ended = not piece
        self.before += self.at
        self.text = self.text[self.at :] + piece.decode("latin-1")
        self.at = 0
