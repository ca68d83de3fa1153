"""A generator and a discriminator, each with an optimizer of its own, stepped by hand."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

LATENT, WIDTH = 4, 8


class GAN(LightningModule):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def judge(self, samples: Tensor, real: bool) -> Tensor:
        said = self.discriminator(samples)
        return nn.functional.binary_cross_entropy_with_logits(
            said, torch.full_like(said, float(real))
        )

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        noise = torch.randn(len(batch["x"]), LATENT, device=self.device)

        self.toggle_optimizer(first)
        loss = self.judge(self(noise), real=True)
        self.log("g_loss", loss, prog_bar=True)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        loss = self.judge(batch["x"], real=True) + self.judge(self(noise).detach(), real=False)
        self.log("d_loss", loss, prog_bar=True)
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.judge(batch["x"], real=True), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.judge(batch["x"], real=True), sync_dist=True)

    def configure_optimizers(self) -> tuple[list, list]:
        optimizers = [
            torch.optim.Adam(each.parameters(), self.hparams.lr, betas=(0.5, 0.999))
            for each in (self.generator, self.discriminator)
        ]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]
