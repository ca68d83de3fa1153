"""Views of an image with its objects, for training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as F

from distdl.datasets.image_headers import MOST_PIXELS, DamagedImage
from distdl.domains.detection import masks as coco_masks
from distdl.domains.detection.augment import DetectionAugment
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.record import ImageObjects, has_area, is_crowd
from distdl.images.decoding import decoder as make_decoder
from distdl.images.decoding import whole_decoder

MOST_MASK_BYTES = 4 << 30  # of an image's masks


class DetectionView:
    """Turns bytes and annotations into {"image": uint8 [3, H, W], "target": {...}}.

    A target has "boxes" float32 [N, 4] (x1, y1, x2, y2 in pixels), "labels" int64 [N] (from 1),
    "area" float32 [N], "iscrowd" int64 [N], "image_id" (int), and if they are wanted "masks" uint8
    [N, H, W] and "keypoints" float32 [N, P, 3] (x, y, visibility). N may be 0.

    Args:
        categories: None: no labels are needed, as nothing is known of the objects.
        decoder: As `distdl.images.decoding.decoder` takes it.
        masks, keypoints: Whether targets have them.
        augment: In training, where crowds and boxes without an area are left out; None: an
            evaluation, in which all are kept, and the target also has the "annotations" themselves
            (not of an image in which nobody has looked for objects).
        longest: A larger image is scaled down until its long side has so many pixels, before it is
            augmented. A target then has no "annotations", as these are of the image as it is.
        max_pixels: An image with more is refused, as a damaged one.
    """

    def __init__(
        self,
        categories: Categories | None,
        decoder: str = "auto",
        masks: bool = True,
        keypoints: bool = False,
        augment: DetectionAugment | None = None,
        longest: int | None = None,
        max_pixels: int = MOST_PIXELS,
    ) -> None:
        self.categories = categories
        self.masks = masks
        self.keypoints = keypoints
        self.augment = augment
        self.longest = longest
        self.max_pixels = max_pixels
        self.decode = make_decoder(decoder, max_pixels)
        self.decoded_by = whole_decoder(decoder)

    def __call__(
        self, data: bytes, epoch: int = 0, found: ImageObjects | None = None
    ) -> dict[str, Any]:
        """Raises DamagedImage if the bytes are no image, or its annotations are of no use."""
        image = self.decode(data)
        height, width = image.shape[-2:]
        if found is None:
            return {"image": image, "target": self._target([], -1, height, width)}
        if (width, height) != (found.width, found.height):
            what = f"has {width} x {height} pixels, its annotations are of an image of "
            raise DamagedImage(f"{what}{found.width} x {found.height}")
        objects = found.objects or []
        if self.augment is not None:
            objects = [each for each in objects if not is_crowd(each) and has_area(each)]
        try:
            target = self._target(objects, found.image["id"], height, width)
        except (ValueError, KeyError) as error:
            raise DamagedImage(f"its annotations cannot be used: {error}") from error
        as_it_is = self.longest is None or max(height, width) <= self.longest
        if self.longest is not None and not as_it_is:
            image, target = _smaller(image, target, self.longest)
        if self.augment is None:
            is_known = as_it_is and found.objects is not None
            known = {"annotations": found.objects} if is_known else {}
            return {"image": image, "target": {**_plain(target), **known}}
        identity = target.pop("image_id")
        swapped = swaps(self.categories.points) if self.categories else ()
        image, target = self.augment(image, target, swapped)
        return {"image": image, "target": {**_plain(target), "image_id": identity}}

    def _target(
        self, objects: list[dict[str, Any]], image_id: int, height: int, width: int
    ) -> dict[str, Any]:
        boxes = np.array([each["bbox"] for each in objects], np.float64).reshape(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        of_box = [float(each["bbox"][2] * each["bbox"][3]) for each in objects]
        areas = [each.get("area", area) for each, area in zip(objects, of_box, strict=True)]
        target: dict[str, Any] = {
            "boxes": tv_tensors.BoundingBoxes(
                torch.from_numpy(boxes.astype(np.float32)),
                format="XYXY",
                canvas_size=(height, width),
            ),
            "labels": torch.tensor([self._label(each) for each in objects], dtype=torch.int64),
            "area": torch.tensor(areas, dtype=torch.float32),
            "iscrowd": torch.tensor([int(is_crowd(o)) for o in objects], dtype=torch.int64),
            "image_id": image_id,
        }
        if self.masks:
            target["masks"] = tv_tensors.Mask(torch.from_numpy(_masks(objects, height, width)))
        if self.keypoints:
            target |= _keypoints(objects, self._points, height, width)
        return target

    def _label(self, annotation: dict[str, Any]) -> int:
        identity = annotation["category_id"]
        try:
            return self.categories.labels[identity] if self.categories else 0
        except KeyError:
            what = f"annotation {annotation['id']} is of the category {identity}"
            raise ValueError(f"{what}, which the set does not list") from None

    @property
    def _points(self) -> int:
        return len(self.categories.points) if self.categories else 0


def _smaller(
    image: torch.Tensor, target: dict[str, Any], longest: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Image and target, scaled so that the long side has `longest` pixels."""
    height, width = image.shape[-2:]
    scale = longest / max(height, width)
    size = [max(1, round(height * scale)), max(1, round(width * scale))]
    scaled = F.resize(tv_tensors.Image(image), size, antialias=True).as_subclass(torch.Tensor)
    geometry = [key for key in ("boxes", "masks", "keypoints") if key in target]
    resized: dict[str, Any] = {key: F.resize(target[key], size) for key in geometry}
    area = target["area"] * (size[0] * size[1] / (height * width))
    return scaled, {**target, **resized, "area": area}


def _masks(objects: list[dict[str, Any]], height: int, width: int) -> np.ndarray[Any, Any]:
    """uint8 [N, H, W]."""
    if len(objects) * height * width > MOST_MASK_BYTES:
        raise ValueError(f"the masks of {len(objects)} objects need {MOST_MASK_BYTES >> 30} GiB")
    masks = np.zeros((len(objects), height, width), np.uint8)
    for mask, each in zip(masks, objects, strict=True):
        segmentation = each.get("segmentation")
        if not segmentation:
            raise ValueError(f"annotation {each['id']} has no mask")
        try:
            mask[:] = coco_masks.decode(segmentation, height, width)
        except ValueError as error:
            raise ValueError(f"annotation {each['id']}: {error}") from error
    return masks


def _keypoints(
    objects: list[dict[str, Any]], count: int, height: int, width: int
) -> dict[str, torch.Tensor]:
    """ "keypoints" [N, P, 2] and "seen" [N, P]: 0, not labelled; 1, hidden; 2, visible."""
    points = np.zeros((len(objects), count, 3), np.float32)
    for row, each in zip(points, objects, strict=True):
        found = each.get("keypoints") or [0] * 3 * count
        if len(found) != 3 * count:
            what = f"annotation {each['id']} has {len(found) // 3} keypoints"
            raise ValueError(f"{what}, its category names {count}")
        row[:] = np.array(found, np.float32).reshape(count, 3)
    places = torch.from_numpy(np.ascontiguousarray(points[:, :, :2]))
    return {
        "keypoints": tv_tensors.KeyPoints(places, canvas_size=(height, width)),
        "seen": torch.from_numpy(np.ascontiguousarray(points[:, :, 2])),
    }


def _plain(target: dict[str, Any]) -> dict[str, Any]:
    """Plain tensors. Keypoints are in one, [N, P, 3]; outside the image they are unseen."""
    plain = {
        key: value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value
        for key, value in target.items()
    }
    if "seen" in plain:
        height, width = target["keypoints"].canvas_size
        places = plain.pop("keypoints")
        inside = ((places >= 0) & (places <= torch.tensor([width, height]))).all(-1)
        seen = plain.pop("seen") * inside
        plain["keypoints"] = torch.cat([places, seen[..., None]], -1)
    return plain


def swaps(names: Sequence[str]) -> list[int]:
    """For each keypoint the one in whose place it comes by a flip: left_ear and right_ear."""
    other = {"left": "right", "right": "left"}
    swapped = []
    for number, name in enumerate(names):
        side, _, rest = name.partition("_")
        twin = f"{other[side]}_{rest}" if side in other else name
        swapped.append(names.index(twin) if twin in names else number)
    return swapped
