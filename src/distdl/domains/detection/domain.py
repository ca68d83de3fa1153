"""Detection: boxes, masks or keypoints of objects in images of any size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule

from distdl.datasets.image_headers import MOST_PIXELS
from distdl.domains.detection.augment import DetectionAugment
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.drawing import Scenes
from distdl.domains.detection.exports import DetectionExports
from distdl.domains.detection.metric import CocoMetric
from distdl.domains.detection.record import DetectionRecord, ImageObjects
from distdl.domains.detection.rows import DetectionRows
from distdl.domains.detection.views import DetectionView
from distdl.domains.domain import BLACK, Domain, View
from distdl.domains.metric import Metric
from distdl.domains.record import Annotation
from distdl.images.views import check_decoder
from distdl.util.errors import Problem

# The first of what a network finds decides.
MAIN = {"masks": "val/mask_ap", "keypoints": "val/keypoint_ap", "boxes": "val/box_ap"}


class Detection(Domain):
    """Images of any size, each with any number of objects. In a batch "image" is a list of uint8
    [3, H, W], and "target" a list of dicts (`DetectionView`).

    Args:
        categories: Of the data; None: unknown, in a module or before the data are read.
        keypoint_sigmas: As of `CocoMetric`.
        found: What the network finds beside boxes: "masks", "keypoints" or neither. The main metric
            is that of masks, or else of keypoints, or else of boxes.
    """

    name = "detection"
    main_metric = MAIN["boxes"]
    record = DetectionRecord()

    def __init__(
        self,
        categories: Categories | None = None,
        keypoint_sigmas: Sequence[float] | None = None,
        found: Sequence[str] = (),
    ) -> None:
        kinds = {*found, "boxes"}
        self.main_metric = next(metric for kind, metric in MAIN.items() if kind in kinds)
        self.categories = categories
        self.keypoint_sigmas = None if keypoint_sigmas is None else tuple(keypoint_sigmas)

    def check(self, node: Mapping[str, Any], *, local: bool = True) -> Iterable[Problem]:
        """Problems of `decoder` and `augment` of a data node."""
        yield from check_decoder(node.get("decoder", "auto"), local)
        if node.get("decoder") == "nvjpeg":
            yield Problem(
                "decoder",
                what="crops each image to one size on the GPU, and boxes are not cropped with it",
                remedy="data.decoder=auto",
                code="unsupported",
            )
        yield from DetectionAugment.check(node.get("augment"))

    def views(self, node: Mapping[str, Any]) -> tuple[View, View]:
        """By `decoder`, `masks`, `keypoints`, `augment`, `image_size` and `max_pixels`. The data
        module, which reads the data set, gives them its categories."""
        augment = DetectionAugment(node.get("augment"))
        return self._view(node, augment), self._view(node, None)

    def _view(self, node: Mapping[str, Any], augment: DetectionAugment | None) -> DetectionView:
        return DetectionView(
            self.categories,
            decoder=node.get("decoder", "auto"),
            masks=node.get("masks", True),
            keypoints=node.get("keypoints", False),
            augment=augment,
            longest=node.get("image_size"),
            max_pixels=node.get("max_pixels", MOST_PIXELS),
        )

    def sample(self, view: View, data: bytes, annotation: Annotation, epoch: int) -> dict[str, Any]:
        return view(data, epoch, annotation)

    def blank(self, view: View, annotation: Annotation, epoch: int) -> dict[str, Any]:
        """Without objects, and of no known size."""
        seen = view(BLACK, epoch, None)
        if isinstance(annotation, ImageObjects):
            seen["target"]["image_id"] = annotation.image["id"]
        return seen

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch: lists of "image", "target" and "damaged"; "weight" float32 [B], and "index"
        int64 [B] if the samples have it."""
        lists = [key for key in samples[0] if key not in ("weight", "index")]
        batch: dict[str, Any] = {key: [sample[key] for sample in samples] for key in lists}
        batch["weight"] = torch.tensor([float(s.get("weight", 1.0)) for s in samples])
        if "index" in samples[0]:
            batch["index"] = torch.tensor([int(s["index"]) for s in samples])
        return batch

    def metric(self) -> CocoMetric:
        """COCO's numbers; of unknown categories none has been seen yet."""
        return CocoMetric(self.categories or Categories((), ()), self.keypoint_sigmas)

    def drawing(self, metric: Metric[Any, Any]) -> Scenes | None:
        """Of `CocoMetric` alone, whose numbers by category it shows."""
        return Scenes(metric) if isinstance(metric, CocoMetric) else None

    def rows(self, *, named: bool, top_k: int) -> DetectionRows:
        """A row for each detection; all of them, whatever `top_k` is."""
        return DetectionRows(named)

    def known(
        self, annotations: Sequence[Annotation], classes: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """COCO's ids of the images, if the data have them."""
        found = [each for each in annotations if isinstance(each, ImageObjects)]
        if len(found) < len(annotations):
            return {}
        return {"image_id": np.array([int(each.image["id"]) for each in found], np.int64)}

    def exports(
        self,
        module: LightningModule,
        datamodule: LightningDataModule,
        view: View,
        names: Sequence[object],
    ) -> DetectionExports:
        return DetectionExports(module, datamodule, view, names)
