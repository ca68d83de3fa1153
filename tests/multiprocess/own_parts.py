"""Trainings with Lightning's own callbacks, or stepped by hand: in forks of one warm process, by
the plain Trainer, by distdl, and by distdl killed with -9 inside an epoch and gone on with.

Copied into a project's folder as mine.py and run there; prints the losses of each as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as theirs
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

THEIRS = "lightning.pytorch.callbacks"


def table(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 6, generator=draw)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(table(48), 4)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(table(8), 4)


class Dealt(Data):
    """In turns, as distdl deals what is not shuffled: Lightning itself would shuffle it."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(table(48), 4, sampler=DistributedSampler(table(48), shuffle=False))


class Small(pl.LightningModule):
    """Writes each batch's losses into $LOSSES, and kills itself in batch $KILL."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        between = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.backbone = nn.Sequential(nn.Linear(6, 8), between, nn.Linear(8, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(inputs))

    def loss(self, batch: Any) -> torch.Tensor:
        return ((self(batch[0]) - batch[1]) ** 2).mean()

    def record(self, *losses: torch.Tensor) -> None:
        """The losses of a batch, the mean over the ranks."""
        number = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if self.trainer.world_size > 1:
            losses = tuple(self.trainer.strategy.reduce(loss.clone()) for loss in losses)
        if not self.trainer.is_global_zero:
            return
        with open(os.environ["LOSSES"], "a") as file:
            file.write(json.dumps([number, *map(float, losses)]) + "\n")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.record(loss.detach())
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_progress.total.ready == int(os.environ["KILL"]):
            for thread in threading.enumerate():
                if thread.name.endswith(".ckpt"):  # what is saved is published first
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


class ByHand(Small):
    """Two optimizers and schedules; one steps at each second batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
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

    def configure_optimizers(self) -> Any:
        one = torch.optim.Adam([*self.backbone.parameters(), *self.head.parameters()], lr=0.05)
        other = torch.optim.SGD(self.critic.parameters(), lr=0.02, momentum=0.9)
        step = torch.optim.lr_scheduler.StepLR
        return [one, other], [step(one, 1, 0.5), step(other, 1, 0.9)]


def node(name: str, **arguments: Any) -> str:
    """`+callbacks.<name>=...` of one of Lightning's."""
    values = "".join(f", {key}: {value}" for key, value in arguments.items())
    return f"+callbacks.{name}={{_target_: {THEIRS}.{name}{values}}}"


def together() -> list[Any]:
    return [
        theirs.GradientAccumulationScheduler({0: 2, 1: 3}),
        theirs.BackboneFinetuning(1),
        theirs.EarlyStopping("val_loss", patience=1, min_delta=10.0),
    ]


class Throughput(theirs.ThroughputMonitor):
    def __init__(self) -> None:
        super().__init__(batch_size_fn=len)


def beside() -> list[Any]:
    stop = theirs.EarlyStopping("val_loss", patience=1, min_delta=10.0)
    return [theirs.GradientAccumulationScheduler({0: 2, 1: 3}), stop]


def swa() -> list[Any]:
    return [theirs.StochasticWeightAveraging(0.01, swa_epoch_start=2)]


SWA = node("StochasticWeightAveraging", swa_lrs=0.01, swa_epoch_start=2)
# name -> (class, overrides, callbacks of the plain Trainer, killed in this batch)
CASES: dict[str, tuple[str, list[str], Callable[[], list[Any]], int]] = {
    "together": (
        "Small",
        [
            node("GradientAccumulationScheduler", scheduling="{0: 2, 1: 3}"),
            node("BackboneFinetuning", unfreeze_backbone_at_epoch=1),
            node("EarlyStopping", monitor="val_loss", patience=1, min_delta=10),
            node("LearningRateMonitor"),
            node("RichProgressBar"),
            node("DeviceStatsMonitor"),
            "callbacks.gone=null",
            "trainer.max_time={_target_: datetime.timedelta, hours: 1}",
            "+trainer.profiler={_target_: lightning.pytorch.profilers.SimpleProfiler}",
        ],
        together,
        20,
    ),
    "swa": ("Small", [SWA, "+model.norm=true"], swa, 18),
    "by hand": ("ByHand", ["checkpoint.every_n_steps=5"], list, 17),
}
MORE = {
    "beside, two ranks": (
        "Small",
        [
            node("GradientAccumulationScheduler", scheduling="{0: 2, 1: 3}"),
            node("EarlyStopping", monitor="val_loss", patience=1, min_delta=10),
            node("LearningRateMonitor"),
            node("DeviceStatsMonitor"),
            node("TQDMProgressBar"),
            node("ModelSummary"),
            node("Timer", duration="{hours: 1}"),
            "+callbacks.speed={_target_: mine.Throughput}",
            "tracking=csv",
        ],
        beside,
        11,
    ),
    "swa, two ranks": ("Small", [SWA], swa, 16),
    "by hand, two ranks": ("ByHand", ["checkpoint.every_n_steps=5"], list, 12),
    "swa, plain": ("Small", [SWA], swa, 30),
    "ema": (
        "Small",
        [node("EMAWeightAveraging", decay=0.5)],
        lambda: [theirs.EMAWeightAveraging(decay=0.5)],
        18,
    ),
}


def in_forks(work: Callable[[], int | None], output: str, ranks: int, **variables: str) -> int:
    """The exit code of `work`, or minus the signal that ended it; the first of several ranks'."""
    pids = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for rank in range(ranks):
        if ranks > 1:  # as torchrun has it
            variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
            variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            variables |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "own"}
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
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return codes[0]


def plainly(
    cls: str, callbacks: Callable[[], list[Any]], arguments: dict[str, Any], ranks: int
) -> None:
    pl.seed_everything(0, verbose=False)
    module = globals()[cls](**arguments)
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    several = {"devices": ranks, "strategy": "ddp_find_unused_parameters_true"}
    off |= {**several, "use_distributed_sampler": False} if ranks > 1 else {}
    trainer = pl.Trainer(max_epochs=3, callbacks=callbacks(), accelerator="cpu", **off)
    trainer.fit(module, datamodule=Dealt() if ranks > 1 else Data())


def by_distdl(*arguments: str) -> int:
    from distdl.cli.main import main as command_line

    sys.argv = ["distdl", *arguments]
    return command_line(arguments)


def tried(name: str) -> dict[str, Any]:
    """One case: its exit codes, losses by batch, and what was printed."""
    cls, overrides, callbacks, kill = {**CASES, **MORE}[name]
    words = name.replace(" ", "_").replace(",", "")
    command = [f"model={cls.lower()}", "data=table", "optimizer=none", "schedule=none"]
    command += ["trainer.accelerator=cpu", "trainer.max_epochs=3", "trainer.log_every_n_steps=1"]
    command += ["tracking=none", "checkpoint.monitor=null", "checkpoint.every_n_steps=1"]
    command += ["experiment_name=e", *overrides]
    ranks = 2 if name.endswith("two ranks") else 1
    if ranks > 1:
        command += ["strategy=ddp", "strategy.find_unused_parameters=true"]
    given = {"norm": True} if "+model.norm=true" in overrides else {}
    run = f"outputs/e/{words}-killed"
    files = {part: f"{words}-{part}" for part in ("plain", "whole", "killed")}

    def going(part: str, *arguments: str, kill: int = 0) -> int:
        variables = {"LOSSES": f"{files[part]}.jsonl", "KILL": str(kill)}

        def work() -> int | None:
            return by_distdl(*arguments) if arguments else plainly(cls, callbacks, given, ranks)

        return in_forks(work, f"{files[part]}.log", ranks, **variables)

    codes = [going("plain"), going("whole", *command, f"name={words}")]
    codes += [going("killed", *command, f"name={words}-killed", kill=kill)]
    before = lines(files["killed"])
    codes += [going("killed", "resume", run)]
    after = lines(files["killed"])[len(before) :]
    return {
        "codes": codes,
        "plain": dict(lines(files["plain"])),
        "whole": dict(lines(files["whole"])),
        "resumed": dict([*before, *after]),
        "first": after[0][0] if after else None,
        "output": Path(f"{files['whole']}.log").read_text(),
        "killed": Path(f"{files['killed']}.log").read_text(),
    }


def lines(name: str) -> list[tuple[str, list[float]]]:
    path = Path(f"{name}.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [(str(number), losses) for number, *losses in found]


if __name__ == "__main__":
    importlib.import_module("distdl.worker.build")  # warm
    from distdl.validation import validate

    validate._ask_child = lambda request: {"problems": [], "notes": [], "facts": {}}
    print(json.dumps({name: tried(name) for name in sys.argv[1:]}))
