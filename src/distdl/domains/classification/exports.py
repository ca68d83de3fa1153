"""How a classifier leaves a run: pixels in, probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn

from distdl.domains.answers import Answers
from distdl.domains.classification.class_answers import ClassAnswers
from distdl.domains.exports import AnsweringModel, Exports, Graph, refuse_size
from distdl.images.views import EvalView
from distdl.util.errors import Disagrees

REPORT = "report it, with the versions of torch and onnxruntime"


class Normalizes(Protocol):
    """Data of images of one size (`distdl.data.images`)."""

    def normalize(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 [B, 3, H, W] to float32, as the network takes it."""


class Probabilities(nn.Module):
    """uint8 [B, 3, S, S] to probabilities float32 [B, C], normalised as in the run."""

    def __init__(self, module: nn.Module, data: Normalizes) -> None:
        super().__init__()
        self.module = module
        self._normalize = data.normalize

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.module(self._normalize(images)).float().softmax(dim=1)


class ClassExports(Exports[np.ndarray]):
    """What was found are probabilities, float32 [number of images, number of classes]."""

    # Of a probability. ONNX runs other kernels than torch.
    tolerance = {"pt2": 1e-5, "onnx": 1e-3, "weights": 1e-5}

    @property
    def model(self) -> Probabilities:
        return Probabilities(self.module, cast(Normalizes, self.datamodule))

    def answers(self, kind: str, size: Sequence[int] | None) -> ClassAnswers:
        refuse_size(size, kind)
        view = cast(EvalView, self.view)
        said = {
            "classes": [str(name) for name in self.names],
            "image_size": view.image_size,
            "short_side": view.short_side,
            "max_pixels": view.max_pixels,
        }
        return ClassAnswers(said)

    def graph(self, answers: Answers[Any, Any], samples: Sequence[bytes]) -> Graph:
        return of_classifier(self.model, cast(ClassAnswers, answers).image_size)

    def expected(self, answers: Answers[Any, Any], samples: Sequence[bytes]) -> np.ndarray:
        view = cast(EvalView, self.view)
        return self.model(torch.stack([view.pixels(data, 0) for data in samples])).numpy()

    def scored(self, model: AnsweringModel, samples: Sequence[bytes]) -> np.ndarray:
        return np.stack([*model.found([*map(model.pixels, samples)])])

    def compare(
        self, scored: np.ndarray, expected: np.ndarray, kind: str, answers: Answers[Any, Any]
    ) -> dict[str, Any]:
        """Where the network's two best classes are closer than the tolerance, either is right."""
        difference = float(np.abs(scored - expected).max())
        tolerance = self.tolerance[kind]
        chosen = np.take_along_axis(expected, scored.argmax(axis=1)[:, None], axis=1)[:, 0]
        agrees = expected.max(axis=1) - chosen <= tolerance
        summary = (
            f"on {agrees.sum()} of {len(agrees)} images; probabilities differ by "
            f"{difference:.1e} at most"
        )
        if not (difference <= tolerance and agrees.all()):  # also if it is not a number
            raise Disagrees.at(
                "export",
                what=f"agrees with the network only {summary} ({tolerance:g} is accepted)",
                remedy=REPORT,
                code="mismatch",
            )
        top1 = float(agrees.mean())
        return {"images": len(agrees), "difference": difference, "top1": top1, "summary": summary}


def of_classifier(network: nn.Module, image_size: int) -> Graph:
    """Of a network that maps uint8 [B, 3, S, S] to [B, C]."""
    # Two images: torch takes a batch of one for a constant.
    example = torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)
    return Graph(network, example, batched=True, outputs=("probabilities",))
