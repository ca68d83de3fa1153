"""The pictures of a run's validations, as its domain has drawn them.

A run's files may come from anyone: what is no list of small images, texts and numbers is left out,
and the page says so.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distdl.runs.directory import PICTURES, PICTURES_FILE
from distdl.tools.pages import plots
from distdl.tools.pages.data import is_of, mapping, read_json
from distdl.tools.pages.parts import ReportFigure

MOST_BYTES = 2**20  # of an image
MOST = 100  # images, rows or curves of a section
# How a file begins that is shown as an image, and its type.
KINDS = {b"\xff\xd8\xff": "image/jpeg", b"\x89PNG\r\n\x1a\n": "image/png"}


@dataclass(frozen=True)
class ReportImage:
    """An image as an address that holds it, `data:...`."""

    address: str
    caption: str


@dataclass
class ReportPictures:
    """A section of the page."""

    title: str
    note: str = ""
    images: list[ReportImage] = field(default_factory=list)
    head: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    curves: ReportFigure | None = None


def drawn(run: Path) -> list[ReportPictures]:
    """What the newest validation of the training looked like, then the evaluations."""
    folders = [run / PICTURES, *sorted(run.glob(f"attempts/*/{PICTURES}"))]
    return [part for folder in folders for part in _of_folder(folder, run)]


def _of_folder(folder: Path, run: Path) -> Iterator[ReportPictures]:
    contents = read_json(folder / PICTURES_FILE, run)
    epoch = contents.get("epoch")  # from 0, and people count from 1, as the lines of a training do
    where = f"epoch {epoch + 1}" if isinstance(epoch, int) else ""
    if folder.parent != run:
        where = f"attempt {folder.parent.name}, {contents.get('stage')}"
    for section in map(mapping, _list(contents.get("sections"))):
        part = ReportPictures(f"{section.get('title')} ({where})", str(section.get("note") or ""))
        left_out = 0
        for image in map(mapping, _list(section.get("images"))):
            address = _address(folder / Path(str(image.get("file"))).name, run)
            if address:
                part.images.append(ReportImage(address, str(image.get("caption") or "")))
            else:
                left_out += 1
        if left_out:
            part.note += f" {left_out} images are missing or damaged."
        part.head = [*map(str, _list(section.get("head")))]
        width = len(part.head)
        rows = ([*map(str, _list(row))] for row in _list(section.get("rows")))
        part.rows = [row for row in rows if len(row) == width]
        part.curves = _curves(section)
        yield part


def _address(path: Path, run: Path) -> str:
    """An image with its content as its address; "" if there is none."""
    try:
        if not is_of(path, run) or path.stat().st_size > MOST_BYTES:
            return ""
        data = path.read_bytes()
    except OSError:
        return ""
    kind = next((kind for start, kind in KINDS.items() if data.startswith(start)), "")
    return kind and f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _curves(section: dict[str, Any]) -> ReportFigure | None:
    curves = mapping(section.get("curves"))
    lines = {}
    for label, points in [*curves.items()][:MOST]:
        pairs = map(_list, points if isinstance(points, list) else [])
        lines[str(label)] = [(float(p[0]), float(p[1])) for p in pairs if _is_point(p)]
    if not any(lines.values()):
        return None
    axes = [*map(str, _list(section.get("axes"))), "", ""]
    return ReportFigure(*plots.draw_curves(str(section.get("title")), lines, axes[0], axes[1]))


def _is_point(point: list[Any]) -> bool:
    return len(point) == 2 and all(
        isinstance(each, int | float) and abs(each) < plots.LARGEST for each in point
    )


def _list(value: object) -> list[Any]:
    return value[:MOST] if isinstance(value, list) else []
