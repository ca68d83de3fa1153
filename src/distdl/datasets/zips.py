"""Members of a zip, read at their place in it: no process unpacks it, or keeps it open."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from distdl.util.errors import UserError

HEADER = 30  # bytes before a member's name
BEGIN = b"PK\x03\x04"
MOST_BYTES = 1 << 29  # of an unpacked image
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


class ZipMember(NamedTuple):
    """Where a file is in a zip: its header's offset, its length there and unpacked, and how it is
    packed, with the checksum of its bytes."""

    offset: int
    packed: int
    bytes: int
    method: int
    crc: int


def members(path: Path, where: str) -> dict[str, ZipMember]:
    """The files in a zip, by name.

    Args:
        where: The path of a Problem.

    Raises:
        UserError: It is damaged or no zip, or holds a name twice.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            infos = [info for info in archive.infolist() if not info.is_dir()]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise UserError.at(
            where,
            what=f"{path} is damaged, or no zip: {error}",
            remedy="download it again",
            code="damaged-file",
        ) from error
    found: dict[str, ZipMember] = {}
    for info in infos:
        if info.filename in found:
            raise UserError.at(
                where, what=f"{path} holds {info.filename!r} twice", remedy="", code="ambiguous"
            )
        method = -1 if info.flag_bits & 1 else info.compress_type
        place = ZipMember(info.header_offset, info.compress_size, info.file_size, method, info.CRC)
        found[info.filename] = place
    return found


def read(read_at: Callable[[int, int], bytes], member: ZipMember) -> bytes:
    """The bytes of a member.

    Args:
        read_at: Gives bytes of the zip: takes an offset and a length.

    Raises:
        ValueError: It is encrypted, packed in an unusual way, too large, or damaged.
    """
    if member.method not in METHODS:
        kind = "is encrypted" if member.method < 0 else f"is packed by method {member.method}"
        raise ValueError(f"{kind} in its zip: unpack the zip, or pack it with `zip -r`")
    if max(member.bytes, member.packed) > MOST_BYTES:
        raise ValueError(f"has {member.bytes:,} bytes in its zip, more than {MOST_BYTES:,}")
    header = read_at(member.offset, HEADER)
    if not header.startswith(BEGIN):
        raise ValueError("its zip is damaged: the file is not where the zip's list says")
    name, extra = struct.unpack("<HH", header[26:HEADER])
    data = read_at(member.offset + HEADER + name + extra, member.packed)
    if member.method == zipfile.ZIP_DEFLATED:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.bytes + 1)
        except zlib.error as error:
            raise ValueError(f"its zip is damaged: {error}") from error
    if len(data) != member.bytes or zlib.crc32(data) != member.crc:
        raise ValueError("its zip is damaged: its bytes do not fit their checksum (CRC-32)")
    return data
