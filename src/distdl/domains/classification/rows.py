"""The rows of a classifier's predictions: the most probable classes of each image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from distdl.domains.rows import Columns, Predicted, PredictedRows, RowTable


class ClassRows(PredictedRows):
    """Of a named image `class_1`, `probability_1`, `class_2`, ... with the names of the classes; of
    others the lists `class`, of their numbers, and `probability`.

    Args:
        named: See `PredictedRows`.
        top_k: How many classes a row has, at most.
    """

    uniform = False  # the network always gives logits of one shape

    def __init__(self, named: bool, top_k: int) -> None:
        super().__init__(named)
        self.top_k = top_k
        self.num_classes = 0  # not known before the first batch

    def of_batch(self, outputs: object, size: int) -> Columns:
        """`outputs`: logits [B, num_classes]. The columns stay on the device, and nobody waits."""
        logits = cast(torch.Tensor, outputs)
        self.num_classes = logits.shape[1]
        best = logits.float().softmax(dim=1).topk(min(self.top_k, self.num_classes))
        return {"class": best.indices, "probability": best.values}

    def table(self, columns: dict[str, np.ndarray], samples: Predicted) -> RowTable:
        if samples.names is None or samples.errors is None:
            return super().table(columns, samples)
        named = samples.classes if len(samples.classes) == self.num_classes else ()
        numbers = map(str, range(len(named), self.num_classes))  # if they have no names
        classes = np.array([*named, *numbers], dtype=object)
        best = columns["class"]
        chances = columns["probability"]
        ranked: dict[str, np.ndarray] = {}
        for place in range(best.shape[1]):
            ranked[f"class_{place + 1}"] = classes[best[:, place]]
            ranked[f"probability_{place + 1}"] = chances[:, place]
        rows, missing, counts = super().table(ranked, samples)
        labels = samples.known["label"]
        intact = samples.errors == ""
        known = {*named}
        counts["labels"] = sum(label in known for label in labels[intact])
        counts["hits"] = int((labels == ranked["class_1"])[intact].sum())
        return RowTable(rows, missing, counts)

    def metrics(self, counts: Mapping[str, int], samples: int) -> dict[str, float]:
        """Also `predict/acc1`, if all intact images have labels that are names of classes."""
        values = super().metrics(counts, samples)
        if 0 < counts.get("labels", 0) == samples - counts["damaged"]:
            values["predict/acc1"] = counts["hits"] / counts["labels"]
        return values
