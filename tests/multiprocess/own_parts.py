"""Trainings with Lightning's own callbacks, or stepped by hand: in forks of one warm process, by
the plain Trainer, by distdl, and by distdl killed with -9 inside an epoch and resumed.

Copied into a project's folder as mine.py and run there; prints the losses of each as JSON.
"""

import functools
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as theirs
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@functools.cache
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


def in_forks(work, output, ranks, **variables):
    """The exit code of `work`, or minus the signal that ended it; the first of several ranks'."""
    pids = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for rank in map(str, range(ranks)):
        if ranks > 1:  # as torchrun has it
            variables |= {"RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_RUN_ID": "own"}
            variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        pids.append(os.fork())
        if pids[-1]:
            continue
        code = 99
        try:
            with open(output, "a") as file:
                os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
            os.environ.update(variables)
            code = work() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    first, *_ = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return first


def plainly(cls, arguments, callbacks, ranks):
    pl.seed_everything(0, verbose=False)
    module = cls(**arguments)
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    if ranks > 1:
        options |= {"devices": ranks, "strategy": "ddp_find_unused_parameters_true"}
        options |= {"use_distributed_sampler": False}
    callbacks = [getattr(theirs, name)(**values) for name, values in callbacks]
    trainer = pl.Trainer(max_epochs=3, callbacks=callbacks, accelerator="cpu", **options)
    trainer.fit(module, datamodule=Dealt() if ranks > 1 else Data())


def by_distdl(*arguments):
    from distdl.cli.main import main as command_line

    sys.argv = ["distdl", *arguments]
    return command_line(arguments)


def train(name):
    """One case: its exit codes, losses by batch, and what was printed."""
    cls, arguments, callbacks, overrides, kill = {**CASES, **MORE}[name]
    ranks, words = ranks_of(name), name.replace(" ", "_").replace(",", "")
    command = [f"model={cls.__name__.lower()}", "data=table", "optimizer=none", "schedule=none"]
    command += ["trainer.accelerator=cpu", "trainer.max_epochs=3", "trainer.log_every_n_steps=1"]
    command += ["tracking=none", "checkpoint.monitor=null", "checkpoint.every_n_steps=1"]
    command += ["experiment_name=e", *(node(*each) for each in callbacks), *overrides]
    if ranks > 1:
        command += ["strategy=ddp", "strategy.find_unused_parameters=true"]

    def run(part, work, kill=0):
        code = in_forks(work, f"{words}-{part}.log", ranks, LOSSES=f"{part}.jsonl", KILL=str(kill))
        path = Path(f"{part}.jsonl")
        losses = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        return code, losses

    distdl = functools.partial(functools.partial, by_distdl)
    plain, expected = run("plain", lambda: plainly(cls, arguments, callbacks, ranks))
    whole, losses = run("whole", distdl(*command, f"name={words}"))
    killed, before = run("killed", distdl(*command, f"name={words}-killed"), kill)
    resumed, after = run("killed", distdl("resume", f"outputs/e/{words}-killed"))
    return {
        "codes": [plain, whole, killed, resumed],
        "plain": dict(expected),
        "whole": dict(losses),
        "resumed": dict([*before, *after]),
        "first": after[0][0],
        "output": Path(f"{words}-whole.log").read_text(),
        "killed": Path(f"{words}-killed.log").read_text(),
    }


if __name__ == "__main__":
    importlib.import_module("distdl.worker.build")  # warm
    from distdl.validation import validate

    validate._ask_child = lambda request: {"problems": [], "notes": [], "facts": {}}
    print(json.dumps({name: train(name) for name in sys.argv[1:]}))
