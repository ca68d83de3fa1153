"""How models of a domain leave a run: as a graph, as weights, or as weights with their code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from distdl.domains.answers import Answers
from distdl.domains.domain import View
from distdl.util.errors import UserError

Found = TypeVar("Found")  # in all images of a comparison


@dataclass(frozen=True)
class Graph:
    """A network that a graph is written of: of one tensor of pixels.

    Args:
        example: What it takes.
        batched: Whether it takes any number of images, by a first dimension. Such a network gives
            one tensor. If not, the graph is traced with the example, and fits images of this size
            alone.
        outputs: The names of what it gives.
    """

    network: nn.Module
    example: torch.Tensor
    batched: bool
    outputs: Sequence[str]


class AnsweringModel(Protocol):
    """A written model (`distdl.tools.serving.scorer.Scorer`)."""

    def pixels(self, data: bytes) -> Any:  # noqa: ANN401 - as the domain's network takes it
        """An encoded image as the model takes it."""

    def found(self, images: Sequence[Any]) -> Sequence[Any]:
        """What the model finds in images of `pixels`."""


class Exports(ABC, Generic[Found]):
    """Called by `distdl export`, in one process on the CPU. The module has the weights of a
    checkpoint, in float32, for inference.

    Args:
        module, datamodule: Of the run.
        view: Of the images that are predicted.
        names: As `Domain.names` gives them, of the checkpoint or the data.
    """

    # The largest difference that is accepted, by the format's name.
    tolerance: Mapping[str, float]
    # Of distdl's files, those that build networks of the domain: a package holds copies of them.
    code: Sequence[str] = ()
    # What answers need beside what every model folder needs.
    packages: Sequence[str] = ()

    def __init__(
        self,
        module: LightningModule,
        datamodule: LightningDataModule,
        view: View,
        names: Sequence[object],
    ) -> None:
        self.module = module
        self.datamodule = datamodule
        self.view = view
        self.names = names

    @abstractmethod
    def answers(self, kind: str, size: Sequence[int] | None) -> Answers[Any, Any]:
        """What answers by a model of the format `kind`.

        Args:
            size: Height and width that the user asks for; None: nothing is asked for.

        Raises:
            UserError: The format has another size, or none.
        """

    @abstractmethod
    def graph(self, answers: Answers[Any, Any], samples: Sequence[bytes]) -> Graph:
        """What a graph is written of. `samples` are encoded images of the validation."""

    def network_node(self, node: Mapping[str, Any]) -> dict[str, Any]:
        """What builds the network as the module has it: a node like those of a config.

        Args:
            node: The config's section `model`, in plain Python.
        """
        return dict(node["network"])

    @abstractmethod
    def expected(self, answers: Answers[Any, Any], samples: Sequence[bytes]) -> Found:
        """What the network finds in encoded images of the validation."""

    @abstractmethod
    def scored(self, model: AnsweringModel, samples: Sequence[bytes]) -> Found:
        """What a written model finds in them."""

    def said(self, answers: Answers[Any, Any], said: Sequence[Mapping[str, Any]]) -> Found:
        """What was found, by what a model's folder has answered without `top_k`."""
        raise NotImplementedError(f"{type(self).__name__} has no format with code")

    @abstractmethod
    def compare(
        self, scored: Found, expected: Found, kind: str, answers: Answers[Any, Any]
    ) -> dict[str, Any]:
        """How well the two agree: with "images" and "summary", one line of text.

        Raises:
            Disagrees: Not well enough.
        """

    def costs(
        self, answers: Answers[Any, Any], samples: Iterable[Mapping[str, Any]], scored: Found
    ) -> dict[str, tuple[float, float]]:
        """What the format costs in accuracy, on the samples of the comparison: by the name of a
        number, its value in the run's own network and in the written one. By default nothing: the
        format sees images as the validation does."""
        return {}


def refuse_size(size: Sequence[int] | None, kind: str) -> None:
    """Raises UserError if the user asks for a size that a format has no use for."""
    if size is not None:
        raise UserError.at(
            "--size",
            what=f"{kind} takes images as the validation does",
            remedy="omit it",
            code="unsupported",
        )
