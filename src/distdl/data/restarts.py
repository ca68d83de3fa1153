"""JPEGs with restart markers: what a crop does not need is cut away before it is decoded.

A JPEG's entropy code can only be read from its beginning, or from a restart marker on. With one at
the end of each row of blocks (`python -m distdl prepare ... --restart-markers`) the rows above and
below the crop need not be read at all. The rest is a whole JPEG of less height, so any decoder will
do, and its pixels are the same, bit for bit.

Markers and segments: ITU-T T.81, annex B (https://www.w3.org/Graphics/JPEG/itu-t81.pdf).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RESTARTS = [bytes((0xFF, 0xD0 + i)) for i in range(8)]  # they are numbered modulo 8
END_OF_IMAGE = b"\xff\xd9"


class Strip(NamedTuple):
    """Rows of an image.

    Args:
        data: A JPEG that shows them.
        top: Which row of the whole is its first one, in pixels.
    """

    data: bytes
    top: int


class _Layout(NamedTuple):
    height_at: int  # where the frame's height is written
    height: int
    block_row: int  # pixels
    rows: int  # of blocks
    scan_at: int  # where the entropy code begins


def strip(data: bytes, top: int, bottom: int) -> Strip | None:
    """The least part of a JPEG that decodes to its pixel rows from `top` to before `bottom`.

    Returns:
        None where there is nothing to gain: no restart markers at the ends of the rows of blocks
        (also in a file that was cut off), a progressive JPEG, or all rows are needed.
    """
    found = _layout(data)
    if found is None or not data.endswith(END_OF_IMAGE):
        return None
    # A row of blocks more at either side: the decoder smooths colours across their edge.
    first = max(0, top // found.block_row - 1)
    last = min(found.rows, -(-bottom // found.block_row) + 1)
    if last - first == found.rows:
        return None
    code = np.frombuffer(data, np.uint8, offset=found.scan_at)
    marks = np.flatnonzero(code[:-1] == 0xFF)
    # FF00 stands for the byte FF itself.
    marks = marks[(code[marks + 1] & 0xF8) == 0xD0] + found.scan_at
    if len(marks) != found.rows - 1:
        return None
    ends = [*marks.tolist(), len(data) - 2]
    starts = [found.scan_at, *(end + 2 for end in ends)]
    rows = [data[starts[row] : ends[row]] for row in range(first, last)]
    height = min(found.height, last * found.block_row) - first * found.block_row
    at = found.height_at
    parts = [data[:at], height.to_bytes(2, "big"), data[at + 2 : found.scan_at], rows[0]]
    for number, row in enumerate(rows[1:]):
        parts += (RESTARTS[number % 8], row)
    return Strip(b"".join((*parts, END_OF_IMAGE)), first * found.block_row)


def _layout(data: bytes) -> _Layout | None:
    """None: no sequential JPEG of one scan with a restart marker after each row of blocks."""
    at, frame, interval = 2, 0, 0
    while at + 10 < len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker in (0xC0, 0xC1):
            frame = at
        elif marker == 0xDD:
            interval = data[at + 4] << 8 | data[at + 5]
        elif marker == 0xDA:
            components = data[frame + 9]
            if not frame or not interval or data[at + 4] != components:
                return None
            height = data[frame + 5] << 8 | data[frame + 6]
            width = data[frame + 7] << 8 | data[frame + 8]
            factors = [data[frame + 11 + 3 * i] for i in range(components)]
            # A scan of one component has blocks of 8 x 8, whatever its factors say.
            across = 8 * (max(f >> 4 for f in factors) if components > 1 else 1)
            down = 8 * (max(f & 15 for f in factors) if components > 1 else 1)
            if interval != -(-width // across):
                return None
            return _Layout(frame + 5, height, down, -(-height // down), at + 2 + length)
        elif 0xC2 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return None
        at += 2 + length
    return None
