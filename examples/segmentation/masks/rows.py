"""Part 5: a row per image, with how many pixels each class has."""

from __future__ import annotations

import numpy as np
import torch

from distdl.domains.rows import Columns, Predicted, PredictedRows, RowTable


class MaskRows(PredictedRows):
    """`pixels_<class>`: of the image as the network saw it."""

    def of_batch(self, outputs: object, size: int) -> Columns:
        """`outputs`: logits [B, K, S, S]."""
        assert isinstance(outputs, torch.Tensor)
        said = outputs.argmax(dim=1).flatten(1)
        classes = torch.arange(outputs.shape[1], device=said.device)
        return {"pixels": (said[:, :, None] == classes).sum(dim=1)}

    def table(self, columns: dict[str, np.ndarray], samples: Predicted) -> RowTable:
        pixels = columns["pixels"]
        names = samples.classes or [str(number) for number in range(pixels.shape[1])]
        each = {f"pixels_{name}": pixels[:, place] for place, name in enumerate(names)}
        return super().table(each, samples)
