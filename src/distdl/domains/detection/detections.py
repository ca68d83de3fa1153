"""What a detector has found in one image, and its masks as runs of pixels (RLE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
import torch

from distdl.domains.detection.categories import Categories

MASK_ABOVE = 0.5  # a pixel belongs to an object above this probability, as in torchvision


class Rle(TypedDict):
    """A mask as COCO has it: `size` is [height, width], `counts` COCO's compressed text."""

    size: list[int]
    counts: str


class CocoResult(TypedDict, total=False):
    """An entry of COCO's result JSON. `bbox` is [x, y, width, height]."""

    image_id: int
    category_id: int
    score: float
    bbox: list[float]
    segmentation: Rle
    keypoints: list[float]


@dataclass(frozen=True)
class Detections:
    """What was found in one image, in the order in which the network gave it.

    boxes: float32 [N, 4], x1, y1, x2, y2 in pixels. labels: int64 [N], from 1. scores: float32
    [N]. masks: N masks of the image's size; None: the network has none. keypoints: float32
    [N, P, 3], likewise. All are on the host.
    """

    boxes: torch.Tensor
    labels: torch.Tensor
    scores: torch.Tensor
    masks: list[Rle] | None = None
    keypoints: torch.Tensor | None = None

    @classmethod
    def of(cls, output: Mapping[str, torch.Tensor]) -> Detections:
        """Of what a detector of torchvision returns for an image: its masks are probabilities,
        float [N, 1, H, W], or bool or uint8 [N, H, W]."""
        masks, points = output.get("masks"), output.get("keypoints")
        return cls(
            output["boxes"].detach().float().cpu(),
            output["labels"].detach().long().cpu(),
            output["scores"].detach().float().cpu(),
            None if masks is None else encoded(masks),
            None if points is None else points.detach().float().cpu(),
        )

    def __len__(self) -> int:
        return len(self.scores)

    def results(self, image_id: int, categories: Categories) -> list[CocoResult]:
        """As entries of COCO's result JSON.

        Width and height are computed in double precision, so that the numbers in the JSON say what
        the network has found.
        """
        corners = self.boxes.double().tolist()
        ids = categories.ids_of(self.labels.tolist())
        scores = self.scores.double().tolist()
        found: list[CocoResult] = []
        for row, (x1, y1, x2, y2) in enumerate(corners):
            result: CocoResult = {
                "image_id": image_id,
                "category_id": ids[row],
                "score": scores[row],
                "bbox": [x1, y1, x2 - x1, y2 - y1],
            }
            if self.masks is not None:
                result["segmentation"] = self.masks[row]
            if self.keypoints is not None:
                result["keypoints"] = self.keypoints[row].double().flatten().tolist()
            found.append(result)
        return found


def encoded(masks: torch.Tensor) -> list[Rle]:
    """Masks [N, 1, H, W] or [N, H, W], probabilities or 0 and 1, as runs."""
    from faster_coco_eval import mask

    masks = masks.detach()
    masks = masks[:, 0] if masks.ndim == 4 else masks
    whole = masks > MASK_ABOVE if masks.is_floating_point() else masks != 0
    if not len(whole):
        return []
    pixels = np.asfortranarray(whole.byte().cpu().permute(1, 2, 0).numpy())
    return [plain(each) for each in mask.encode(pixels)]


def decoded(runs: Sequence[Rle]) -> torch.Tensor:
    """The masks of runs, uint8 [N, H, W]; at least one."""
    from faster_coco_eval import mask

    pixels = mask.decode([dict(each) for each in runs])
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def plain(runs: Mapping[str, object]) -> Rle:
    """An RLE of the library, with text and plain numbers, as JSON has it."""
    counts, size = runs["counts"], runs["size"]
    text = counts.decode("ascii") if isinstance(counts, bytes) else str(counts)
    assert isinstance(size, Sequence)
    return {"size": [int(side) for side in size], "counts": text}
