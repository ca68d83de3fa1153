"""COCO's numbers of an evaluation, exact at any number of ranks.

Each rank keeps the detections and the truth of its images, with masks as runs of pixels. At the end
they come to rank 0, which evaluates them once, as COCO's own program would (faster-coco-eval); the
others wait for the numbers. Images are ordered by their ids, and detections stay in the order in
which the network gave them: among equal scores, COCO's numbers depend on it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import numpy as np
import torch

from distdl.distributed import process_group
from distdl.distributed.pieces import gather_to_first
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.detections import CocoResult, Detections, encoded
from distdl.domains.metric import Metric, Reduce
from distdl.util.errors import Problem, UserError

log = logging.getLogger(__name__)

# What COCO's program compares, the prefix of its numbers here, and the field that it looks at.
KINDS = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}
FIELDS = {"bbox": "bbox", "segm": "segmentation", "keypoints": "keypoints"}
# In the order in which COCO's program prints them. AP is the mean over IoU 0.5 to 0.95, and over
# categories; ar1 has one detection of an image; small is below 32 x 32 pixels, large above 96 x 96.
NUMBERS = (
    "ap",
    "ap50",
    "ap75",
    "ap_small",
    "ap_medium",
    "ap_large",
    "ar1",
    "ar10",
    "ar100",
    "ar_small",
    "ar_medium",
    "ar_large",
)
NUMBERS_OF_KEYPOINTS = (
    "ap",
    "ap50",
    "ap75",
    "ap_medium",
    "ap_large",
    "ar",
    "ar50",
    "ar75",
    "ar_medium",
    "ar_large",
)
COCOS_KEYPOINTS = 17  # a sigma of each comes with COCO's program


class CocoAnnotation(TypedDict, total=False):
    """An annotation as COCO's JSON has it. `bbox` is [x, y, width, height]; `segmentation` a list
    of polygons or runs of pixels."""

    id: int
    image_id: int
    category_id: int
    bbox: list[float]
    area: float
    iscrowd: int
    segmentation: object
    keypoints: list[float]
    num_keypoints: int


class EvaluatedImage(TypedDict):
    """What is kept of an image: its id, height and width, its truth, and what was found."""

    image: dict[str, int]
    kinds: list[str]
    truth: list[CocoAnnotation]
    found: list[CocoResult]


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Args:
        numbers: By name: `box_ap`, `box_ap50`, ..., `mask_ap`, `samples`. -1: COCO has no value,
            as there is no object of that size. The same on all ranks.
        categories: On rank 0, for each category its id, its name and its `box_ap`, `box_ap50`, ...
        curves: On rank 0, for each kind ("box", "mask") the precision at IoU 0.5 for the recalls
            0, 0.01, ..., 1, as the mean over the categories.
    """

    numbers: dict[str, float]
    categories: list[dict[str, int | str | float]] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)


class CocoMetric(Metric[Mapping[str, object], Sequence[Detections]]):
    """COCO's numbers. What `add` takes are batches of distdl's data modules, and for each image its
    `Detections`.

    Args:
        categories: Of the labels.
        sigmas: How exactly each keypoint can be placed (COCO's OKS); None: COCO's 17.
    """

    def __init__(self, categories: Categories, sigmas: Sequence[float] | None = None) -> None:
        self.categories = categories
        self.sigmas = None if sigmas is None else list(sigmas)
        self.latest: Evaluation | None = None  # the last result; on rank 0 with all its parts
        self._records: list[bytes] = []

    def start(self, device: torch.device) -> None:
        self._records = []

    def add(self, batch: Mapping[str, object], outputs: Sequence[Detections]) -> None:
        """Adds the images of a batch that count.

        Args:
            batch: "image" [3, H, W] for each, and "target" (see `truth_of`), of which "image_id"
                is its id, or else its place in the data set, "index" int64 [B]; "weight", if it is
                there.
            outputs: The `Detections` of each image.
        """
        images, targets = batch["image"], batch["target"]
        assert isinstance(images, Sequence)
        assert isinstance(targets, Sequence)
        weights, indices = _tensor(batch, "weight"), _tensor(batch, "index")
        for row, (image, target, found) in enumerate(zip(images, targets, outputs, strict=True)):
            if weights is not None and not weights[row] > 0:
                continue
            identity = target.get("image_id")
            if identity is None:
                assert indices is not None
                identity = indices[row]
            height, width = image.shape[-2:]
            truth = truth_of(target, self.categories)
            self.add_image(int(identity), (height, width), truth, found)

    def add_image(
        self,
        image_id: int,
        size: tuple[int, int],
        truth: Iterable[CocoAnnotation],
        detections: Detections,
    ) -> None:
        """Adds an image of this rank.

        Args:
            size: Height and width in pixels.
            truth: Its annotations, crowds included, as COCO's JSON has them (`truth_of`).
        """
        kinds = ["bbox"]
        kinds += ["segm"] if detections.masks is not None else []
        kinds += ["keypoints"] if detections.keypoints is not None else []
        record: EvaluatedImage = {
            "image": {"id": image_id, "height": size[0], "width": size[1]},
            "kinds": kinds,
            "truth": list(truth),
            "found": detections.results(image_id, self.categories),
        }
        self._records.append(json.dumps(record).encode())

    def result(self, reduce: Reduce) -> dict[str, float]:
        return self.evaluate().numbers

    def evaluate(self) -> Evaluation:
        """Evaluates what all ranks have added, and forgets it. All ranks call this.

        Raises:
            UserError: On all ranks, if the truth lacks what the detections are compared with, or
                two images have one id.
        """
        mine = b"\n".join(self._records)
        self._records = []
        gathered = [*gather_to_first(mine)]
        evaluation = Evaluation({})
        problem = None
        if gathered:  # on rank 0
            try:
                evaluation = self._evaluate(gathered)
            except UserError as error:
                problem = error.problems[0]
        # The others wait here while rank 0 evaluates: a rank that waits for one that works is not
        # taken for one that hangs (distdl.health.watchdog).
        numbers, problem = process_group.broadcast((evaluation.numbers, problem))
        if problem is not None:
            raise UserError(problem)
        self.latest = replace(evaluation, numbers=numbers)
        return self.latest

    def _evaluate(self, gathered: list[bytes]) -> Evaluation:
        images: dict[int, EvaluatedImage] = {}
        while gathered:
            for line in gathered.pop(0).splitlines():
                record: EvaluatedImage = json.loads(line)
                before = images.setdefault(record["image"]["id"], record)
                if before is not record and before["truth"] != record["truth"]:
                    raise UserError(
                        Problem(
                            "data",
                            what=(
                                "two images of the validation data have the id "
                                f"{record['image']['id']}"
                            ),
                            remedy="give each image an id of its own",
                            code="ambiguous",
                        )
                    )
        numbers: dict[str, float] = {"samples": float(len(images))}
        categories: list[dict[str, int | str | float]] = [
            {"id": identity, "name": name}
            for identity, name in zip(self.categories.ids, self.categories.names, strict=True)
        ]
        curves: dict[str, list[float]] = {}
        records = [images[identity] for identity in sorted(images)]
        kinds = {kind for record in records for kind in record["kinds"]}
        for kind in (kind for kind in KINDS if kind in kinds):
            self._refuse_incomplete(kind, records)
            compared = _compared(kind, records, categories, self.sigmas)
            prefix = KINDS[kind]
            numbers |= {f"{prefix}_{name}": value for name, value in compared.numbers.items()}
            for row, values in zip(categories, compared.of_categories, strict=True):
                row.update({f"{prefix}_{name}": value for name, value in values.items()})
            curves[prefix] = compared.curve
        return Evaluation(numbers, categories, curves)

    def _refuse_incomplete(self, kind: str, records: Sequence[EvaluatedImage]) -> None:
        """Raises UserError if annotations lack the field that a kind compares."""
        if kind == "keypoints":
            points = {len(each["keypoints"]) // 3 for record in records for each in record["found"]}
            for count in points:
                refuse_unknown_sigmas(count, self.sigmas)
            return
        named = FIELDS[kind]
        for record in records:
            for each in record["truth"]:
                if not each.get(named):
                    where = f"image {record['image']['id']}, annotation {each.get('id', '?')}"
                    raise UserError(
                        Problem(
                            "data",
                            what=f"{where}: it has no {named}, with which detections are compared",
                            remedy="a detector without masks, or other data",
                            code="incomplete",
                        )
                    )


def refuse_unknown_sigmas(points: int, sigmas: Sequence[float] | None) -> None:
    """Raises UserError if COCO's OKS cannot be computed for so many keypoints."""
    known = COCOS_KEYPOINTS if sigmas is None else len(sigmas)
    if points != known:
        remedy = f"give one for each: model.keypoint_sigmas=[{', '.join(['0.05'] * min(points, 3))}"
        raise UserError.at(
            "model.keypoint_sigmas",
            what=f"the network has {points} keypoints, and {known} sigmas are known for OKS",
            remedy=f"{remedy}, ...]",
            code="mismatch",
        )


@dataclass(frozen=True)
class _Compared:
    """The numbers of one kind, those of each category, and the curve (see `Evaluation`)."""

    numbers: dict[str, float]
    of_categories: list[dict[str, float]]
    curve: list[float]


def _compared(
    kind: str,
    records: Sequence[EvaluatedImage],
    categories: Sequence[Mapping[str, int | str | float]],
    sigmas: Sequence[float] | None,
) -> _Compared:
    """Evaluates one kind by faster-coco-eval, which adds fields to what it is given."""
    from faster_coco_eval import COCO, COCOeval_faster

    truth: list[dict[str, object]] = []
    found: list[dict[str, object]] = []
    # With its box, a mask would count as large as the box (small, medium, large).
    named = ("image_id", "category_id", "score", FIELDS[kind])
    for record in records:
        image_id = record["image"]["id"]
        for annotation in record["truth"]:
            # It takes the id 0 for none, so it gets ids of our own.
            own = {"id": len(truth) + 1, "image_id": image_id}
            truth.append(_of_kind(annotation, kind) | own)
        found += [{k: v for k, v in each.items() if k in named} for each in record["found"]]
    quiet: Callable[..., None] = log.debug
    whole = COCO(
        {
            "info": {},
            "images": [record["image"] for record in records],
            "annotations": truth,
            "categories": [dict(each) for each in categories],
        },
        print_function=quiet,
    )
    result = whole.loadRes(found)
    program = COCOeval_faster(whole, result, kind, print_function=quiet, kpt_oks_sigmas=sigmas)
    program.evaluate()
    program.accumulate()
    program.summarize()
    names = NUMBERS_OF_KEYPOINTS if kind == "keypoints" else NUMBERS
    numbers = {name: float(value) for name, value in zip(names, program.stats, strict=True)}
    order = [int(each) for each in program.params.catIds]
    # [IoU, recall, category, size, most detections]; -1: no value. All sizes come first.
    precision = np.asarray(program.eval["precision"])[:, :, :, 0, -1]
    places: dict[object, int] = {identity: place for place, identity in enumerate(order)}
    of_categories = []
    for category in categories:
        place = places.get(category["id"])
        one = precision[:, :, place] if place is not None else precision[:, :, :0]
        of_categories.append({"ap": _mean(one), "ap50": _mean(one[0]), "ap75": _mean(one[5])})
    curve = [_mean(precision[0, recall]) for recall in range(precision.shape[1])]
    return _Compared(numbers, of_categories, curve)


def _of_kind(annotation: CocoAnnotation, kind: str) -> dict[str, object]:
    """The fields that a kind needs."""
    named = ("category_id", "bbox", "area", "iscrowd", FIELDS[kind])
    own: dict[str, object] = {k: v for k, v in annotation.items() if k in named}
    if kind == "keypoints":
        points = annotation.get("keypoints", [])
        own |= {"keypoints": points, "num_keypoints": sum(seen > 0 for seen in points[2::3])}
    return own


def _mean(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    """Of the values that there are, as COCO's program does; -1: there are none."""
    there = values[values > -1]
    return float(there.mean()) if there.size else -1.0


def truth_of(target: Mapping[str, object], categories: Categories) -> list[CocoAnnotation]:
    """The annotations of an image as COCO's JSON has them.

    Args:
        target: If it has `annotations`, as they are in the source, these are taken, since single
            precision rounds boxes and areas. Else they are made of `boxes` float [N, 4] (x1, y1,
            x2, y2), `labels` int [N], and perhaps `masks` [N, H, W], `keypoints` [N, P, 3],
            `area` [N] and `iscrowd` [N].
    """
    source = target.get("annotations")
    if isinstance(source, Sequence):
        return [*source]
    boxes, labels = _tensor(target, "boxes"), _tensor(target, "labels")
    assert boxes is not None
    assert labels is not None
    masks, points = _tensor(target, "masks"), _tensor(target, "keypoints")
    crowds, areas = _tensor(target, "iscrowd"), _tensor(target, "area")
    runs = encoded(masks) if masks is not None else []
    ids = categories.ids_of(labels.tolist())
    truth: list[CocoAnnotation] = []
    for row, (x1, y1, x2, y2) in enumerate(boxes.double().tolist()):
        each: CocoAnnotation = {
            "category_id": ids[row],
            "bbox": [x1, y1, x2 - x1, y2 - y1],
            "area": (x2 - x1) * (y2 - y1),
            "iscrowd": int(crowds[row]) if crowds is not None else 0,
        }
        if masks is not None:
            each["segmentation"] = runs[row]
            each["area"] = float((masks[row] != 0).sum())
        if areas is not None:
            each["area"] = float(areas[row])
        if points is not None:
            each["keypoints"] = points[row].double().flatten().tolist()
        truth.append(each)
    return truth


def _tensor(target: Mapping[str, object], name: str) -> torch.Tensor | None:
    value = target.get(name)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else None
