"""Classification: images with one class each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule

from distdl.domains.classification.drawing import Mistakes
from distdl.domains.classification.exports import ClassExports
from distdl.domains.classification.metric import Accuracy
from distdl.domains.classification.record import ClassRecord
from distdl.domains.classification.rows import ClassRows
from distdl.domains.domain import Domain, View
from distdl.domains.metric import Metric
from distdl.domains.record import Annotation


class Classification(Domain):
    """A sample is an image and the number of its class, "label" int64 [B] in a batch. Views and
    collate are the defaults: square images of one size in a batch."""

    name = "classification"
    main_metric = "val/acc1"
    record = ClassRecord()
    field = "label"

    def known(
        self, annotations: Sequence[Annotation], classes: Sequence[str]
    ) -> dict[str, np.ndarray]:
        names = [classes[cast(int, label)] for label in annotations]
        return {"label": np.array(names, dtype=object)}

    def metric(self) -> Accuracy:
        return Accuracy()

    def drawing(self, metric: Metric[Any, Any]) -> Mistakes:
        return Mistakes()

    def rows(self, *, named: bool, top_k: int) -> ClassRows:
        return ClassRows(named, top_k)

    def exports(
        self,
        module: LightningModule,
        datamodule: LightningDataModule,
        view: View,
        names: Sequence[object],
    ) -> ClassExports:
        return ClassExports(module, datamodule, view, names)
