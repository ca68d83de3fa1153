"""How a detector leaves a run: an image in, its objects out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from distdl.domains.answers import Answers
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.detection_answers import (
    FIELDS,
    DetectionAnswers,
    SeenObjects,
    as_float,
)
from distdl.domains.detection.detections import Detections, decoded
from distdl.domains.detection.metric import CocoMetric
from distdl.domains.detection.views import DetectionView
from distdl.domains.exports import AnsweringModel, Exports, Graph, refuse_size
from distdl.util.errors import Disagrees, UserError

PIXELS = 0.01  # the largest difference of a box that is accepted, at the size of the network
MASKS = 0.99  # the least IoU of two masks
# A keypoint is where a map of heats is hottest: of two neighbouring places that are about as hot
# another runtime may choose the other one.
POINTS = {"onnx": 1.0}  # pixels, of a keypoint in a format; in others PIXELS
FEW = 4  # pixels, by which small masks may differ all the same
NEAR = 1.0  # pixels: nearer boxes of one category may be one detection
CLOSE = 1e-2  # the same of scores
EDGE = 1e-4  # of a score above the least: a rounding may decide whether it is kept
TRIED = 8  # images, to find one to trace with
# What the masks of an image may take, as the network gives them: float32, as large as the image.
MOST_MASK_BYTES = 8 << 30
REPORT = "report it, with the versions of torch, torchvision and onnxruntime"
FROZEN = "distdl.models.detection_network.frozen"
LARGEST = 4096  # of a side of a fixed size, in pixels


class OfOneSize(nn.Module):
    """uint8 [3, H, W] to the tensors that the network gives for this image, in the order of
    `fields`."""

    def __init__(self, network: nn.Module, fields: Sequence[str]) -> None:
        super().__init__()
        self.network = network
        self.fields = [*fields]

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self.network([as_float(image)])[0]
        return tuple(found[name] for name in self.fields)


class DetectionExports(Exports[list[SeenObjects]]):
    """What was found are the objects of each image."""

    # Of a score. ONNX runs other kernels than torch.
    tolerance = {"package": 1e-5, "onnx": 1e-4, "weights": 1e-5}
    code = (
        "models/detection_network.py",
        "util/errors.py",
        "util/exit_codes.py",
        "util/ranges.py",
        "util/refusal_codes.py",
        "util/suggest.py",
    )
    packages = ("faster-coco-eval",)

    @property
    def network(self) -> nn.Module:
        network = self.module.network
        assert isinstance(network, nn.Module)
        return network

    @property
    def categories(self) -> Categories:
        found = getattr(self.datamodule, "categories", None)
        assert isinstance(found, Categories)
        return found

    def answers(self, kind: str, size: Sequence[int] | None) -> DetectionAnswers:
        names = [*self.categories.names]
        trained = [str(name) for name in self.names]
        if trained and trained != names:
            raise UserError.at(
                "data.root",
                what=f"has the categories {names[:5]}, and the checkpoint {trained[:5]}",
                remedy="the data that it was trained on, by data.root=",
                code="mismatch",
            )
        view = cast(DetectionView, self.view)
        pairs = zip(self.categories.ids, self.categories.names, strict=True)
        said: dict[str, Any] = {
            "categories": [{"id": key, "name": name} for key, name in pairs],
            "max_pixels": self._most_pixels(view),
        }
        if kind != "onnx":
            refuse_size(size, kind)
            return DetectionAnswers(said)
        said["size"] = self._size(size)
        said["fill"] = self._fill()
        output = self._output(torch.zeros(3, *said["size"], dtype=torch.uint8))
        said["fields"] = [name for name in FIELDS if name in output]
        if "keypoints" in output:
            said["keypoints"] = output["keypoints"].shape[1]
        return DetectionAnswers(said)

    def _most_pixels(self, view: DetectionView) -> int:
        """Of an image: the masks of all detections of a larger one would fill the memory."""
        heads = getattr(self.network, "roi_heads", None)
        most = getattr(heads, "detections_per_img", 100)
        has_masks = getattr(heads, "mask_predictor", None) is not None
        return min(view.max_pixels, MOST_MASK_BYTES // (4 * most)) if has_masks else view.max_pixels

    def _size(self, size: Sequence[int] | None) -> list[int]:
        """By default that at which torchvision's detectors see an image wider than high."""
        if size is None:
            transform = getattr(self.network, "transform", None)
            fixed = getattr(transform, "fixed_size", None)
            if fixed is not None:  # of SSD: width and height
                return [int(fixed[1]), int(fixed[0])]
            short = getattr(transform, "min_size", None)
            longest = getattr(transform, "max_size", None)
            if not isinstance(short, Sequence) or not isinstance(longest, int):
                raise UserError.at(
                    "--size",
                    what=f"{type(self.network).__name__} does not say at which size it sees images",
                    remedy="--size 800x1333: height and width in pixels",
                    code="missing-key",
                )
            size = (short[-1], longest)
        if max(size) > LARGEST:
            raise UserError.at(
                "--size",
                what=f"{max(size)} is more than {LARGEST} pixels",
                remedy="a smaller one",
                code="out-of-range",
            )
        return [*size]

    def _fill(self) -> list[int]:
        """The mean colour, which torchvision's detectors turn into their padding, 0."""
        mean = getattr(getattr(self.network, "transform", None), "image_mean", None) or [0.0] * 3
        return [round(255 * value) for value in mean]

    def _output(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(self.network([as_float(image)])[0])

    def graph(self, answers: Answers[Any, Any], samples: Sequence[bytes]) -> Graph:
        """Traced with the image in which most was found: with nothing found, the operators behind
        would see no shape."""
        said = cast(DetectionAnswers, answers)
        seen = [said.seen(data).pixels for data in samples[:TRIED]]
        counts = [len(self._output(image)["scores"]) for image in seen]
        most = int(np.argmax(counts))
        if not counts[most]:
            raise UserError.at(
                "checkpoint",
                what=f"finds nothing in {len(seen)} images of the validation, and cannot be traced",
                remedy="a trained one, or --to package",
                code="unsupported",
            )
        # The exporter leaves a network in the mode that it had.
        network = OfOneSize(self.network, said.fields).eval()
        return Graph(network, seen[most], batched=False, outputs=said.fields)

    def network_node(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """Norms are frozen by the module, behind the network's own builder."""
        network = super().network_node(node)
        if node.get("norm") == "frozen" and node.get("weights") is not None:
            eps = node.get("frozen_eps", 1e-5)
            return {"_target_": FROZEN, "network": network, "eps": eps}
        return network

    def expected(self, answers: Answers[Any, Any], samples: Sequence[bytes]) -> list[SeenObjects]:
        said = cast(DetectionAnswers, answers)
        if said.size is not None:  # the network at that size
            network = said.of_module(self.network)
            return [said.found(network, [said.seen(data)])[0] for data in samples]
        found = []
        for data in samples:
            image = self.view(data)["image"]
            (detections,) = self.module([image])
            found.append(SeenObjects(detections, *image.shape[-2:]))
        return found

    def scored(self, model: AnsweringModel, samples: Sequence[bytes]) -> list[SeenObjects]:
        return [model.found([model.pixels(data)])[0] for data in samples]

    def said(
        self, answers: Answers[Any, Any], said: Sequence[Mapping[str, Any]]
    ) -> list[SeenObjects]:
        labels = cast(DetectionAnswers, answers).categories.labels
        return [objects_of(answer, labels) for answer in said]

    def compare(
        self,
        scored: list[SeenObjects],
        expected: list[SeenObjects],
        kind: str,
        answers: Answers[Any, Any],
    ) -> dict[str, Any]:
        """Each detection of one side must be one of the other: of the same category, and the same
        box, score and mask within the tolerance. Those that are just good enough to be kept may be
        missing: there a rounding decides."""
        size = cast(DetectionAnswers, answers).size
        total = Compared()
        for one, other in zip(scored, expected, strict=True):
            scale = max(other.height / size[0], other.width / size[1]) if size else 1.0
            pair = (one.detections, other.detections)
            total += compared(*pair, scale, self._limit(*pair), POINTS.get(kind, PIXELS))
        tolerance = self.tolerance[kind]
        count = total.matched + total.alone
        summary = (
            f"on {len(expected)} images with {count} detections; boxes differ by "
            f"{total.box:.1e} px, scores by {total.score:.1e} at most"
        )
        if not count:
            summary = f"on {len(expected)} images, in which both find nothing to compare"
        differing = total.masks + total.points
        right = total.box <= PIXELS and total.score <= tolerance and not differing
        if not right or total.alone:
            what = f"does not agree with the network {summary}"
            what += f"; {total.alone} detections are on one side alone" if total.alone else ""
            what += f"; {total.masks} masks differ" if total.masks else ""
            what += f"; keypoints of {total.points} objects differ" if total.points else ""
            accepted = f"{PIXELS:g} px and {tolerance:g} are accepted"
            raise Disagrees.at(
                "export", what=f"{what} ({accepted})", remedy=REPORT, code="mismatch"
            )
        return {
            "images": len(expected),
            "detections": total.matched,
            "box": total.box,
            "difference": total.score,
            "summary": summary,
        }

    def costs(
        self,
        answers: Answers[Any, Any],
        samples: Iterable[Mapping[str, Any]],
        scored: list[SeenObjects],
    ) -> dict[str, tuple[float, float]]:
        """AP at the images' own sizes, and at the one that the graph takes."""
        if cast(DetectionAnswers, answers).size is None:
            return {}
        truth = [*samples]
        if not all("annotations" in sample["target"] for sample in truth):
            return {}
        native: list[Detections] = [self.module([sample["image"]])[0] for sample in truth]
        fixed = [found.detections for found in scored]
        before, after = (self._measured(truth, each) for each in (native, fixed))
        names = [name for name in before if name.endswith("_ap")]
        return {name: (before[name], after[name]) for name in names}

    def _limit(self, one: Detections, other: Detections) -> float:
        """The score below which the network keeps no detection of an image."""
        heads = getattr(self.network, "roi_heads", self.network)
        limit = float(getattr(heads, "score_thresh", 0.0))
        most = getattr(heads, "detections_per_img", None)
        if most is not None and max(len(one), len(other)) >= most:
            limit = max(limit, min([*one.scores.tolist(), *other.scores.tolist()]))
        return limit

    def _measured(
        self, samples: Sequence[Mapping[str, Any]], found: Sequence[Detections]
    ) -> dict[str, float]:
        metric = CocoMetric(self.categories, getattr(self.module, "keypoint_sigmas", None))
        metric.start(torch.device("cpu"))
        images = [sample["image"] for sample in samples]
        targets = [sample["target"] for sample in samples]
        index = torch.arange(len(samples))
        metric.add({"image": images, "target": targets, "index": index}, found)
        return metric.result(lambda tensor: tensor)


@dataclass(frozen=True)
class Compared:
    """Detections of two models: how many are in both, how many in one alone, and by how much the
    boxes (in pixels), the scores, and how many masks and sets of keypoints of the former differ."""

    matched: int = 0
    alone: int = 0
    box: float = 0.0
    score: float = 0.0
    masks: int = 0
    points: int = 0

    def __add__(self, other: Compared) -> Compared:
        return Compared(
            self.matched + other.matched,
            self.alone + other.alone,
            max(self.box, other.box),
            max(self.score, other.score),
            self.masks + other.masks,
            self.points + other.points,
        )


def compared(
    one: Detections, other: Detections, scale: float, limit: float, points_apart: float = PIXELS
) -> Compared:
    """Matches the detections of an image by category, box and score.

    Args:
        scale: Pixels of the image for one of the network's.
        limit: The score below which no detection is kept.
        points_apart: By how many pixels of the network's a keypoint may be elsewhere.
    """
    free = [*range(len(one))]
    box = score = 0.0
    masks = points = 0
    unmatched: list[float] = []
    for place in range(len(other)):
        distances = [
            (
                float((one.boxes[each] - other.boxes[place]).abs().max()) / scale,
                float((one.scores[each] - other.scores[place]).abs()),
                each,
            )
            for each in free
            if one.labels[each] == other.labels[place]
        ]
        near = [each for each in distances if each[0] <= NEAR and each[1] <= CLOSE]
        if not near:
            unmatched.append(float(other.scores[place]))
            continue
        apart, differs, chosen = min(near)
        free.remove(chosen)
        box = max(box, apart)
        score = max(score, differs)
        masks += differ(one, chosen, other, place)
        points += are_elsewhere(one, chosen, other, place, points_apart * scale)
    unmatched += [float(one.scores[each]) for each in free]
    matched = len(other) - (len(unmatched) - len(free))
    alone = sum(value > limit + EDGE for value in unmatched)
    return Compared(matched, alone, box, score, masks, points)


def differ(one: Detections, place: int, other: Detections, its_place: int) -> bool:
    """Whether the masks of two detections are different ones."""
    if one.masks is None or other.masks is None:
        return (one.masks is None) != (other.masks is None)
    if one.masks[place] == other.masks[its_place]:
        return False
    first, second = decoded([one.masks[place], other.masks[its_place]]).bool()
    either = int((first | second).sum())
    apart = int((first ^ second).sum())
    return apart > max(FEW, (1 - MASKS) * either)


def are_elsewhere(
    one: Detections, place: int, other: Detections, its_place: int, most: float
) -> bool:
    """Whether a keypoint of two detections is at places that are more than `most` pixels apart."""
    if one.keypoints is None or other.keypoints is None:
        return (one.keypoints is None) != (other.keypoints is None)
    apart = one.keypoints[place, :, :2] - other.keypoints[its_place, :, :2]
    return bool((apart.abs() > most).any())


def objects_of(answer: Mapping[str, Any], labels: Mapping[int, int]) -> SeenObjects:
    """What was found, by the answer of `DetectionAnswers`."""
    objects = answer["detections"]
    boxes = torch.tensor([each["bbox"] for each in objects], dtype=torch.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    masks = [each["segmentation"] for each in objects if "segmentation" in each]
    points = [each["keypoints"] for each in objects if "keypoints" in each]
    found = Detections(
        boxes.float(),
        torch.tensor([labels[each["category_id"]] for each in objects], dtype=torch.int64),
        torch.tensor([each["score"] for each in objects], dtype=torch.float32),
        masks if len(masks) == len(objects) and objects else None,
        torch.tensor(points).reshape(len(points), -1, 3) if points else None,
    )
    return SeenObjects(found, answer["height"], answer["width"])
