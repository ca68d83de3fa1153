"""Data and a network that the projects share: points, each with its number."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

COUNT, WIDTH = 32, 8


class Points(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = COUNT, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True).tanh()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int | list[int]) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index], "id": torch.tensor(index)}


class PointsData(LightningDataModule):
    def __init__(self, batch_size: int = 4, shuffle: bool = False) -> None:
        super().__init__()
        self.batch_size, self.shuffle = batch_size, shuffle

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Points(), self.batch_size, shuffle=self.shuffle)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Points(10, seed=2), 4)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(Points(6, seed=3), 4)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)
    )


class Regression(LightningModule):
    """What many a project starts from: one network, one loss, `self.log`."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.network = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.mse_loss(self(batch["x"]), batch["y"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.lr)
