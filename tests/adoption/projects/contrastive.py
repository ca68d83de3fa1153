"""Two noisy views of each sample find each other again; written for Lightning 1's name."""

import pytorch_lightning as pl
import torch
from torch import Tensor, nn


class Contrastive(pl.LightningModule):
    def __init__(self, temperature: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        x, strength = batch["x"], 0.1 * self.training
        views = [x + strength * torch.randn_like(x) for _ in range(2)]
        codes = [nn.functional.normalize(self.encoder(view), dim=1) for view in views]
        if self.trainer.world_size > 1:
            codes = [self.all_gather(code, sync_grads=True).flatten(0, 1) for code in codes]
        likeness = codes[0] @ codes[1].T / self.hparams.temperature
        loss = nn.functional.cross_entropy(likeness, torch.arange(len(likeness)))
        self.log(f"{stage}_loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.step(batch, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)
