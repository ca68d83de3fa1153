"""Images generated on the device, to measure and test training without the cost of loading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from distdl.data.images import IMAGENET_MEAN, IMAGENET_STD, ImageData
from distdl.domains.classification.domain import Classification
from distdl.util.ranges import Count, Positive


class SyntheticImages(ImageData):
    """Random images with a pattern per class, so that a network can learn them.

    Sample i is image `i % pool_size` of a pool that is the same on every device. Its label is
    `i % pool_size % num_classes`, so at most `pool_size` classes occur.

    Args:
        batch_size: Images per device.
        num_classes: Labels are below it.
        image_size: Height and width in pixels.
        train_samples, val_samples: Images in an epoch and in a validation (default: ImageNet's).
        pool_size: Number of images; each takes 3 * image_size**2 bytes of device memory.
        num_workers: 0 is fastest, since a sample is two numbers; None: by this rank's cores.
        seed: The images of the pool depend on it.
        mean, std: The device normalises red, green and blue by these; for values from 0 to 1.
    """

    domain = Classification()
    decodes = False

    def __init__(
        self,
        batch_size: int,
        num_classes: Positive = 1000,
        image_size: Positive = 224,
        train_samples: Positive = 1_281_167,
        val_samples: Count = 50_000,
        pool_size: Positive = 256,
        num_workers: int | None = 0,
        seed: int = 0,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__(batch_size, num_workers, mean, std)
        self.num_classes = num_classes
        self.image_size = image_size
        self.train_samples = train_samples
        self.val_samples = val_samples
        self.pool_size = pool_size
        self.seed = seed
        self._pools: dict[torch.device, torch.Tensor] = {}

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self._labels(self.train_samples), shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self._labels(self.val_samples), shuffle=False)

    def _labels(self, num_samples: int) -> _Labels:
        return _Labels(num_samples, self.pool_size, self.num_classes)

    def on_after_batch_transfer(
        self, batch: dict[str, torch.Tensor], dataloader_idx: int
    ) -> dict[str, torch.Tensor]:
        index = batch["index"]
        if not getattr(self.trainer and self.trainer.strategy, "takes_inputs", True):
            index = index.to("meta")  # a later pipeline stage needs only the shape
        image = self.images(index)
        return super().on_after_batch_transfer({**batch, "image": image}, dataloader_idx)

    def images(self, index: torch.Tensor) -> torch.Tensor:
        """Samples int64 [B] to images uint8 [B, 3, H, W], on the device of `index`."""
        if index.device not in self._pools:
            self._pools[index.device] = self._pool().to(index.device)
        # [pool, H, W, 3], so the result is channels_last without a copy.
        pool = self._pools[index.device]
        return pool.index_select(0, index % self.pool_size).permute(0, 3, 1, 2)

    def _pool(self) -> torch.Tensor:
        """Images of which each is the pattern of its class, with noise: uint8 [N, H, W, 3]. Image i
        is of class i % classes."""
        # Drawn on the CPU, so that all kinds of devices get the same images.
        generator = torch.Generator().manual_seed(self.seed)
        classes = min(self.num_classes, self.pool_size)
        coarse = torch.rand(classes, 3, 4, 4, generator=generator)
        large = F.interpolate(coarse, size=(self.image_size, self.image_size))
        patterns = (large * 127).to(torch.uint8).permute(0, 2, 3, 1)
        shape = (self.pool_size, self.image_size, self.image_size, 3)
        noise = torch.randint(0, 128, shape, generator=generator, dtype=torch.uint8)
        return noise + patterns[torch.arange(self.pool_size) % classes]


class _Labels(Dataset[dict[str, int]]):
    is_deterministic = True  # for KeyedDataset: it draws nothing

    def __init__(self, num_samples: int, pool_size: int, num_classes: int) -> None:
        self.num_samples = num_samples
        self.pool_size = pool_size
        self.num_classes = num_classes

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"label": index % self.pool_size % self.num_classes, "index": index}
