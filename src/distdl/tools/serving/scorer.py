"""Scores encoded images by an exported model, with the preprocessing of the validation.

This file goes into every model folder, with all that it imports, so that a model answers the same
without distdl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distdl.datasets.image_headers import Header, examine
from distdl.domains.answers import Answers, Network
from distdl.tools.serving.packaged import RUNS_CODE, WEIGHTS, RunsCode, loaded, refuse_other_words
from distdl.tools.serving.safe_loading import (
    answers_of,
    checked_archive,
    read,
    refuse_onnx,
    refuse_shapes,
)


class Scorer:
    """The model of a folder that `distdl export` wrote.

    distdl's own copy of this class, under `distdl serve` and `deploy`, executes nothing of the
    folder (`safe_loading`), unless the user trusts it. The copy in a folder is Python of whoever
    wrote the folder, and by design `mlflow models serve`, the scoring scripts and `python -m
    distdl_scoring.server` run it.

    Args:
        folder: With `model.json`, and `model.pt2`, `model.onnx`, or `model.safetensors` and code.
        trust: Whether code of the folder may run: that of a network which is no graph.
        network: Such a network, built by code that is trusted. It gets the folder's weights, and
            the folder's code does not run.

    Raises:
        ValueError: The folder is incomplete or damaged, or holds what could run code.
    """

    def __init__(
        self, folder: str | Path, *, trust: bool = False, network: nn.Module | None = None
    ) -> None:
        folder = Path(folder)
        try:
            description, name, data = read(folder)
            refuse_other_words(description, name)
            self.kind: Answers[Any, Any] = answers_of(description)
            if name == WEIGHTS:
                if network is None and not trust:
                    raise RunsCode(RUNS_CODE)
                module = loaded(folder, description, data, network)
                self._network: Network = self.kind.of_module(module)
            else:
                load = {"model.pt2": _load_pt2, "model.onnx": _load_onnx}[name]
                self._network = load(data, description, self.kind)
        except RunsCode as error:
            raise RunsCode(f"{folder} {error}") from None
        except Exception as error:  # torch, onnxruntime and a network's own code raise many
            what = f"{type(error).__name__}: {' '.join(str(error).split()):.1000}"
            raise ValueError(f"{folder} cannot be read; export it again: {what}") from error
        self.classes: list[str] = self.kind.names

    def examine(self, data: bytes) -> Header:
        """Format and size of an encoded image. Raises DamagedImage and TooLarge."""
        return examine(data, self.kind.max_pixels)

    def pixels(self, data: bytes) -> Any:  # noqa: ANN401 - as the domain's network takes it
        """An encoded image as the validation sees it: of a classifier uint8 [3, S, S].

        Raises:
            DamagedImage: It is not a complete image of a format that is read.
            TooLarge: It has more than `max_pixels`, or would be too much work.
        """
        return self.kind.seen(data)

    @torch.inference_mode()
    def found(self, images: Sequence[Any]) -> Sequence[Any]:
        """What the model finds in each of the images that `pixels` returned: of a classifier the
        probabilities, float32 [number of classes]."""
        return self.kind.found(self._network, images)

    def answer(self, found: object, top_k: int | None = None) -> dict[str, Any]:
        """The answer for one image, by what was found in it."""
        return self.kind.answer(found, top_k)

    def answers(self, pixels: Sequence[Any], top_k: int | None = None) -> list[dict[str, Any]]:
        """Per image the answer; `top_k`: how many classes or objects at most."""
        return [self.answer(found, top_k) for found in self.found(pixels)]

    def score(self, images: Sequence[bytes], top_k: int | None = None) -> list[dict[str, Any]]:
        """`answers` of encoded images."""
        return self.answers([self.pixels(data) for data in images], top_k)


def _load_pt2(data: bytes, description: Mapping[str, Any], answers: Answers[Any, Any]) -> Network:
    archive = checked_archive(data, answers)
    network = torch.export.load(archive).module()
    return lambda pixels: {"output": network(pixels)}


def _load_onnx(data: bytes, description: Mapping[str, Any], answers: Answers[Any, Any]) -> Network:
    import onnxruntime

    refuse_onnx(data)
    options = onnxruntime.SessionOptions()
    # Of a traced graph it would warn of each length that differs from the example's.
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    taken = [each.shape for each in session.get_inputs()]
    given = [each.shape for each in session.get_outputs()]
    refuse_shapes("model.onnx", taken, given, answers)
    name = session.get_inputs()[0].name
    fields = description.get("fields") or [each.name for each in session.get_outputs()]

    def network(pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = session.run(None, {name: pixels.contiguous().numpy()})
        return dict(zip(fields, map(torch.from_numpy, outputs), strict=True))

    return network
