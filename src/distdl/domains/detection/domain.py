"""Detection: boxes, masks or keypoints of objects in images of any size."""

from __future__ import annotations

from collections.abc import Sequence

from distdl.domains.detection.categories import Categories
from distdl.domains.detection.metric import CocoMetric
from distdl.domains.domain import Domain


class Detection(Domain):
    """Images of any size, each with any number of objects.

    Args:
        categories: Of the data; None: unknown, in a module or before the data are read.
        keypoint_sigmas: As of `CocoMetric`.
    """

    name = "detection"
    main_metric = "val/mask_ap"
    mode = "max"

    def __init__(
        self,
        categories: Categories | None = None,
        keypoint_sigmas: Sequence[float] | None = None,
    ) -> None:
        self.categories = categories
        self.keypoint_sigmas = None if keypoint_sigmas is None else tuple(keypoint_sigmas)

    def metric(self) -> CocoMetric:
        """COCO's numbers; of unknown categories none has been seen yet."""
        return CocoMetric(self.categories or Categories((), ()), self.keypoint_sigmas)
