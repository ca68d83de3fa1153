"""For torch_uncertainty: noisy sums, and the function that makes its optimizer."""

import torch
from lightning.pytorch import LightningDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def adam(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


class Points(LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def _loader(self, count: int, shuffle: bool = False) -> DataLoader:
        draw = torch.Generator().manual_seed(count)
        x = torch.randn(count, 4, generator=draw)
        y = x.sum(1) + 0.1 * torch.randn(count, generator=draw)
        return DataLoader(TensorDataset(x, y), self.batch_size, shuffle)

    def train_dataloader(self) -> DataLoader:
        return self._loader(64, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self._loader(24)

    def test_dataloader(self) -> DataLoader:
        return self._loader(20)
