"""What is known of an image: its objects, as in COCO's annotation files, and what is wrong there.

The record `<key>.json` beside the image in a shard has the texts of the source, unchanged:

    {"image": {"id": 391895, "width": 640, ...}, "annotations": [{"id": 151091, "bbox": ...}, ...]}

"annotations" is missing where nobody has looked for objects, as in COCO's test images.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from distdl.datasets.json_entries import parsed
from distdl.domains.detection import masks
from distdl.domains.detection.categories import Categories
from distdl.domains.record import Annotation, SampleRecord
from distdl.util.wording import first_few

HELD = ("segmentation", "keypoints")  # what objects may have besides boxes
SLACK = 1.0  # pixels by which the boxes of COCO itself lie outside, from rounding


@dataclass(frozen=True)
class ImageObjects:
    """An image and its objects, each with the keys of an annotation of COCO.

    Args:
        text: The record.
        image: With "id", "width" and "height".
        objects: Each with "id", "category_id" and "bbox" (x, y, width, height in pixels); None:
            nobody has looked for objects in this image.
    """

    text: bytes
    image: dict[str, Any]
    objects: list[dict[str, Any]] | None

    @property
    def width(self) -> int:
        return int(self.image["width"])

    @property
    def height(self) -> int:
        return int(self.image["height"])


class DetectionRecord(SampleRecord):
    """Records of detection; annotations are `ImageObjects`."""

    domain = "detection"
    ending = ".json"

    def encode(self, annotation: Annotation) -> bytes:
        assert isinstance(annotation, ImageObjects)
        return annotation.text

    def decode(self, content: bytes) -> ImageObjects:
        """Raises ValueError if it is no record, or its numbers are of no use."""
        value = parsed(content)
        if not isinstance(value, dict) or not isinstance(value.get("image"), dict):
            raise ValueError("its record is no JSON object with an image")
        image = value["image"]
        objects = value.get("annotations")
        for key in ("id", "width", "height"):
            if type(image.get(key)) is not int:
                raise ValueError(f"its record has no {key} of the image")
        if objects is not None:
            if not isinstance(objects, list) or not all(isinstance(o, dict) for o in objects):
                raise ValueError("the annotations of its record are no list of objects")
            for each in objects:
                _refuse_unusable(each)
        return ImageObjects(content, image, objects)

    def refuse_other_image(self, annotation: Annotation, width: int, height: int) -> None:
        assert isinstance(annotation, ImageObjects)
        if (width, height) != (annotation.width, annotation.height):
            what = (
                f"has {width} x {height} pixels, and its annotations are of an image of "
                f"{annotation.width} x {annotation.height}"
            )
            if (height, width) == (annotation.width, annotation.height):
                raise ValueError(f"{what}: it is turned by its EXIF data, or by a program")
            raise ValueError(what)

    def label(self, annotation: Annotation) -> int:
        """How many objects a training learns: those with an area that are no crowd."""
        assert isinstance(annotation, ImageObjects)
        return sum(not is_crowd(each) and has_area(each) for each in annotation.objects or ())


def is_crowd(annotation: dict[str, Any]) -> bool:
    """Whether it is a group of objects that nobody has told apart."""
    return bool(annotation.get("iscrowd"))


def has_area(annotation: dict[str, Any]) -> bool:
    _, _, width, height = annotation["bbox"]
    return width > 0 and height > 0


def wrong(found: ImageObjects, categories: Categories) -> Iterator[str]:
    """What no training can make use of: with the annotation's id."""
    seen = set[int]()
    for each in found.objects or ():
        name = f"annotation {each['id']}"
        if each["id"] in seen:
            yield f"{name} is there twice"
        seen.add(each["id"])
        if each["category_id"] not in categories.ids:
            yield f"{name} is of the category {each['category_id']}, which is not listed"
        _, _, width, height = each["bbox"]
        if width < 0 or height < 0:
            yield f"{name} has a box of {width:g} x {height:g} pixels"
        if why := masks.wrong(each.get("segmentation"), found.height, found.width):
            yield f"{name}: {why}"
        if why := _wrong_keypoints(each.get("keypoints")):
            yield f"{name}: {why}"


def odd(found: ImageObjects) -> Iterator[tuple[str, str]]:
    """What is unusual, and is left as it is: its kind, and a sentence with the annotation's id."""
    for each in found.objects or ():
        x, y, width, height = each["bbox"]
        right = x + width
        below = y + height
        kind = ""
        if width == 0 or height == 0:
            kind = "a box without an area"
        elif x >= found.width or y >= found.height or right <= 0 or below <= 0:
            kind = "a box outside the image"
        elif min(x, y) < -SLACK or right > found.width + SLACK or below > found.height + SLACK:
            kind = "a box that is partly outside the image"
        if kind:
            place = f"x {x:g}, y {y:g}, {width:g} x {height:g}"
            yield kind, f"annotation {each['id']} has {kind} ({place})"


@dataclass
class ObjectFindings:
    """What there is to say about the objects of `images` images.

    `wrong` and `first` name the image and the annotation's id; `first` has one of each kind in
    `odd`. `ids` are those of annotations, which should be there once.
    """

    images: int = 0
    objects: int = 0
    crowds: int = 0
    empty: int = 0
    wrong: list[str] = field(default_factory=list)
    odd: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)  # of HELD, what objects have besides boxes
    image_ids: list[int] = field(default_factory=list)
    annotation_ids: list[int] = field(default_factory=list)

    def add(self, other: ObjectFindings) -> None:
        self.images += other.images
        self.objects += other.objects
        self.crowds += other.crowds
        self.empty += other.empty
        self.wrong += other.wrong
        self.odd += other.odd
        self.first = {**other.first, **self.first}
        self.held |= other.held
        self.image_ids += other.image_ids
        self.annotation_ids += other.annotation_ids

    def look(self, name: str, found: ImageObjects, categories: Categories) -> None:
        """Takes note of the objects of the image `name`."""
        self.images += 1
        self.image_ids.append(found.image["id"])
        self.wrong += [f"{name}: {text}" for text in wrong(found, categories)]
        for kind, text in odd(found):
            self.odd[kind] += 1
            self.first.setdefault(kind, f"{name}: {text}")
        objects = found.objects or []
        self.empty += not objects
        self.objects += len(objects)
        self.crowds += sum(map(is_crowd, objects))
        self.held |= {key for key in HELD for each in objects if each.get(key)}
        self.annotation_ids += [each["id"] for each in objects]

    def unusual(self) -> list[str]:
        """A line for each kind of what is unusual, with the first of it."""
        return [f"{n:,} have {kind}: {self.first[kind]}" for kind, n in sorted(self.odd.items())]

    def twice(self) -> list[str]:
        """A line for ids that more than one image or annotation has."""
        lines = []
        for noun, ids in (("image", self.image_ids), ("annotation", self.annotation_ids)):
            several = [identity for identity, times in Counter(ids).items() if times > 1]
            if several:
                lines.append(f"ids of more than one {noun}: {first_few(several)}")
        return lines


def _refuse_unusable(annotation: dict[str, Any]) -> None:
    for key in ("id", "category_id"):
        if type(annotation.get(key)) is not int:
            raise ValueError(f"annotation {annotation.get('id')!r} has no {key}")
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_number, box)):
        what = f"annotation {annotation['id']} has the bbox {str(box)[:60]}"
        raise ValueError(f"{what}, not four numbers (x, y, width, height)")
    area = annotation.get("area", 0)
    if not is_number(area):
        raise ValueError(f"annotation {annotation['id']} has the area {str(area)[:40]!r}")


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return isinstance(value, int | float) and type(value) is not bool and _is_finite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def _wrong_keypoints(points: object) -> str:
    if points is None:
        return ""
    if not isinstance(points, list) or len(points) % 3 or not all(map(is_number, points)):
        return "its keypoints are no numbers in threes (x, y, visibility)"
    return ""
