"""Part 6 of a domain: what people look at after a validation, in the report and in trackers.

A drawing notes a little during the validation, and becomes sections: images, a table, curves.
Whoever shows sections knows these forms, and no domain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch
from PIL import Image, ImageDraw, ImageFont

from distdl.domains.metric import Batch, Outputs, Reduce

# The encoded image of a sample of the validation by its index, and its name; None if it cannot be
# read any more.
ImageOf = Callable[[int], tuple[bytes, str] | None]

SIDE = 256  # of a drawn image, in pixels, at most
CELL = 22  # of a matrix, in pixels
INK = (0x1F, 0x77, 0xB4)  # of a full cell


@dataclass(frozen=True)
class DrawnImage:
    """An image with a caption: a small copy, or a drawing. `name` is that of its file."""

    name: str
    image: Image.Image
    caption: str = ""
    photograph: bool = True  # False: of few colours


@dataclass(frozen=True)
class DrawnSection:
    """A part of a report: images in their order, the rows of a table below `head`, and curves: by
    label, points (x, y) over axes with the names `axes`. Forms may be empty."""

    title: str
    note: str = ""
    images: Sequence[DrawnImage] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    axes: tuple[str, str] = ("", "")
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


class Drawing(ABC, Generic[Batch, Outputs]):
    """What is drawn of one validation or test. The module (`distdl.models.evaluated`) calls `start`
    and `add`, as of a `Metric`; then the callback `distdl.callbacks.pictures` calls `gather`, and
    `sections` on rank 0."""

    @abstractmethod
    def start(self, device: torch.device) -> None:
        """Forgets all samples."""

    @abstractmethod
    def add(self, batch: Batch, outputs: Outputs) -> None:
        """Notes what may be drawn of a batch: small, bounded, and without waiting for the device.
        A batch's "index", int64 [B], names its samples; images of data without it are not drawn."""

    @abstractmethod
    def gather(self, reduce: Reduce) -> None:
        """Brings what the ranks have noted to rank 0, or to all. Collective."""

    @abstractmethod
    def sections(self, image_of: ImageOf | None, names: Sequence[object]) -> list[DrawnSection]:
        """What to show. Called on rank 0.

        Args:
            image_of: None if the data set cannot show a sample again.
            names: As `Domain.names` gives them; empty if there are none.
        """


def small(image: Image.Image) -> Image.Image:
    """A copy of at most `SIDE` pixels a side."""
    copy = image.convert("RGB")
    copy.thumbnail((SIDE, SIDE))
    return copy


def matrix_image(names: Sequence[str], counts: Sequence[Sequence[int]]) -> Image.Image:
    """A matrix of counts with the names of its rows (what is true) and columns (what was said).
    The darker a cell, the larger its share of the row; cells of up to 20 names show the number."""
    font = ImageFont.load_default()
    shown = [name if len(name) <= 24 else f"{name[:23]}..." for name in names]
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    margin = 8 + round(max((measure.textlength(name, font) for name in shown), default=0))
    side = margin + CELL * len(names) + 8
    image = Image.new("RGB", (side, side), "white")
    for number, name in enumerate(shown):
        # Written from left to right; above its column turned by a quarter, to be read upwards.
        head = Image.new("RGB", (margin, CELL), "white")
        ImageDraw.Draw(head).text((4, 5), name, "black", font)
        start = margin + CELL * number
        image.paste(head, (0, start))
        image.paste(head.transpose(Image.Transpose.ROTATE_90), (start, 0))
    pen = ImageDraw.Draw(image)
    for row, cells in enumerate(counts):
        total = sum(cells)
        for column, count in enumerate(cells):
            share = count / total if total else 0.0
            colour = tuple(round(255 - share * (255 - channel)) for channel in INK)
            left = margin + CELL * column
            top = margin + CELL * row
            box = (left, top, left + CELL - 2, top + CELL - 2)
            pen.rectangle(box, fill=(colour[0], colour[1], colour[2]))
            if count and len(names) <= 20:
                ink = "white" if share > 0.5 else "black"
                middle = (left + CELL / 2 - 1, top + CELL / 2 - 1)
                pen.text(middle, str(count), ink, font, anchor="mm")
    return image
