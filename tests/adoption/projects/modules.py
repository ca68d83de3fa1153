"""The idioms: ways to write a LightningModule."""

import copy
from argparse import Namespace

import pytorch_lightning as pl  # Lightning 1's name
import torch
from points import WIDTH, PointsData
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler


class Steps(pl.LightningModule):
    """One loss of a batch, in training, validation and test."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(trained, 0.05)


def network():
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1)
    )


class Regression(Steps):
    """What many a project starts from: one network, one loss, `self.log`."""

    def __init__(self):
        super().__init__()
        self.network = network()

    @property
    def backbone(self):
        return self.network[:3]

    def forward(self, x):
        return self.network(x)

    def loss(self, batch):
        return F.mse_loss(self(batch["x"]), batch["y"])


class Complete(Regression):
    """A module that brings its data, and compiles its network itself."""

    kind = "subclass"
    train_dataloader = PointsData.train_dataloader
    val_dataloader = PointsData.val_dataloader
    test_dataloader = PointsData.test_dataloader

    def __init__(self, batch_size):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.network = torch.compile(self.network, backend="aot_eager")


class Partial(Regression):
    """The network and half-called optimizers; `options` are Lightning's, of a schedule."""

    def __init__(self, net, optimizer, scheduler, **options):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.network = net
        self.options = options

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.parameters())
        schedule = {"scheduler": self.hparams.scheduler(optimizer=optimizer), **self.options}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def sequential(optimizer):
    start = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
    rest = lr_scheduler.CosineAnnealingLR(optimizer, 18)
    return lr_scheduler.SequentialLR(optimizer, [start, rest], milestones=[6])


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

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.network[:-1].parameters(), 0.1, momentum=0.9)
        schedule = {"interval": "step", "frequency": 2, "monitor": "val_loss"}
        return [optimizer], [{"scheduler": plateau_of(optimizer), **schedule}]


class Averaged(Regression):
    """Logs the mean loss of each epoch of training, too."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Skipping(Averaged):
    """Leaves out every third batch of an epoch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class SkippingByHand(Skipping):
    """The same for several ranks, on which Lightning refuses None otherwise."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss is not None:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()


class SeveralSchedules(Regression):
    """One that moves momentum too after each step, one after each third, one after each epoch."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.02, momentum=0.9)
        cycle = lr_scheduler.CyclicLR(optimizer, 0.01, 0.05, step_size_up=5)
        restarts = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3)
        epochs = lr_scheduler.MultiStepLR(optimizer, [1, 2])
        schedules = [
            {"scheduler": cycle, "interval": "step"},
            {"scheduler": restarts, "interval": "step", "frequency": 3},
            {"scheduler": epochs, "interval": "epoch"},
        ]
        return [optimizer], schedules


class AccumulatingByHand(Regression):
    """Two optimizers, of which one steps after two batches and the other after three, whatever the
    epoch, each with a schedule of its steps."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("batches", torch.tensor(0))

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.batches += 1
        for every, optimizer, schedule in zip(
            (2, 3), self.optimizers(), self.lr_schedulers(), strict=True
        ):
            if self.batches % every == 0:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.network[:3].parameters(), 0.01)
        second = torch.optim.SGD(self.network[3:].parameters(), 0.05, momentum=0.9)
        return [first, second], [lr_scheduler.ExponentialLR(o, 0.9) for o in (first, second)]


class GAN(Steps):
    """A generator and a discriminator, each with an optimizer and a schedule of its own, stepped by
    hand, the discriminator at each second batch only. Its arguments are as argparse gives them."""

    def __init__(self, **options):
        super().__init__()
        hparams = Namespace(lr=0.01, **options)
        self.save_hyperparameters(hparams)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

    def judge(self, samples, real):
        logits = self.discriminator(samples)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def loss(self, batch):
        return self.judge(batch["x"], True)

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
            return self.loss(batch) + self.judge(self.generator(noise).detach(), False)

        first, second = self.optimizers()
        step("g_loss", first, lambda: self.judge(self.generator(noise), True))
        if batch_idx % 2 == 0:
            step("d_loss", second, fooled)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        lr = self.hparams.lr
        first = torch.optim.Adam(self.generator.parameters(), lr, betas=(0.5, 0.999))
        second = torch.optim.SGD(self.discriminator.parameters(), 2 * lr, momentum=0.9)
        return [first, second], [lr_scheduler.ExponentialLR(o, 0.5) for o in (first, second)]


class Contrastive(Steps):
    """Two noisy views of each sample find each other again, over all ranks."""

    def __init__(self, temperature=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 4))

    def loss(self, batch):
        x = batch["x"]
        strength = 0.1 * self.training
        views = [x + strength * torch.randn_like(x) for _ in range(2)]
        codes = [F.normalize(self.encoder(view), dim=1) for view in views]
        if self.trainer.world_size > 1:
            codes = [self.all_gather(code, sync_grads=True).flatten(0, 1) for code in codes]
        likeness = codes[0] @ codes[1].T / self.hparams.temperature
        return F.cross_entropy(likeness, torch.arange(len(likeness)))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class VAE(Steps):
    """A variational autoencoder that shows its samples to the logger."""

    def __init__(self, beta=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Linear(WIDTH, 4)
        self.decoder = nn.Linear(2, WIDTH)

    def loss(self, batch):
        mean, log_variance = self.encoder(batch["x"]).chunk(2, dim=1)
        noise = torch.randn_like(mean) if self.training else 0.0
        samples = self.decoder(mean + noise * (log_variance / 2).exp())
        kl = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        self.log("kl", kl.detach(), sync_dist=True)
        return F.mse_loss(samples, batch["x"]) + self.hparams.beta * kl

    def on_validation_epoch_end(self):
        image = self.decoder(torch.randn(4, 2, device=self.device)).sigmoid()
        self.logger.experiment.add_image("samples", image[None], self.current_epoch)


class Throughput(pl.callbacks.ThroughputMonitor):
    def __init__(self):
        super().__init__(batch_size_fn=lambda batch: len(batch["id"]))
