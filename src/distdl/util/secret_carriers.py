"""Texts inside other files: cells of notebooks, base64, property lists, pickles, documents.

They are only read: a pickle's operations are listed, never carried out.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import plistlib
import re
from collections.abc import Iterator

Text = tuple[int, str, bytes, str]  # where it begins, a name, the text, and what it is called

SMALL = 1 << 21  # bytes: more is data
# Text begins with such letters: the first bit of each byte is 0.
_BASE64 = re.compile(
    rb"(?<![A-Za-z0-9+/_-])[A-Za-f][A-Za-z0-9+/_-]{23,}={0,2}"
    rb"(?:\r?\n[ \t]*[A-Za-z0-9+/_-]{16,}={0,2})*"
)
_PRINTABLE = re.compile(rb"[\t\r\n -~]+")
_LINE = re.compile(rb"[\r\n]|[:=] ?|\":|://")  # what a text has that a word has not
_TAG = re.compile(rb"</(?:w:p|w:tr|text:p|row|si|a:p)>")
_OFFICE = re.compile(r"(?:document|sharedStrings|slide\d+|content)\.xml")
_RTF = re.compile(rb"\\par[d]?\b ?|\\line\b ?")


def texts(content: bytes, name: str) -> Iterator[Text]:
    """The texts in a small file; of a text's own kind of quoting, one level."""
    if len(content) > SMALL:
        return
    ending = name.rpartition(".")[2].lower()
    if ending == "ipynb":
        yield from _cells(content)
    if content.startswith(b"bplist"):
        yield from _plist(content)
    if content.startswith(b"\x80") and content.rstrip(b"\n").endswith(b"."):
        yield from _pickle(content)
    if content.startswith(rb"{\rtf"):
        plain = re.sub(rb"\\[a-z]+-?\d* ?|[{}]", b"", _RTF.sub(b"\n", content))
        yield 0, "x.txt", plain, "the text"
    if _OFFICE.fullmatch(name):
        plain = re.sub(rb"<[^<>]+>", b"", _TAG.sub(b"\n", content))
        yield 0, "x.txt", plain, "the text"
    yield from _encoded(content)


def _cells(content: bytes) -> Iterator[Text]:
    """The cells of a notebook, as the programs that they are."""
    try:
        cells = json.loads(content)["cells"]
        sources = [(cell.get("cell_type"), cell.get("source", "")) for cell in cells]
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    for number, (kind, source) in enumerate(sources, 1):
        lines = source if isinstance(source, list) else [source]
        text = "".join(line for line in lines if isinstance(line, str))
        shell = text.lstrip().startswith(("%%bash", "%%sh", "%%writefile", "%env", "!"))
        ending = "py" if kind == "code" and not shell else "sh"
        yield 0, "x.md" if kind == "markdown" else f"x.{ending}", text.encode(), f"cell {number}"


def _plist(content: bytes) -> Iterator[Text]:
    try:
        values = plistlib.loads(content)
    except (plistlib.InvalidFileException, ValueError, OverflowError, IndexError, TypeError):
        return
    yield 0, "x.json", json.dumps(values, default=str, indent=1).encode(), "the property list"


def _pickle(content: bytes) -> Iterator[Text]:
    """Each pair of strings that follow each other, as a key of a dictionary and its value do."""
    strings = [""]
    pairs = []
    try:
        for operation, value, _ in pickletools.genops(content):
            if isinstance(value, str) and "UNICODE" in operation.name:
                strings.append(value)
                pairs.append(json.dumps({strings[-2]: value}))
    except (ValueError, IndexError, UnicodeDecodeError):
        return
    yield 0, "x.json", "\n".join(pairs).encode(), "the pickle"


def _encoded(content: bytes) -> Iterator[Text]:
    """Texts in base64: user data of machines, bodies of mails, values of Kubernetes."""
    for match in _BASE64.finditer(content):
        packed = b"".join(match[0].split()).replace(b"-", b"+").replace(b"_", b"/")
        if not _PRINTABLE.fullmatch(_decoded(packed[:24])):
            continue
        text = _decoded(packed.rstrip(b"=")[: len(packed.rstrip(b"=")) // 4 * 4])
        tail = packed.rstrip(b"=")[len(packed.rstrip(b"=")) // 4 * 4 :]
        text += _decoded(tail + b"=" * (-len(tail) % 4)) if len(tail) > 1 else b""
        if _PRINTABLE.fullmatch(text) and _LINE.search(text):
            yield match.start(), "x.conf", text, "base64"


def _decoded(packed: bytes) -> bytes:
    try:
        return base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError):
        return b""
