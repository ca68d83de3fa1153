"""Part 6 of a domain: what people look at after a validation, in the report and in trackers.

A drawing gathers a little during the validation, and becomes sections: images, tables, matrices and
curves. Whoever shows sections knows these four forms, and no domain.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

import torch
from PIL import Image

from distdl.domains.metric import Batch, Outputs

# The encoded image of a sample of the validation set by its index, for a caption its name.
ImageOf = Callable[[int], tuple[bytes, str]]


@dataclass(frozen=True)
class DrawnImage:
    """An image with a caption: a drawn copy, a few hundred pixels wide."""

    image: Image.Image
    caption: str = ""


@dataclass(frozen=True)
class DrawnSection:
    """A part of a report. One of its forms is filled.

    - pictures: in the order in which they are shown.
    - rows: of a table, below `head`.
    - matrix: counts [N, N] of the categories `names`; row: what is true, column: what was said.
    - curves: by label, points (x, y) with the axes named `axes`.
    """

    title: str
    note: str = ""
    pictures: Sequence[DrawnImage] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    names: Sequence[str] = ()
    matrix: Sequence[Sequence[int]] = ()
    axes: tuple[str, str] = ("", "")
    curves: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)


class Drawing(ABC, Generic[Batch, Outputs]):
    """What is drawn of one validation. The module (`distdl.models.evaluated`) calls `start` and
    `add`, as of a `Metric`; the callback `distdl.callbacks.pictures` calls `gather` and `sections`
    at the end of each validation during a training, and of `task=validate` and `task=test`."""

    @abstractmethod
    def start(self, device: torch.device) -> None:
        """Forgets all samples."""

    @abstractmethod
    def add(self, batch: Batch, outputs: Outputs) -> None:
        """Notes what may be drawn of a batch: small, bounded, and without waiting for the device.
        A batch's "index", int64 [B], names its samples; data that have none are not drawn."""

    @abstractmethod
    def gather(self) -> None:
        """Brings what the ranks have noted to rank 0. Collective."""

    @abstractmethod
    def sections(self, image_of: ImageOf | None, classes: Sequence[str]) -> list[DrawnSection]:
        """What to show. Called on rank 0.

        Args:
            image_of: None if the data set cannot show a sample again.
            classes: Names by label; empty if they are unknown.
        """
