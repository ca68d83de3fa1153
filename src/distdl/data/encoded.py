"""Base of data sets of encoded images: handles decoding and damage; a subclass reads."""

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

# So many damaged images in a row point to another cause than the images.
MOST_IN_A_ROW = 20


class EncodedImages(Dataset[dict[str, Any]]):
    """Encoded images, decoded and cropped by a view.

    A subclass defines `__len__`, `read`, `label` and `name`, and may fix a damaged copy in
    `repair`. A sample has the view's fields ("image": uint8 [3, S, S]), "label" (int), "weight"
    (float32) and "damaged" (str).

    A damaged image is replaced by the next intact one, so that batches have the same size on all
    ranks. Its "weight" is then 0: validation ignores the row, training uses it. "damaged" then says
    which image is damaged and why. `distdl.data.images.ImageData` reports or refuses it.

    Args:
        view: See `distdl.data.views`.
    """

    def __init__(self, view: View) -> None:
        self.view = view

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The encoded image.

        Raises:
            DamagedImage: Only this image is unreadable; it is replaced.
            OSError: Ends the run.
        """

    @abstractmethod
    def label(self, index: int) -> int:
        """Its class index."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Where a user can find the image: a path, or shard and member."""

    def repair(self, index: int) -> bool:
        """Called once for an image that cannot be decoded; True: read it again."""
        return False

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.at_epoch(index, 0)

    def at_epoch(self, index: int, epoch: int) -> dict[str, Any]:
        """The sample in an epoch: the image size may depend on it (`data.resize`).

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
            # Report only the first: the other damaged images report themselves.
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

        default_collate alone would copy each image to a planar layout, and the device would convert
        it back. Images for the GPU decoder become a `distdl.data.nvjpeg.EncodedBatch`.
        """
        rest = [{k: v for k, v in s.items() if k not in ("image", "crop")} for s in samples]
        batch: dict[str, Any] = default_collate(rest)
        if "crop" in samples[0]:
            return {**batch, "image": EncodedBatch(samples)}
        image = default_collate([sample["image"].permute(1, 2, 0) for sample in samples])
        return {**batch, "image": image.permute(0, 3, 1, 2)}
