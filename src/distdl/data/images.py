"""What image data modules share: uint8 over the bus, normalised on the device."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

# Mean and standard deviation of ImageNet's red, green and blue, for values from 0 to 1.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def cpus_per_rank() -> int:
    """This process's share of the CPU cores that it may use, at least 1 and at most 16.

    More than 16 decoders feed no single GPU faster but cost memory.
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        cores = os.cpu_count() or 1
    return min(16, max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class ImageData(LightningDataModule):
    """Base of our image data modules.

    A batch on the host holds "image" uint8 [B, 3, H, W] and "label" int64 [B]; "index" int64 [B]
    and "weight" float32 [B] are added by `distdl.data.loading.distribute`. On the device "image"
    becomes float, normalised, channels_last, in the precision of the run.

    Args:
        batch_size: Images per device.
        num_workers: Processes that load; None: this rank's share of the cores.
        mean: Of red, green and blue, for values from 0 to 1.
        std: Of the same.
    """

    exact_evaluation = True

    def __init__(
        self,
        batch_size: int,
        num_workers: int | None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = cpus_per_rank() if num_workers is None else num_workers
        self._mean, self._std = tuple(mean), tuple(std)
        self._constants: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def loader(self, dataset: Dataset[Any], *, shuffle: bool) -> DataLoader[Any]:
        on_cuda = self.trainer is not None and self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            pin_memory=on_cuda,
            # Starting workers anew in every epoch would idle the GPU for seconds.
            persistent_workers=self.num_workers > 0,
        )

    def on_after_batch_transfer(
        self, batch: dict[str, torch.Tensor], dataloader_idx: int
    ) -> dict[str, torch.Tensor]:
        image = self.normalize(batch["image"])
        if self.trainer is not None:  # 16-bit images where the whole run is 16-bit
            image = self.trainer.precision_plugin.convert_input(image)
        return {**batch, "image": image}

    def normalize(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 [B, 3, H, W] to float32, channels_last: (x / 255 - mean) / std."""
        if image.device not in self._constants:
            std = torch.tensor(self._std).view(1, 3, 1, 1)
            mean = torch.tensor(self._mean).view(1, 3, 1, 1)
            constants = 1 / (255 * std), -mean / std
            self._constants[image.device] = tuple(c.to(image.device) for c in constants)
        scale, shift = self._constants[image.device]
        # Cast and layout in one pass over the memory, the arithmetic in a second.
        floats = image.to(torch.float32, memory_format=torch.channels_last)
        return torch.addcmul(shift, floats, scale)
