"""A variational autoencoder that shows its samples to the logger."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

LATENT, WIDTH = 2, 8


class VAE(LightningModule):
    def __init__(self, beta: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Linear(WIDTH, 2 * LATENT)
        self.decoder = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, WIDTH))

    def step(self, batch: dict[str, Tensor], stage: str) -> Tensor:
        mean, log_variance = self.encoder(batch["x"]).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else 0.0
        code = mean + noise * (log_variance / 2).exp()
        parts = {
            "reconstruction": nn.functional.mse_loss(self.decoder(code), batch["x"]),
            "kl": (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2,
        }
        loss = parts["reconstruction"] + self.hparams.beta * parts["kl"]
        self.log_dict({f"{stage}_{k}": v.detach() for k, v in parts.items()}, sync_dist=True)
        self.log(f"{stage}_loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.step(batch, "train")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.step(batch, "val")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.step(batch, "test")

    def on_validation_epoch_end(self) -> None:
        samples = self.decoder(torch.randn(4, LATENT, device=self.device))
        image = samples.sigmoid().reshape(1, 4, WIDTH)
        self.logger.experiment.add_image("samples", image, self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.01)
