"""A data module with plain DataLoaders over a map-style dataset."""

import math

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a sine with new noise each time, which distdl seeds: a resume is exact."""

    def __init__(self, count: int, window: int, noise: float) -> None:
        self.count = count
        self.window = window
        self.noise = noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time = torch.arange(self.window + 1) * 0.2 + index * math.sqrt(2)
        wave = torch.sin(time) + self.noise * torch.randn(self.window + 1)
        return wave[:-1], torch.sin(time[-1])


class Waves(LightningDataModule):
    """Loads windows for training and validation."""

    def __init__(
        self, batch_size: int, window: int = 32, noise: float = 0.1, train_samples: int = 2000
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.window = window
        self.noise = noise
        self.train_samples = train_samples

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        data = Windows(self.train_samples, self.window, self.noise)
        return DataLoader(data, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(Windows(200, self.window, self.noise), self.batch_size)
