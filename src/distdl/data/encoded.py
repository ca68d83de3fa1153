"""Data sets of encoded images: a subclass reads; decoding and damage are handled here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset, default_collate

from distdl.data.nvjpeg import EncodedBatch
from distdl.data.views import View
from distdl.datasets.image_files import DamagedImage
from distdl.util.errors import UserError

# So many damaged images one after the other are no accident of the images.
MOST_IN_A_ROW = 20


class EncodedImages(Dataset[dict[str, Any]]):
    """Images as files' bytes, seen through a view.

    A subclass defines `__len__`, `read`, `label`, `name`, and may fix a copy in `repair`. A sample
    is what the view gives ("image": uint8 [3, S, S]) with "label" (int), "weight" (float32) and
    "damaged" (text).

    A damaged image is replaced by the next intact one, so that batches stay equal on all
    ranks: "weight" is then 0, which validation does not count (training trains on it), and
    "damaged" says which and why. `distdl.data.images.ImageData` reports or refuses it.

    Args:
        view: `distdl.data.views`.
    """

    def __init__(self, view: View) -> None:
        self.view = view

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The encoded image. DamagedImage: this one cannot be had; OSError ends the run."""

    @abstractmethod
    def label(self, index: int) -> int:
        """Its class."""

    @abstractmethod
    def name(self, index: int) -> str:
        """What a person finds it by: a path, or shard and member."""

    def repair(self, index: int) -> bool:
        """Called once for an image that cannot be decoded; True: read again, it may be intact."""
        return False

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.at_epoch(index, 0)

    def at_epoch(self, index: int, epoch: int) -> dict[str, Any]:
        """The sample as that epoch sees it: image sizes may grow (`data.resize`).

        Raises:
            UserError: Too many damaged images in a row.
        """
        damaged: list[str] = []
        for place in range(index, index + min(MOST_IN_A_ROW, len(self))):
            place %= len(self)
            try:
                seen = self._seen(place, epoch)
            except DamagedImage as error:
                damaged.append(f"{self.name(place)}: {error}")
                continue
            weight = np.float32(not damaged)
            # Only its own damage: the neighbours report theirs.
            return {
                **seen,
                "label": self.label(place),
                "weight": weight,
                "damaged": damaged[0] if damaged else "",
            }
        what = f"{len(damaged)} images in a row cannot be decoded, from {damaged[0]}"
        raise UserError.at("data.root", what, "python -m distdl data check says how many are")

    def _seen(self, index: int, epoch: int) -> dict[str, Any]:
        try:
            return self.view(self.read(index), epoch)
        except DamagedImage:
            if not self.repair(index):
                raise
            return self.view(self.read(index), epoch)

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch whose "image" is uint8 [B, 3, S, S], channels_last as the samples are.

        default_collate alone would turn each image's memory over into planes, and the device back.
        What the GPU is to decode becomes an `distdl.data.nvjpeg.EncodedBatch`.
        """
        rest = [{k: v for k, v in s.items() if k not in ("image", "crop")} for s in samples]
        batch: dict[str, Any] = default_collate(rest)
        if "crop" in samples[0]:
            return {**batch, "image": EncodedBatch(samples)}
        image = default_collate([sample["image"].permute(1, 2, 0) for sample in samples])
        return {**batch, "image": image.permute(0, 3, 1, 2)}
