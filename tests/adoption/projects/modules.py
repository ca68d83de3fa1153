"""The idioms: ways to write a LightningModule."""

import copy
from argparse import Namespace

import pytorch_lightning as pl  # Lightning 1's name
import torch
from points import WIDTH, PointsData, Regression
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler


class Compiled(Regression):
    """A network that the module itself compiles."""

    def __init__(self, backend):
        super().__init__()
        self.network = torch.compile(self.network, backend=backend)


class WithLoaders(Regression):
    """A module that brings its data."""

    kind = "shuffled"
    train_dataloader, val_dataloader = PointsData.train_dataloader, PointsData.val_dataloader
    test_dataloader = PointsData.test_dataloader

    def __init__(self, batch_size):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size


class Partial(Regression):
    """As lightning-hydra-template's users write it: the network and half-called optimizers."""

    def __init__(self, net, optimizer, scheduler=None):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.network = net

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class FromNamespace(Regression):
    """As argparse gave them."""

    def __init__(self, **options):
        super().__init__()
        hparams = Namespace(**options)
        self.save_hyperparameters(hparams)

    def configure_optimizers(self):
        hparams = self.hparams
        return torch.optim.SGD(self.parameters(), hparams.lr, momentum=hparams.momentum)


class Scheduled(Regression):
    """Every way to give Lightning a learning rate over time."""

    def __init__(self, kind):
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        total = int(self.trainer.estimated_stepping_batches)

        def sequential():
            start = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
            rest = lr_scheduler.CosineAnnealingLR(optimizer, total - 6)
            return lr_scheduler.SequentialLR(optimizer, [start, rest], milestones=[6])

        make, options = {
            "step": (lambda: lr_scheduler.StepLR(optimizer, 3), {"frequency": 2}),
            "epoch": (lambda: lr_scheduler.ExponentialLR(optimizer, 0.5), {"interval": "epoch"}),
            "plateau": (
                lambda: plateau_of(optimizer),
                {"interval": "epoch", "monitor": "val_loss"},
            ),
            "onecycle": (lambda: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total), {}),
            "sequential": (sequential, {}),
        }[self.hparams.kind]
        schedule = {"scheduler": make(), "interval": "step", **options}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def plateau_of(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)


class ByHand(Regression):
    """What a project of two years does: a teacher that follows after each batch, a layer that is
    trained from the second epoch on, a plateau in the middle of epochs."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.network).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        taught = self.teacher(batch["x"])
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch["x"]), taught)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        parameters = zip(self.teacher.parameters(), self.network.parameters(), strict=True)
        for average, followed in parameters:
            average.data.lerp_(followed.data, 0.1)

    def on_train_epoch_start(self):
        groups = self.optimizers().param_groups
        if self.current_epoch == 1 and len(groups) == 1:
            self.optimizers().add_param_group({"params": self.network[-1].parameters()})

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        if self.trainer.state.fn == "fit":  # validated by itself, Lightning starts at step 0
            self.log("val_up_to_ten", float(min(self.global_step, 10)))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.network[:-1].parameters(), 0.1, momentum=0.9)
        schedule = {"interval": "step", "frequency": 2, "monitor": "val_loss"}
        return [optimizer], [{"scheduler": plateau_of(optimizer), **schedule}]


class GAN(pl.LightningModule):
    """A generator and a discriminator, each with an optimizer of its own, stepped by hand."""

    def __init__(self, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, noise):
        return self.generator(noise)

    def judge(self, samples, real):
        logits = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        noise = torch.randn(len(batch["x"]), 4, device=self.device)

        def step(name, optimizer, loss):
            self.toggle_optimizer(optimizer)
            loss = loss()
            self.log(name, loss, prog_bar=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

        def fooled():
            return self.judge(batch["x"], True) + self.judge(self(noise).detach(), False)

        first, second = self.optimizers()
        step("g_loss", first, lambda: self.judge(self(noise), True))
        step("d_loss", second, fooled)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.judge(batch["x"], True), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.judge(batch["x"], True), sync_dist=True)

    def configure_optimizers(self):
        optimizers = [
            torch.optim.Adam(part.parameters(), self.hparams.lr, betas=(0.5, 0.999))
            for part in (self.generator, self.discriminator)
        ]
        return optimizers, [lr_scheduler.ExponentialLR(o, 0.9) for o in optimizers]


class Contrastive(pl.LightningModule):
    """Two noisy views of each sample find each other again, over all ranks."""

    def __init__(self, temperature=0.5, beta=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4))

    def step(self, batch, stage):
        x, strength = batch["x"], 0.1 * self.training
        views = [x + strength * torch.randn_like(x) for _ in range(2)]
        codes = [F.normalize(self.encoder(view), dim=1) for view in views]
        if self.trainer.world_size > 1:
            codes = [self.all_gather(code, sync_grads=True).flatten(0, 1) for code in codes]
        likeness = codes[0] @ codes[1].T / self.hparams.temperature
        loss = F.cross_entropy(likeness, torch.arange(len(likeness)))
        self.log(f"{stage}_loss", loss, sync_dist=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val")

    def test_step(self, batch, batch_idx):
        self.step(batch, "test")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class VAE(Contrastive):
    """A variational autoencoder that shows its samples to the logger."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 4), nn.Linear(2, WIDTH)

    def step(self, batch, stage):
        mean, log_variance = self.encoder(batch["x"]).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else 0.0
        samples = self.decoder(mean + noise * (log_variance / 2).exp())
        kl = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        loss = F.mse_loss(samples, batch["x"]) + self.hparams.beta * kl
        parts = {f"{stage}_kl": kl.detach(), f"{stage}_loss": loss}
        self.log_dict(parts, sync_dist=True)
        return loss

    def on_validation_epoch_end(self):
        image = self.decoder(torch.randn(4, 2, device=self.device)).sigmoid()
        self.logger.experiment.add_image("samples", image[None], self.current_epoch)
