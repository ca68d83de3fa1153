"""What a detector answers: the objects in an image. This file goes into every model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from distdl.domains.answers import Answers, Network, Shape
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.detections import MASK_ABOVE, Detections
from distdl.domains.detection.network_parts import classes_of, no_scales_kept
from distdl.util.json_rules import Unsafe, listed, one_of, record, shown, whole

MOST_CATEGORIES = 100_000
LARGEST_SIDE = 8192
EXAMPLE = (64, 64)  # height and width in pixels
# What a network gives for an image, and the shape of each behind the number of detections.
FIELDS = ("boxes", "labels", "scores", "masks", "keypoints")


def _name(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise Unsafe(f"{where}: {shown(value)} is not a name")
    return value


def _sides(value: object, where: str) -> list[int]:
    sides = listed(whole(1, LARGEST_SIDE))(value, where)
    if len(sides) != 2:
        raise Unsafe(f"{where}: {shown(value)} is not a height and a width")
    return sides


@dataclass(frozen=True)
class SeenImage:
    """An image for the network: uint8 [3, H, W]. `height` and `width` are those of the file.

    In a network of a fixed size, the image has been scaled to `scaled` (height and width), and the
    rest is filled up at the right and at the bottom; None: the image is as it was.
    """

    pixels: torch.Tensor
    height: int
    width: int
    scaled: tuple[int, int] | None = None


@dataclass(frozen=True)
class SeenObjects:
    """What was found in an image of `height` x `width` pixels."""

    detections: Detections
    height: int
    width: int


class DetectionAnswers(Answers[SeenImage, SeenObjects]):
    """Of an image its objects as COCO's result JSON has them: `category_id`, `score`, `bbox` (x, y,
    width, height in pixels), and, where the network gives them, `segmentation` (runs of pixels,
    RLE) and `keypoints` (x, y and visibility of each); beside them the name of the category.

    The network is given one image at a time, as in a validation. It takes an image of any size, or,
    with `size` (height and width), images of this one, to which others are scaled and filled up.
    """

    domain = "detection"
    rules = {"categories": listed(record(id=whole(0), name=_name))}
    options = {
        "size": _sides,
        "fill": listed(whole(0, 255)),
        "fields": listed(one_of(*FIELDS)),
        "keypoints": whole(1, 10_000),
    }
    together = False

    def __init__(self, description: Mapping[str, Any]) -> None:
        super().__init__(description)
        if not 1 <= len(description["categories"]) <= MOST_CATEGORIES:
            raise Unsafe(f"{len(description['categories'])} categories")
        self.categories = Categories.of(description["categories"])
        self.size: list[int] | None = description.get("size")
        self.fill: list[int] = description.get("fill", [0, 0, 0])
        # Of a model in a graph's form, in its order.
        self.fields: list[str] = description.get("fields", [])
        self.keypoints: int = description.get("keypoints", 1)
        if len(self.fill) != 3:
            raise Unsafe("fill is not a colour")
        if self.size and [*self.fields[:3]] != [*FIELDS[:3]]:
            raise Unsafe("fields does not begin with boxes, labels and scores")

    def description(self) -> dict[str, Any]:
        pairs = zip(self.categories.ids, self.categories.names, strict=True)
        said: dict[str, Any] = {"categories": [{"id": key, "name": name} for key, name in pairs]}
        if self.size:
            said |= {"size": self.size, "fill": self.fill, "fields": self.fields}
            said |= {"keypoints": self.keypoints} if "keypoints" in self.fields else {}
        return said

    @property
    def names(self) -> list[str]:
        return [*self.categories.names]

    def takes(self) -> Shape | None:
        return None if self.size is None else (3, *self.size)

    def gives(self) -> Sequence[Shape]:
        """The exporter leaves lengths open that `_refuse_other_output` looks at."""
        shapes: dict[str, Shape] = {
            "boxes": (None, 4),
            "labels": (None,),
            "scores": (None,),
            "masks": (None,) * 4,
            "keypoints": (None,) * 3,
        }
        return [shapes[name] for name in self.fields]

    def seen(self, data: bytes) -> SeenImage:
        image = self.decode(data)
        height, width = image.shape[-2:]
        if self.size is None:
            return SeenImage(image, height, width)
        return fitted(image, self.size, self.fill)

    def example(self) -> SeenImage:
        height, width = self.size or EXAMPLE
        return SeenImage(torch.zeros(3, height, width, dtype=torch.uint8), height, width)

    def of_module(self, module: nn.Module) -> Network:
        """By torchvision's convention: a list of images float32 [3, H, W] from 0 to 1."""
        classes = classes_of(module)
        count = len(self.categories)
        if classes is not None and classes != count + 1:
            what = f"the network tells {classes - 1} categories apart"
            raise ValueError(f"{what}, and model.json names {count}")

        def network(image: torch.Tensor) -> Mapping[str, torch.Tensor]:
            with no_scales_kept(module):
                found: Mapping[str, torch.Tensor] = module([as_float(image)])[0]
            return found

        return network

    def found(self, network: Network, images: Sequence[SeenImage]) -> list[SeenObjects]:
        return [self._found(network(image.pixels), image) for image in images]

    def _found(self, output: Mapping[str, torch.Tensor], image: SeenImage) -> SeenObjects:
        if self.size is not None:
            self._refuse_other_output(output)
        if image.scaled is not None:
            output = unfitted(output, image)
        found = Detections.of(output)
        labels = {*found.labels.tolist()}
        if beyond := labels - {*range(1, len(self.categories) + 1)}:
            what = f"the network gives the label {min(beyond)}"
            raise ValueError(f"{what}, and has {len(self.categories)} categories")
        return SeenObjects(found, image.height, image.width)

    def _refuse_other_output(self, output: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError if a network gives other shapes than it should. What else it gives is
        not looked at, such as torchvision's keypoints_scores."""
        assert self.size is not None
        count = len(output["scores"])
        expected: dict[str, tuple[int, ...]] = {
            "boxes": (count, 4),
            "labels": (count,),
            "scores": (count,),
            "masks": (count, 1, *self.size),
            "keypoints": (count, self.keypoints, 3),
        }
        for name in self.fields:
            shape = tuple(output[name].shape) if name in output else None
            if shape != expected[name]:
                raise ValueError(f"the network gives {name} of the shape {shape}")

    def answer(self, found: SeenObjects, top_k: int | None) -> dict[str, Any]:
        """All objects, in the order in which the network gave them; with `top_k`, those of the best
        scores alone."""
        objects = []
        labels = found.detections.labels.tolist()
        for label, result in zip(labels, found.detections.results(0, self.categories), strict=True):
            name = self.categories.names[label - 1]
            objects.append({"category": name, **result})
            del objects[-1]["image_id"]
        if top_k is not None:
            kept = sorted(range(len(objects)), key=lambda place: -objects[place]["score"])[:top_k]
            objects = [objects[place] for place in sorted(kept)]
        return {"width": found.width, "height": found.height, "detections": objects}

    def gist(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """Category and score; boxes and masks differ by more than a thousandth."""
        kept = ("category_id", "category", "score")
        objects = [{key: each[key] for key in kept} for each in answer["detections"]]
        return {"width": answer["width"], "height": answer["height"], "detections": objects}


def as_float(image: torch.Tensor) -> torch.Tensor:
    """An image of uint8 as float32 from 0 to 1."""
    return image if image.is_floating_point() else image.float() / 255


def fitted(image: torch.Tensor, size: Sequence[int], fill: Sequence[int]) -> SeenImage:
    """An image uint8 [3, H, W] scaled so that it just fits into `size` (height, width), bilinear
    with antialias, at the left and the top of a picture of the colour `fill`."""
    height, width = image.shape[-2:]
    scale = min(size[0] / height, size[1] / width)
    scaled = (
        min(size[0], max(1, round(height * scale))),
        min(size[1], max(1, round(width * scale))),
    )
    batch = image[None].contiguous(memory_format=torch.channels_last)
    canvas = torch.tensor(fill, dtype=torch.uint8)[:, None, None].repeat(1, size[0], size[1])
    resized = F.interpolate(batch, scaled, mode="bilinear", antialias=True)[0]
    canvas[:, : scaled[0], : scaled[1]] = resized
    return SeenImage(canvas, height, width, scaled)


def unfitted(output: Mapping[str, torch.Tensor], image: SeenImage) -> dict[str, torch.Tensor]:
    """What was found in a picture of `fitted`, in pixels of the image. Boxes are cut at its
    border."""
    assert image.scaled is not None
    down = image.height / image.scaled[0]
    across = image.width / image.scaled[1]
    found = dict(output)
    factors = torch.tensor([across, down, across, down])
    edges = torch.tensor([image.width, image.height, image.width, image.height])
    found["boxes"] = torch.minimum((output["boxes"] * factors).clamp(min=0), edges)
    if "keypoints" in output:
        found["keypoints"] = output["keypoints"] * torch.tensor([across, down, 1.0])
    if "masks" in output:
        kept = output["masks"][:, :, : image.scaled[0], : image.scaled[1]].float()
        target = (image.height, image.width)
        # One by one: the whole pictures of all of them would take too much memory at once.
        larger = (F.interpolate(mask[None], target, mode="bilinear")[0] for mask in kept)
        each = [mask > MASK_ABOVE for mask in larger]
        empty = torch.zeros(0, 1, *target, dtype=torch.bool)
        found["masks"] = torch.stack(each) if each else empty
    return found
