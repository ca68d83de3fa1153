"""What people look at of a detector: its best, worst and most crowded images, with what is true and
what it found; precision over recall; and AP by category."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torchvision.ops import box_iou

from distdl.datasets.image_files import load_image
from distdl.datasets.image_headers import DamagedImage
from distdl.distributed import process_group
from distdl.domains.detection.detections import Detections, Rle, decoded, encoded
from distdl.domains.detection.metric import CocoMetric
from distdl.domains.drawing import SIDE, Drawing, DrawnImage, DrawnSection, ImageOf
from distdl.domains.metric import Reduce

SHOWN = 4  # images of a kind
SURE = 0.5  # the score from which a detection is drawn, and counts for an image's F1
MATCHED = 0.5  # the IoU from which it has found an object
MOST_OBJECTS = 40  # drawn in an image
COLOURS = (
    (230, 80, 40),
    (40, 120, 230),
    (60, 180, 90),
    (220, 180, 40),
    (160, 80, 200),
    (40, 190, 200),
    (230, 110, 170),
    (140, 140, 60),
)


class DrawnObject(NamedTuple):
    """An object that is drawn. `score` is None for a true one."""

    box: tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels
    label: int
    score: float | None
    mask: Rle | None


class DrawnScene(NamedTuple):
    """An image of the validation."""

    sample: int
    f1: float  # of its sure detections, 0 to 1
    objects: int  # true ones, without crowds
    height: int  # as the network saw it, in pixels
    width: int
    truth: list[DrawnObject]
    found: list[DrawnObject]


BEST = "Best images"
# By what images are chosen, the first ones first.
CHOSEN: Mapping[str, Callable[[DrawnScene], tuple[float, ...]]] = {
    BEST: lambda scene: (-scene.f1, -scene.objects, scene.sample),
    "Worst images": lambda scene: (scene.f1, -scene.objects, scene.sample),
    "Most crowded images": lambda scene: (-scene.objects, scene.sample),
}


class Scenes(Drawing[Mapping[str, object], Sequence[Detections]]):
    """Each rank keeps the few images of its own that may be shown.

    Args:
        metric: Of the same validation; its numbers by category and its curves are shown.
    """

    def __init__(self, metric: CocoMetric) -> None:
        self.metric = metric
        self.chosen: dict[str, list[DrawnScene]] = {title: [] for title in CHOSEN}

    def start(self, device: torch.device) -> None:
        self.chosen = {title: [] for title in CHOSEN}

    def add(self, batch: Mapping[str, object], outputs: Sequence[Detections]) -> None:
        """`batch` as for `CocoMetric.add`; without "index" nothing can be shown again."""
        index = batch.get("index")
        if not isinstance(index, torch.Tensor):
            return
        images = cast("Sequence[torch.Tensor]", batch["image"])
        targets = cast("Sequence[Mapping[str, torch.Tensor]]", batch["target"])
        weight = batch.get("weight")
        for row, found in enumerate(outputs):
            if isinstance(weight, torch.Tensor) and not weight[row] > 0:
                continue
            scene = scene_of(int(index[row]), images[row], targets[row], found)
            if scene.objects or scene.found:  # an empty image without detections shows nothing
                self._keep([scene])

    def _keep(self, scenes: Sequence[DrawnScene]) -> None:
        for title, order in CHOSEN.items():
            each = {scene.sample: scene for scene in (*self.chosen[title], *scenes)}
            self.chosen[title] = sorted(each.values(), key=order)[:SHOWN]

    def gather(self, reduce: Reduce) -> None:
        mine = {scene.sample: scene for kept in self.chosen.values() for scene in kept}
        for of_rank in process_group.gather([*mine.values()]):
            self._keep(of_rank)

    def sections(self, image_of: ImageOf | None, names: Sequence[object]) -> list[DrawnSection]:
        sections = []
        for title, scenes in self.chosen.items():
            images = [*self._drawn(title, scenes, image_of)] if image_of else []
            if images:
                note = f"Left: the truth. Right: detections with a score of {SURE} and more."
                if title == BEST and not any(scene.f1 for scene in scenes):
                    note += " None of them is right in any image."
                sections.append(DrawnSection(title, note, images=images))
        latest = self.metric.latest
        if latest is not None and latest.curves:
            axes = ("recall", "precision at IoU 0.5")
            curves = {
                label: [(place / 100, value) for place, value in enumerate(values)]
                for label, values in latest.curves.items()
            }
            sections.append(DrawnSection("Precision over recall", axes=axes, curves=curves))
        if latest is not None and latest.categories:
            numbers = [name for name in latest.categories[0] if name not in ("id", "name")]
            head = ["category", "id", *numbers]
            rows = [
                [str(each["name"]), str(each["id"]), *(shown(each[name]) for name in numbers)]
                for each in latest.categories
            ]
            sections.append(DrawnSection("AP by category", head=head, rows=rows))
        return sections

    def _drawn(
        self, title: str, scenes: Sequence[DrawnScene], image_of: ImageOf
    ) -> Iterator[DrawnImage]:
        kind = title.lower().replace(" ", "-")
        for number, scene in enumerate(scenes, 1):
            seen = image_of(scene.sample)
            if seen is None:
                continue
            data, name = seen
            try:
                image = load_image(data, "RGB")
            except DamagedImage:
                continue
            found = len(scene.found)
            caption = (
                f"{name}: {scene.objects} true, {found} found, F1\N{NO-BREAK SPACE}{scene.f1:.2f}"
            )
            drawing = side_by_side(image, scene, self.metric.categories.names)
            yield DrawnImage(f"{kind}-{number}", drawing, caption)


def scene_of(
    sample: int, image: torch.Tensor, target: Mapping[str, torch.Tensor], found: Detections
) -> DrawnScene:
    """What may be drawn of an image [3, H, W]: crowds are neither drawn nor counted."""
    boxes = target["boxes"].detach().float().cpu()
    labels = target["labels"].cpu()
    crowd = target.get("iscrowd")
    alone = torch.ones(len(boxes), dtype=torch.bool) if crowd is None else crowd.cpu() == 0
    boxes, labels = boxes[alone], labels[alone]
    masks = target.get("masks")
    truth_masks = None if masks is None else encoded(masks.cpu()[alone][:MOST_OBJECTS])
    truth = [
        DrawnObject(
            box=tuple(boxes[row].tolist()),
            label=int(labels[row]),
            score=None,
            mask=truth_masks[row] if truth_masks is not None else None,
        )
        for row in range(min(len(boxes), MOST_OBJECTS))
    ]
    sure = [row for row, score in enumerate(found.scores.tolist()) if score >= SURE]
    objects = [
        DrawnObject(
            box=tuple(found.boxes[row].tolist()),
            label=int(found.labels[row]),
            score=float(found.scores[row]),
            mask=found.masks[row] if found.masks is not None else None,
        )
        for row in sure[:MOST_OBJECTS]
    ]
    f1 = f1_of(boxes, labels, found.boxes[sure], found.labels[sure])
    height, width = image.shape[-2:]
    return DrawnScene(sample, f1, len(boxes), height, width, truth, objects)


def f1_of(
    boxes: torch.Tensor, labels: torch.Tensor, found: torch.Tensor, said: torch.Tensor
) -> float:
    """F1 of detections (the surest first): each finds the object of its class that it covers best,
    if no other one has found that. 1 if there is nothing, and nothing was found."""
    if not len(boxes) and not len(found):
        return 1.0
    overlap = box_iou(found, boxes) if len(boxes) and len(found) else torch.zeros(0, 0)
    free = torch.ones(len(boxes), dtype=torch.bool)
    right = 0
    for row in range(len(overlap)):
        fits = torch.where(free & (labels == said[row]), overlap[row], 0.0)
        best = int(fits.argmax())
        if fits[best] >= MATCHED:
            free[best] = False
            right += 1
    return 2 * right / (len(boxes) + len(found))


def shown(value: float | int | str) -> str:
    """A number of COCO's for a table: it has none (-1) where there is no such object."""
    if isinstance(value, float):
        return "-" if value < 0 else f"{value:.3f}"
    return str(value)


def side_by_side(image: Image.Image, scene: DrawnScene, names: Sequence[str]) -> Image.Image:
    """The image twice: with what is true, and with what was found."""
    scale = SIDE / max(scene.height, scene.width)
    size = (max(1, round(scale * scene.width)), max(1, round(scale * scene.height)))
    photo = image.resize(size)
    both = Image.new("RGB", (2 * photo.width + 4, photo.height), "white")
    both.paste(painted(photo, scene.truth, scale, names), (0, 0))
    both.paste(painted(photo, scene.found, scale, names), (photo.width + 4, 0))
    return both


def painted(
    photo: Image.Image, objects: Sequence[DrawnObject], scale: float, names: Sequence[str]
) -> Image.Image:
    """A copy with boxes, masks, and names of categories."""
    drawing = photo.copy()
    for each in objects:
        if each.mask is not None:
            mask = Image.fromarray(255 * decoded([each.mask])[0].numpy()).resize(photo.size)
            half = Image.fromarray((np.asarray(mask) // 2).astype(np.uint8))
            drawing.paste(Image.new("RGB", photo.size, colour_of(each.label)), mask=half)
    pen = ImageDraw.Draw(drawing)
    font = ImageFont.load_default()
    for each in objects:
        left, top, right, bottom = (scale * end for end in each.box)
        colour = colour_of(each.label)
        pen.rectangle((left, top, max(left, right), max(top, bottom)), outline=colour, width=2)
        name = names[each.label - 1] if 0 < each.label <= len(names) else str(each.label)
        text = name[:20] if each.score is None else f"{name[:20]} {each.score:.2f}"
        corner = (left + 4, top + 3)
        x1, y1, x2, y2 = pen.textbbox(corner, text, font)
        pen.rectangle((x1 - 2, y1 - 2, x2 + 2, y2 + 2), fill=colour)
        pen.text(corner, text, "black", font)
    return drawing


def colour_of(label: int) -> tuple[int, int, int]:
    return COLOURS[label % len(COLOURS)]
