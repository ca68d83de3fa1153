"""Detection and instance segmentation with any network of torchvision's convention."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from distdl.domains.detection.categories import Categories
from distdl.domains.detection.detection_answers import as_float
from distdl.domains.detection.detections import Detections
from distdl.domains.detection.domain import Detection
from distdl.domains.detection.metric import refuse_unknown_sigmas
from distdl.domains.detection.network_parts import classes_of, no_scales_kept
from distdl.domains.detection.rows import PredictedObjects
from distdl.models import freezing, start_checks
from distdl.models.detection_network import (
    freeze_norms,
    has_stages,
    keep_float32,
    keypoints_of,
    needs_of,
    train_last_stages,
)
from distdl.models.detection_weights import load_detector_weights
from distdl.models.evaluated import Evaluated
from distdl.models.weights import NEW
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import NotNegative, Positive

log = logging.getLogger(__name__)

Norm = Literal["batch", "frozen"]
Precision = Literal["highest", "high", "medium"]
STAGES = 3  # of a backbone that starts from weights, the last ones that are trained
# What of a target a network sees in training.
TRAINED_BY = ("boxes", "labels", "masks", "keypoints")


class Detector(Evaluated):
    """A network that maps images to detections, and in training images and targets to losses.

    A batch is a dict with "image", a list of uint8 [3, H, W], or float from 0 to 1, of any sizes,
    and "target", a list of dicts: `boxes` float32 [N, 4] (x1, y1, x2, y2 in pixels), `labels` int64
    [N] from 1, and what else the network needs (`masks` uint8 [N, H, W], `keypoints` float32
    [N, P, 3]). N may be 0. In validation "weight" float32 [B] is 0 for images that do not count.

    The loss is the sum of those that the network returns; each is logged as `train/loss_...`.
    Validation, test and prediction give the network one image at a time, since torchvision pads
    the images of a batch to the largest, and scores change with the padding. They log COCO's
    numbers (`val/box_ap`, `val/mask_ap`, ...: `distdl.domains.detection.metric`).

    Args:
        network: In training `network(images, targets)` gives a dict of losses. In evaluation
            `network(images)` gives a dict for each image: `boxes`, `labels`, `scores`, perhaps
            `masks` float [N, 1, H, W] or `keypoints` float [N, P, 3].
        num_classes: Categories, without the background.
        weights: File of initial weights: of a classifier for the backbone (torchvision's `.pth`,
            `.safetensors`, a checkpoint), or of a whole detector. torchvision's detectors for COCO
            fit any categories with COCO's ids.
        norm: "frozen" replaces every BatchNorm2d of the backbone by one that keeps the statistics
            of `weights`, as torchvision's first detectors do; without `weights` there are none,
            and the norms stay. "batch" changes nothing.
        frozen_eps: Of frozen norms. torchvision's own detectors for COCO need 0.
        trainable_stages: How many stages of the backbone are trained, of five or six, the last
            ones; None: 3 if it starts from `weights` and its stages are known, otherwise all.
        keypoint_sigmas: How exactly each keypoint can be placed, for `val/keypoint_ap`; None:
            COCO's, for its 17 keypoints.
        matmul_precision: As of `ImageClassifier`.
        head: "new": the layers that tell classes apart are not taken from `weights`; None: they
            are, if the classes are COCO's or as many.
        freeze: Modules and parameters of the network that are not trained, beside those before
            `trainable_stages`: as of `ImageClassifier`.
        unfreeze_at: As of `ImageClassifier`.

    Raises:
        UserError: If an argument is out of its range, or does not fit the network.
    """

    domain = Detection()

    def __init__(
        self,
        network: nn.Module,
        num_classes: Positive,
        weights: str | None = None,
        norm: Norm = "batch",
        frozen_eps: NotNegative = 1e-5,
        trainable_stages: int | None = None,
        keypoint_sigmas: Sequence[float] | None = None,
        matmul_precision: Precision = "highest",
        head: Literal["new"] | None = None,
        freeze: Sequence[str] = (),
        unfreeze_at: Positive | None = None,
    ) -> None:
        super().__init__()
        classes = classes_of(network)
        if classes is not None and classes != num_classes + 1:
            found = classes - 1
            raise UserError.at(
                "model.num_classes",
                what=f"is {num_classes}, and the network has {found} classes and the background",
                remedy=f"model.num_classes={found}, or a network for {num_classes}",
                code="mismatch",
            )
        if norm == "frozen" and weights is not None:
            freeze_norms(network, frozen_eps)
        if trainable_stages is not None:
            train_last_stages(network, trainable_stages)
        elif weights is not None and has_stages(network):
            train_last_stages(network, STAGES)
        if freeze:
            self.frozen = freezing.freeze(network, freeze)
            self.unfreeze_at = unfreeze_at
        keep_float32(network)
        if (points := keypoints_of(network)) is not None:
            refuse_unknown_sigmas(points, keypoint_sigmas)
        self.network, self.num_classes, self.weights = network, num_classes, weights
        self.norm, self.keypoint_sigmas, self.head = norm, keypoint_sigmas, head
        self._matmul_precision = matmul_precision
        self._needs = needs_of(network)
        self.domain = Detection(None, keypoint_sigmas, self._needs)

    @staticmethod
    def check(
        config: Mapping[str, object], context: Mapping[str, object]
    ) -> Iterable[Problem | str]:
        """Problems of the arguments, and notes; paths are relative to the model node."""
        whole = cast("Mapping[str, Mapping[str, object]]", context["config"])
        yield from start_checks.problems(config, context, classifies=False)
        if context["local"] and find_spec("faster_coco_eval") is None:
            yield Problem(
                "",
                what="needs the package faster-coco-eval, which is not installed",
                remedy="pip install 'distdl[detection]'",
                code="not-installed",
            )
        strategy = str((whole.get("strategy") or {}).get("_target_"))
        if strategy.endswith("PipelineStrategy"):
            yield Problem(
                "",
                what="a detector is no chain of layers, which strategy=pipeline could cut",
                remedy="strategy=ddp or strategy=fsdp",
                code="unsupported",
            )
        precision = str((whole.get("trainer") or {}).get("precision"))
        if precision in ("bf16-true", "16-true", "transformer-engine"):
            yield Problem(
                "",
                what=f"trainer.precision={precision} would round boxes to 8 bits",
                remedy="trainer.precision=bf16-mixed, in which boxes are float32",
                code="unsupported",
            )
        network = start_checks.network_of(config, context)
        misfits = [*_misfits(config, whole.get("data") or {}, network)]
        yield from misfits
        if network is not None and not misfits:
            yield from _refused(config, network)

    def setup(self, stage: str) -> None:
        """Loads `weights`, unless a checkpoint follows, and takes the categories of the data."""
        self.domain = Detection(self.categories, self.keypoint_sigmas, self._needs)
        self.metric = self.domain.metric()
        self.drawing = self.domain.drawing(self.metric)
        if self.weights is not None and self.trainer.ckpt_path is None:
            new = self.head == NEW
            load_detector_weights(self.network, Path(self.weights), self.categories, new)
        elif self.norm == "frozen" and self.weights is None and stage == "fit":
            text = "model.weights is null: the network starts from random weights, and its norms "
            log.info("%sare not frozen", text)

    def configure_model(self) -> None:
        torch.set_float32_matmul_precision(self._matmul_precision)

    @property
    def categories(self) -> Categories:
        """Of the data, if they name any; else the labels are their ids."""
        data = self._trainer and getattr(self._trainer, "datamodule", None)
        named = getattr(getattr(data, "domain", None), "categories", None)
        return named if isinstance(named, Categories) else Categories.numbered(self.num_classes)

    def forward(self, images: Sequence[torch.Tensor]) -> list[Detections]:
        """Detections in each image [3, H, W], as if it were the only one."""
        return [Detections.of(self._found(each)) for each in map(as_float, images)]

    def _found(self, image: torch.Tensor) -> Mapping[str, torch.Tensor]:
        with no_scales_kept(self.network):
            found: Mapping[str, torch.Tensor] = self.network([image])[0]
        return found

    def training_step(self, batch: Mapping[str, Sequence[object]], batch_idx: int) -> torch.Tensor:
        images = cast("Sequence[torch.Tensor]", batch["image"])
        given = cast("Sequence[Mapping[str, object]]", batch["target"])
        targets = [self._of_training(target) for target in given]
        # Or what a training learns would depend on the batch that it, or a resume, begins with.
        with no_scales_kept(self.network):
            losses: Mapping[str, torch.Tensor] = self.network([*map(as_float, images)], targets)
        names = (name if name.startswith("loss") else f"loss_{name}" for name in losses)
        values = (loss.detach() for loss in losses.values())
        logged = {f"train/{name}": value for name, value in zip(names, values, strict=True)}
        self.log_dict(logged, batch_size=len(targets))
        return torch.stack([*losses.values()]).sum()

    def validation_step(self, batch: Mapping[str, Sequence[torch.Tensor]], batch_idx: int) -> None:
        self.evaluated(batch, self(batch["image"]))

    def predict_step(
        self, batch: Mapping[str, Sequence[torch.Tensor]], batch_idx: int
    ) -> PredictedObjects:
        """Of each image of the batch, fillers (weight 0) included."""
        return PredictedObjects(self(batch["image"]), self.categories)

    def _of_training(self, target: Mapping[str, object]) -> dict[str, object]:
        """What the network needs of a target."""
        needed = {name: target[name] for name in TRAINED_BY if name in target}
        for name in (name for name in self._needs if name not in needed):
            raise UserError.at(
                "data",
                what=f"its targets have no {name}, which {type(self.network).__name__} learns",
                remedy="data with them, or another model",
                code="incomplete",
            )
        return needed


def _misfits(
    config: Mapping[str, object], data: Mapping[str, object], network: nn.Module | None
) -> Iterator[Problem]:
    """What does not fit the data, as far as their node says it."""
    named = data.get("num_classes")
    own = config.get("num_classes")
    if isinstance(named, int) and isinstance(own, int) and named != own:
        yield Problem(
            "num_classes",
            what=f"is {own}, and data.num_classes is {named}",
            remedy=f"model.num_classes={named}",
            code="mismatch",
        )
    for field in () if network is None else needs_of(network):
        if data.get(field) is False:
            yield Problem(
                "network",
                what=f"{type(network).__name__} learns {field}",
                remedy=f"data.{field}=true, or another model",
                code="mismatch",
            )


def _refused(config: Mapping[str, object], network: nn.Module) -> Iterator[Problem]:
    """What a detector of this network, on `meta`, refuses when it is built."""
    taken = inspect.signature(Detector).parameters.keys() - {"network"}
    options: dict[str, Any] = {key: value for key, value in config.items() if key in taken}
    with suppress(TypeError):  # a value of another type, which has a problem of its own
        try:
            Detector(network, **options)
        except UserError as error:
            yield from start_checks.within_model(error)
