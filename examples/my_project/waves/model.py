"""A module with its own loss and optimizer, and Lightning's logging."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Forecaster(LightningModule):
    """Predicts the next value of a window of `window` values."""

    def __init__(self, window: int = 32, hidden: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.network = nn.Sequential(nn.Linear(window, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss("train", batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._loss("val", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    def _loss(self, stage: str, batch: tuple[Tensor, Tensor]) -> Tensor:
        window, target = batch
        loss = nn.functional.mse_loss(self.network(window).squeeze(1), target)
        self.log(f"{stage}/mse", loss, sync_dist=stage == "val", batch_size=len(target))
        return loss
