"""What test_own_parts trains; copied into a project's folder as mine.py."""

import json
import os
import signal
import sys
import threading

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as theirs
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def table(count):
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(count))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(table(48), 4)

    def val_dataloader(self):
        return DataLoader(table(8), 4)


class Dealt(Data):
    """In turns, as distdl deals what is not shuffled: Lightning itself would shuffle it."""

    def train_dataloader(self):
        return DataLoader(table(48), 4, sampler=DistributedSampler(table(48), shuffle=False))


class Small(pl.LightningModule):
    """Writes each batch's losses into $LOSSES, and kills itself in batch $KILL."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        between = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.backbone = nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs):
        return self.head(self.backbone(inputs))

    def loss(self, batch):
        return ((self(batch[0]) - batch[1]) ** 2).mean()

    @property
    def batches(self):
        return self.trainer.fit_loop.epoch_loop.batch_progress.total.ready

    def record(self, loss):
        """The loss of a batch, the mean over the ranks."""
        if self.trainer.world_size > 1:
            loss = self.trainer.strategy.reduce(loss.clone())
        if self.trainer.is_global_zero:
            with open(os.environ["LOSSES"], "a") as file:
                print(json.dumps([str(self.batches), float(loss)]), file=file)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.record(loss.detach())
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        if self.batches == int(os.environ["KILL"]):
            for thread in threading.enumerate():
                if thread.name.endswith(".ckpt"):  # what is saved is published first
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class ByHand(Small):
    """Two optimizers and schedules; one steps at each second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        one, other = self.optimizers()
        answer = self(batch[0])
        loss = ((answer - batch[1]) ** 2).mean()
        self.manual_backward(loss)
        if batch_idx % 2:
            one.step()
            one.zero_grad()
            critic = (self.critic(answer.detach()) - batch[1]).square().mean()
            other.zero_grad()
            self.manual_backward(critic)
            other.step()
            self.log("d_loss", critic)
        self.record(loss.detach())
        self.log("g_loss", loss)
        if self.trainer.is_last_batch:
            for schedule in self.lr_schedulers():
                schedule.step()

    def configure_optimizers(self):
        one = torch.optim.Adam([*self.backbone.parameters(), *self.head.parameters()], lr=0.05)
        other = torch.optim.SGD(self.critic.parameters(), lr=0.02, momentum=0.9)
        step = torch.optim.lr_scheduler.StepLR
        return [one, other], [step(one, 1, 0.5), step(other, 1, 0.9)]


class Throughput(theirs.ThroughputMonitor):
    def __init__(self) -> None:
        super().__init__(batch_size_fn=len)


# Lightning's callbacks with their arguments. The first of a case are also the plain Trainer's.
ACCUMULATE = ("GradientAccumulationScheduler", {"scheduling": {0: 2, 1: 3}})
STOP = ("EarlyStopping", {"monitor": "val_loss", "patience": 1, "min_delta": 10.0})
UNFREEZE = ("BackboneFinetuning", {"unfreeze_backbone_at_epoch": 1})
SWA = ("StochasticWeightAveraging", {"swa_lrs": 0.01, "swa_epoch_start": 2})
EMA = ("EMAWeightAveraging", {"decay": 0.5})
OFTEN = ["checkpoint.every_n_steps=5"]


def nodes(*names, **more):
    """`+callbacks.<name>=...` of Lightning's."""
    return [node(name, more.get(name, {})) for name in (*names, *more)]


def node(name, arguments):
    values = {"_target_": f"lightning.pytorch.callbacks.{name}", **arguments}
    return f"+callbacks.{name}={json.dumps(values).replace(chr(34), '')}"


# name -> (class, its arguments, callbacks of both, overrides, killed in this batch)
CASES = {
    "together": (
        *(Small, {}, [ACCUMULATE, UNFREEZE, STOP]),
        [
            *nodes("LearningRateMonitor", "RichProgressBar", "DeviceStatsMonitor"),
            *("callbacks.gone=null", "trainer.max_time={_target_: datetime.timedelta, hours: 1}"),
            "+trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler}",
        ],
        20,
    ),
    "swa": (Small, {"norm": True}, [SWA], ["+model.norm=true"], 18),
    "by hand": (ByHand, {}, [], OFTEN, 17),
}
MORE = {
    "beside, two ranks": (
        *(Small, {}, [ACCUMULATE, STOP]),
        [
            *nodes("LearningRateMonitor", "DeviceStatsMonitor", "TQDMProgressBar", "ModelSummary"),
            *nodes(Timer={"duration": {"hours": 1}}),
            *("+callbacks.speed={_target_: mine.Throughput}", "tracking=csv"),
        ],
        11,
    ),
    "swa, two ranks": (Small, {}, [SWA], [], 16),
    "by hand, two ranks": (ByHand, {}, [], OFTEN, 12),
    "swa, plain": (Small, {}, [SWA], [], 30),
    "ema": (Small, {}, [EMA], [], 18),
}


def ranks_of(name):
    return 2 if name.endswith("two ranks") else 1


def main(name):
    """The plain Trainer's training of a case; Lightning itself starts the second of two ranks."""
    cls, arguments, callbacks, *_ = {**CASES, **MORE}[name]
    pl.seed_everything(0, verbose=False)
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    if ranks_of(name) > 1:
        options |= {"devices": 2, "strategy": "ddp_find_unused_parameters_true"}
        options |= {"use_distributed_sampler": False}
    callbacks = [getattr(theirs, each)(**values) for each, values in callbacks]
    trainer = pl.Trainer(max_epochs=3, callbacks=callbacks, accelerator="cpu", **options)
    trainer.fit(cls(**arguments), datamodule=Dealt() if ranks_of(name) > 1 else Data())


if __name__ == "__main__":
    main(sys.argv[1])
