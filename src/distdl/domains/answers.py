"""What a model answers for an image, where distdl need not be installed: behind a server, an
endpoint, or in MLflow. This file goes into every model folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from distdl.datasets.image_headers import MOST_PIXELS
from distdl.images.decoding import decoder
from distdl.util.json_rules import Rule

# An image as the network of the domain is given it.
Seen = TypeVar("Seen")
# What was found in one image.
Found = TypeVar("Found")
# A model of a file: a tensor to tensors by their names.
Network = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
Shape = Sequence[int | None]  # of a tensor; None: any length


class Answers(ABC, Generic[Seen, Found]):
    """From an encoded image to an answer in JSON, and back from what `model.json` says of it.

    A subclass has a file of its own that imports only files which model folders hold copies of
    (`distdl.tools.serving.model_folder`), and a line in `distdl.domains.served`.

    Args:
        description: What `model.json` says; `rules` have checked it.

    Raises:
        ValueError: It contradicts itself.
    """

    # Of the domain: "domain" in `model.json`.
    domain: str
    # The keys of `model.json` that the domain needs, and what each may hold.
    rules: Mapping[str, Rule[Any]] = {}
    # Keys that it may have.
    options: Mapping[str, Rule[Any]] = {}
    # Whether images that arrive together are scored together. If not, the network is given one
    # image at a time, and no answer depends on its neighbours.
    together = True
    # How many classes or objects a row of a batch job has at most; None: all.
    in_rows: int | None = None

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.max_pixels: int = description.get("max_pixels", MOST_PIXELS)
        self.decode = decoder("auto", self.max_pixels)

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """The keys of `rules` and `options`, as `model.json` has them."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Of what the network tells apart, in its order."""

    @abstractmethod
    def takes(self) -> Shape | None:
        """The shape of what a model in a graph's form takes; None: there is no such form."""

    @abstractmethod
    def gives(self) -> Sequence[Shape]:
        """The shapes of what such a model gives."""

    @abstractmethod
    def seen(self, data: bytes) -> Seen:
        """An encoded image as the validation sees it.

        Raises:
            DamagedImage: It is not a complete image of a format that is read.
            TooLarge: It has more than `max_pixels`, or would be too much work.
        """

    @abstractmethod
    def example(self) -> Seen:
        """An image to warm up on, as `seen` gives it."""

    def of_module(self, module: nn.Module) -> Network:
        """A network in PyTorch, as its domain calls it."""
        raise ValueError(f"models of {self.domain} have another form than weights and code")

    @abstractmethod
    def found(self, network: Network, images: Sequence[Seen]) -> Sequence[Found]:
        """What the network finds in images as `seen` gives them."""

    @abstractmethod
    def answer(self, found: Found, top_k: int | None) -> dict[str, Any]:
        """What is answered for an image, as JSON has it.

        Args:
            top_k: How many classes or objects at most; None: as many as the domain gives unasked.
        """

    @abstractmethod
    def gist(self, answer: Mapping[str, Any]) -> dict[str, Any]:
        """The part of an answer with `top_k` of 1 in which two machines must agree."""
