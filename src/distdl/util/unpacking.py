"""What to type to unpack a file, for messages that refuse a compressed one."""

from __future__ import annotations

import shlex
from pathlib import Path

# By its first bytes: the tool, and the ending that it insists on.
TOOLS = {
    b"\x1f\x8b": ("gzip -d", ".gz"),
    b"BZh": ("bzip2 -d", ".bz2"),
    b"\xfd7zXZ": ("xz -d", ".xz"),
    b"\x28\xb5/\xfd": ("zstd -d --rm", ".zst"),
}
_SHORT = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz"}
_ZLIB = (b"\x78\x01", b"\x78\x9c", b"\x78\xda")


def is_compressed(head: bytes) -> bool:
    """Whether a file with these first bytes is compressed by one of the usual tools."""
    return head.startswith(tuple(TOOLS))


def is_zlib(head: bytes) -> bool:
    """Whether it may be a bare zlib stream, as TensorFlow writes it; two bytes are no proof."""
    return head.startswith(_ZLIB)


def first(path: Path) -> str:
    """What to type before a folder can be named, if a path is an archive by its name; else ""."""
    name = path.name.lower()
    if name.endswith(".zip"):
        return f"unzip {shlex.quote(str(path))}, then "
    if ".tar" in path.suffixes or name.endswith((*_SHORT, ".tar")):
        return f"tar xf {shlex.quote(str(path))}, then "
    return ""


def command(path: Path, head: bytes = b"") -> str:
    """The shell command that replaces a compressed file by its content, whatever its name.

    Args:
        head: Its first bytes, if they are known; otherwise they are read.
    """
    if not head:
        with path.open("rb") as file:
            head = file.read(8)
    quoted = shlex.quote(str(path))
    if is_zlib(head):
        program = (
            "import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))"
        )
        new = shlex.quote(f"{path}.new")
        return f"python -c {shlex.quote(program)} < {quoted} > {new} && mv {new} {quoted}"
    named = _SHORT.get(path.suffix.lower(), path.suffix.lower())
    by_name = next((form for form in TOOLS.values() if form[1] == named), ("gzip -d", ".gz"))
    by_content = next((form for start, form in TOOLS.items() if head.startswith(start)), None)
    tool, ending = by_content or by_name
    if named == ending:
        return f"{tool} {quoted}"
    renamed = shlex.quote(f"{path}{ending}")
    return f"mv {quoted} {renamed} && {tool} {renamed}"
