"""Decides by its first bytes whether an image file is read: its format, its size, its work.

This is decided here and nowhere else: training, validation, predict, prepare, `data check`, the
server, and the code of an exported folder, which holds a copy of this file. A decoder cannot be
interrupted, so what would keep one busy for long is refused before it starts.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

# PIL's names. It reads more, by less tested code, and one of its readers starts Ghostscript.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
# A file of some kilobytes can hold a billion pixels, which would fill the memory.
MOST_PIXELS = 50_000_000
# Width to height, or the reverse: the short side is resized to 256 pixels or so, the long one too.
MOST_RATIO = 500

# Each scan of a JPEG goes through all pixels again. libjpeg writes 10 scans for a colour image, and
# up to 18 for CMYK; scripts of mozjpeg and jpegrescan stay below 30. libtiff and GDAL refuse more
# than 100 as well (JPEG_MAX_ALLOWED_SCAN_NUMBER), nvImageCodec more than 256.
MOST_SCANS = 100
SCANS_OF_LARGEST = 20  # of an image with as many pixels as are allowed
# Before the first scan: a colour profile has up to 255 segments, a depth map some 200.
MOST_SEGMENTS = 500
MOST_JUNK = 1 << 16  # bytes between the segments, which decoders skip one by one
MOST_TABLES = 10_000  # segments between the scans

# PIL expands each of them, to 1 MiB at most. One is usual.
MOST_PACKED_CHUNKS = 64
MOST_COMMENTS = 100  # of a PPM in text; PIL copies the text for each
MOST_TAGS = 1000  # of a TIFF; usual are 20
MOST_VALUES = 200_000  # of a tag; a palette of 16 bits has 196,608
MOST_PIECES = 1 << 16  # strips or tiles of a TIFF
# PIL decodes some kinds in Python, a hundred times as slowly: these may have fewer pixels.
IN_PYTHON = 50

# Known formats that are not read, by how a file begins, to name them.
OTHERS = (
    (rb"GIF8[79]a", "GIF"),
    (rb".{4}ftypavi[fs]", "AVIF"),
    (rb".{4}ftyp(?:hei|hev|mif1|msf1)", "HEIC"),
    (rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51", "JPEG 2000"),
    (rb"\xff\x0a|\0\0\0\x0cJXL ", "JPEG XL"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "PostScript"),
    (rb"%PDF", "PDF"),
    (rb"\s*<(?:svg|\?xml)", "SVG or XML"),
    (rb"8BPS", "Photoshop file"),
)

MARKER = re.compile(rb"\xff[^\x00\xff]")
NEXT_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # in or behind the data of a scan
_SPACE = rb"\s(?:\s|#[^\r\n]*[\r\n])*"
PPM = re.compile(rb"P([1-6fF])" + _SPACE + rb"(\d{1,9})" + _SPACE + rb"(\d{1,9})(?=\s)")
PPM_MAXIMUM = re.compile(_SPACE + rb"(\d{1,5})\s")


class DamagedImage(ValueError):
    """Bytes that cannot be decoded to a complete image."""


class TooLarge(DamagedImage):
    """More pixels, or more work for a decoder, than is accepted."""

    status_code = 413  # of the answer over HTTP


class Header(NamedTuple):
    """What the first bytes say.

    Args:
        format: One of `FORMATS`.
        height, width: In pixels.
        components: Of a JPEG: 1 for grey, 3 for colour, 4 for CMYK.
        passes: How often a decoder goes through all pixels, about.
    """

    format: str
    height: int
    width: int
    components: int = 0
    passes: int = 1

    @property
    def work(self) -> int:
        """Pixels that a decoder computes, in all passes."""
        return self.height * self.width * self.passes


def examine(data: bytes, most_pixels: int = MOST_PIXELS) -> Header:
    """The header of an image file that is read. The pixels may still turn out to be damaged.

    Raises:
        DamagedImage: It is not of `FORMATS`, or its header is broken.
        TooLarge: It has more than `most_pixels`, or would be too much work.
    """
    try:
        return _READERS[format_of(data)](data, most_pixels)
    except (IndexError, struct.error) as error:
        raise DamagedImage("its header is cut short") from error


def format_of(data: bytes) -> str:
    """Which of `FORMATS` a file has, by its first 16 bytes. Raises DamagedImage if it has none."""
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return "TIFF"
    if data[:2] == b"BM":
        return "BMP"
    if re.match(rb"P[1-6fF]\s", data):
        return "PPM"
    if not data:
        raise DamagedImage("is not an image: it is empty")
    wanted = ", ".join(FORMATS)
    for begin, name in OTHERS:
        if re.match(begin, data, re.DOTALL):
            raise DamagedImage(f"is not an image ({wanted}), but {name}")
    raise DamagedImage(f"is not an image ({wanted})")


def _refuse_large(width: int, height: int, most_pixels: int) -> None:
    if width < 1 or height < 1:
        raise DamagedImage(f"has {width} x {height} pixels")
    if width * height > most_pixels:
        megapixels = width * height / 1e6
        most = most_pixels / 1e6
        raise TooLarge(f"has {megapixels:.4g} megapixels, more than {most:.4g} (max_pixels)")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise TooLarge(f"is {width} x {height} pixels: too long and narrow to resize")


def _refuse_in_python(pixels: int, most_pixels: int, kind: str) -> None:
    most = most_pixels // IN_PYTHON
    if pixels > most:
        what = f"is {kind}, which is decoded slowly: it may have {most / 1e6:.4g} megapixels"
        raise TooLarge(what)


def _jpeg(data: bytes, most_pixels: int) -> Header:
    """The segments up to the first scan, as libjpeg reads them.

    The format is in ITU-T T.81, annex B (https://www.w3.org/Graphics/JPEG/itu-t81.pdf).
    """
    at = 2
    junk = 0
    frame = None
    for _ in range(MOST_SEGMENTS):
        found = MARKER.search(data, at, at + MOST_JUNK)
        if found is None:
            break
        start = at
        at = found.end()
        junk += at - start - 2
        marker = data[at - 1]
        if junk > MOST_JUNK or 0xD8 <= marker <= 0xD9:
            break
        if marker == 1 or 0xD0 <= marker <= 0xD7:  # without a length
            continue
        length = data[at] << 8 | data[at + 1]
        if marker == 0xDA:
            if frame is None:
                break
            kind, height, width, components = frame
            progressive = kind in (0xC2, 0xC6, 0xCA, 0xCE)
            passes = 1
            if progressive or data[at + 2] < components:
                largest = SCANS_OF_LARGEST * most_pixels // (width * height)
                most = min(MOST_SCANS, largest)
                passes = _scans(data, at + length, most)
                if passes > most:
                    what = f"has more than {most} scans, which no usual encoder writes"
                    raise TooLarge(f"{what}, for {width} x {height} pixels")
            return Header("JPEG", height, width, components, passes)
        # Start of frame; C4, C8 and CC in that range mean something else.
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if frame is not None:
                break
            height = data[at + 3] << 8 | data[at + 4]
            width = data[at + 5] << 8 | data[at + 6]
            _refuse_large(width, height, most_pixels)
            frame = marker, height, width, data[at + 7]
        at += length
    raise DamagedImage("its header is cut short or broken")


def _scans(data: bytes, at: int, most: int) -> int:
    """How many scans a JPEG has, whose first one's data begin at `at`; it stops above `most`."""
    count = 1 + data.count(b"\xff\xda", at)
    if count <= most:
        return count
    # Those bytes may also be in a thumbnail, or in what a phone has appended.
    count = 1
    for _ in range(MOST_TABLES):
        found = NEXT_MARKER.search(data, at)
        if found is None or data[found.end() - 1] in (0xD8, 0xD9):
            return count
        at = found.end()
        count += data[at - 1] == 0xDA
        if count > most or len(data) < at + 2:
            return count
        if data[at - 1] != 1:
            at += data[at] << 8 | data[at + 1]
    raise TooLarge(f"has more than {MOST_TABLES:,} segments between its scans")


def _png(data: bytes, most_pixels: int) -> Header:
    """https://www.w3.org/TR/png-3/"""
    if data[12:16] != b"IHDR":
        raise DamagedImage("its header is broken")
    width, height = struct.unpack_from(">II", data, 16)
    _refuse_large(width, height, most_pixels)
    at, packed = 33, 0
    for _ in range(1000 + len(data) // 1024):
        if at + 8 > len(data):
            return Header("PNG", height, width)  # cut short, as the decoder will say
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return Header("PNG", height, width)
        packed += kind in (b"iCCP", b"zTXt", b"iTXt")
        if kind == b"IHDR":
            raise DamagedImage("has two headers")
        if packed > MOST_PACKED_CHUNKS:
            raise TooLarge(f"has more than {MOST_PACKED_CHUNKS} texts and profiles")
        at += 12 + length
    raise TooLarge("has too many chunks for its size")


def _ppm(data: bytes, most_pixels: int) -> Header:
    """https://netpbm.sourceforge.net/doc/ppm.html"""
    found = PPM.match(data, 0, 4096)
    if found is None:
        raise DamagedImage("its header is cut short or broken")
    kind = found[1]
    width = int(found[2])
    height = int(found[3])
    _refuse_large(width, height, most_pixels)
    plain = kind in (b"1", b"2", b"3")
    if plain and data.count(b"#") > MOST_COMMENTS:
        raise TooLarge(f"has more than {MOST_COMMENTS} comments")
    maximum = PPM_MAXIMUM.match(data, found.end(), 4096)
    quick = {b"5": (b"255", b"65535"), b"6": (b"255",)}.get(kind)
    if plain or (quick and (maximum is None or maximum[1] not in quick)):
        _refuse_in_python(width * height, most_pixels, "a PPM in text or with odd values")
        return Header("PPM", height, width, passes=IN_PYTHON)
    return Header("PPM", height, width)


def _bmp(data: bytes, most_pixels: int) -> Header:
    """https://learn.microsoft.com/windows/win32/api/wingdi/ns-wingdi-bitmapinfoheader"""
    (size,) = struct.unpack_from("<I", data, 14)
    if size == 12:
        width, height = struct.unpack_from("<HH", data, 18)
        packing = 0
    else:
        width, height, _, _, packing = struct.unpack_from("<iiHHI", data, 18)
        height = abs(height)  # negative: from top to bottom
    _refuse_large(width, height, most_pixels)
    if packing in (1, 2):
        work = max(width * height, len(data) // 2)
        _refuse_in_python(work, most_pixels, "a BMP with run lengths")
        return Header("BMP", height, width, passes=IN_PYTHON)
    return Header("BMP", height, width)


def _webp(data: bytes, most_pixels: int) -> Header:
    """https://developers.google.com/speed/webp/docs/riff_container"""
    kind = data[12:16]
    if kind == b"VP8X":  # the canvas, in which every frame must fit
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif kind == b"VP8L" and data[20] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, 21)
        width = 1 + (bits & 0x3FFF)
        height = 1 + (bits >> 14 & 0x3FFF)
    elif kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    else:
        raise DamagedImage("its header is cut short or broken")
    _refuse_large(width, height, most_pixels)
    return Header("WEBP", height, width)


# Of a TIFF, by their numbers.
WIDTH, HEIGHT, COMPRESSION, STRIPS, ROWS, STRIP_BYTES = 256, 257, 259, 273, 278, 279
TILE_WIDTH, TILE_HEIGHT, TILES, TILE_BYTES = 322, 323, 324, 325
MOST_PLANES = 6  # of a pixel, each in strips of its own, as PIL reads them
DIRECTORIES = (34665, 34853, 40965)  # EXIF and others, which PIL reads too
JPEG_IN_TIFF = (6, 7)
# struct's codes of the types that are integers; the types that may have any number of values.
INTEGERS = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q", 17: "q", 18: "Q"}
BYTES = (1, 2, 6, 7)


def _tiff(data: bytes, most_pixels: int) -> Header:
    """The first page; https://www.itu.int/itudoc/itu-t/com16/tiff-fx/docs/tiff6.pdf, and BigTIFF:
    https://libtiff.gitlab.io/libtiff/specification/bigtiff.html"""
    tags = _Tags(data)
    width, height = tags.first(WIDTH, 0), tags.first(HEIGHT, 0)
    _refuse_large(width, height, most_pixels)
    for tag in DIRECTORIES:
        if tag in tags.where:
            tags.entries(tags.first(tag, 0))
    across = width
    down = min(tags.first(ROWS, height), height)
    if TILE_WIDTH in tags.where or TILES in tags.where:
        across, down = tags.first(TILE_WIDTH, 0), tags.first(TILE_HEIGHT, 0)
    pieces = tags.count(STRIPS) + tags.count(TILES)
    if across < 1 or down < 1 or not pieces:
        raise DamagedImage("its header is broken")
    fitting = -(-width // across) * -(-height // down)
    if (
        pieces > min(MOST_PIECES, MOST_PLANES * fitting)
        or fitting * across * down > 4 * most_pixels
    ):
        raise TooLarge(f"has {pieces:,} strips or tiles of {across} x {down} pixels")
    if tags.first(COMPRESSION, 1) not in JPEG_IN_TIFF:
        return Header("TIFF", height, width)
    # The mean of the strips: each one's scans are in its own bytes, if they do not overlap.
    if sum(tags.values(STRIP_BYTES) + tags.values(TILE_BYTES)) > len(data):
        raise DamagedImage("its strips or tiles overlap")
    scans = -(-data.count(b"\xff\xda") // pieces)
    most = min(MOST_SCANS, SCANS_OF_LARGEST * most_pixels // (width * height))
    if scans > most:
        raise TooLarge(f"has more than {most} scans in each strip or tile")
    return Header("TIFF", height, width, passes=max(1, scans))


class _Tags:
    """The first directory of a TIFF: `where` each tag's values are, as (type, count, offset)."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.order = "<" if data[:2] == b"II" else ">"
        self.big = data[2:4] in (b"+\0", b"\0+")
        (start,) = self._read("Q", 8) if self.big else self._read("I", 4)
        self.where: dict[int, tuple[int, int, int]] = {}
        at, count, size = self.entries(start)
        for entry in range(at, at + count * size, size):
            tag, kind, values = self._read("HHQ" if self.big else "HHI", entry)
            inline = entry + (12 if self.big else 8)
            if kind not in BYTES and values > MOST_VALUES:
                raise TooLarge(f"has {values:,} values in tag {tag}")
            length = values * struct.calcsize(INTEGERS.get(kind, "Q"))
            if length > (8 if self.big else 4):
                (inline,) = self._read("Q" if self.big else "I", inline)
            self.where.setdefault(tag, (kind, values, inline))

    def entries(self, start: int) -> tuple[int, int, int]:
        """Offset, number and size of a directory's entries."""
        (count,) = self._read("Q" if self.big else "H", start)
        if count > MOST_TAGS:
            raise TooLarge(f"has {count:,} tags")
        return (start + 8, count, 20) if self.big else (start + 2, count, 12)

    def count(self, tag: int) -> int:
        """How many values a tag has."""
        return self.where[tag][1] if tag in self.where else 0

    def first(self, tag: int, default: int) -> int:
        """The first value of a tag of integers."""
        return next(iter(self.values(tag, 1)), default)

    def values(self, tag: int, most: int = MOST_VALUES) -> tuple[int, ...]:
        """The integers of a tag, `most` of them; () if it has none."""
        kind, count, offset = self.where.get(tag, (0, 0, 0))
        if kind not in INTEGERS:
            return ()
        return self._read(f"{min(count, most)}{INTEGERS[kind]}", offset)

    def _read(self, form: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(self.order + form, self.data, offset)


_READERS = {
    "JPEG": _jpeg,
    "PNG": _png,
    "PPM": _ppm,
    "BMP": _bmp,
    "TIFF": _tiff,
    "WEBP": _webp,
}
