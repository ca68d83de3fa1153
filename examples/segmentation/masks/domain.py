"""Segmentation: an image, and for each pixel a class or 255, which does not count.

The six parts of a domain (docs/architecture.md, "A domain of your own"). Part 3, the collate, is
the default: images and masks of one size in a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from distdl.domains.domain import BLACK, Domain, View
from distdl.domains.metric import Metric
from distdl.util.errors import Problem
from masks.drawing import WorstMasks
from masks.metric import MeanIou
from masks.record import MaskRecord
from masks.rows import MaskRows
from masks.views import MaskView


class Segmentation(Domain):
    """In a batch, "image" is [B, 3, S, S] and "mask" int64 [B, S, S]."""

    name = "segmentation"
    main_metric = "val/miou"
    record = MaskRecord()

    def check(self, node: Mapping[str, Any], *, local: bool = True) -> Iterable[Problem]:
        size = node.get("image_size", 128)
        if isinstance(size, int) and size < 32:
            what = f"is {size}: the network halves an image five times"
            yield Problem("image_size", what, "data.image_size=128", code="out-of-range")

    def views(self, node: Mapping[str, Any]) -> tuple[MaskView, MaskView]:
        size = node.get("image_size", 128)
        return MaskView(size, training=True), MaskView(size, training=False)

    def sample(self, view: View, data: bytes, annotation: object, epoch: int) -> dict[str, Any]:
        return view(data, annotation)

    def blank(self, view: View, annotation: object, epoch: int) -> dict[str, Any]:
        return view(BLACK, None)

    def metric(self) -> MeanIou:
        return MeanIou()

    def rows(self, *, named: bool, top_k: int) -> MaskRows:
        return MaskRows(named)

    def drawing(self, metric: Metric[Any, Any]) -> WorstMasks:
        return WorstMasks()
