"""What test_hangs trains; copied into a project's folder as mine.py. One rank does what $FAULT
names in step AT, and notes the time. The line at which it does so ends with the fault's name."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

AT, ROWS, EPOCH = 20, 8, 60  # step, samples of a rank's batch, steps of an epoch
PAUSE_S = 6.0  # longer than the timeout, and than what it takes to act on it
FAULTS = os.environ.get("FAULT", "").split()
RANK = int(os.environ.get("RANK", 0))


def chosen(name, rank=1):
    """Whether this rank has the fault; notes the time if so."""
    if name not in FAULTS or rank != RANK:
        return False
    Path(f"began-{os.getpid()}").write_text(str(time.time()), encoding="utf-8")
    return True


def loop():
    count = 0
    while True:  # loop
        count += 1  # loop


def deadlock():
    lock = threading.Lock()
    with lock:
        lock.acquire()  # lock


def exhaust_memory():
    """In a control group with little memory, together with the rank's monitor."""
    for process in (psutil.Process(), *psutil.Process().children()):
        Path(os.environ["GROUP"], "cgroup.procs").write_text(str(process.pid), encoding="utf-8")
    pages = []
    while True:
        pages.append(b"x" * (1 << 22))


def compute():
    """Works for PAUSE_S."""
    end = time.monotonic() + PAUSE_S
    while time.monotonic() < end:
        torch.ones(100, 100).sum()


def compile_slowly(graph, inputs):
    """A compiler of torch.compile."""
    if chosen("compile"):
        compute()
    return graph.forward


class Rows(Dataset):
    def __len__(self):
        return 2 * ROWS * EPOCH

    def __getitem__(self, index):
        if index == 0 and chosen("first"):
            time.sleep(PAUSE_S)
        if index >= (2 * AT + 1) * ROWS and chosen("worker"):
            asks, _silent = socket.socketpair()
            asks.recv(1)  # worker
        return torch.full((8,), index / len(self)), index % 2


class Stream(IterableDataset):
    """Rank 1 has fewer batches."""

    shards_itself = True

    def __iter__(self):
        batch = torch.ones(ROWS, 8), torch.ones(ROWS, dtype=torch.int64)
        yield from [batch] * (AT if RANK else EPOCH)
        chosen("uneven")


class Net(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))
        if "compile" in FAULTS:
            self.layers.compile(backend=compile_slowly)

    def prepare_data(self):
        if chosen("prepare", 0):
            time.sleep(PAUSE_S)

    def train_dataloader(self):
        if "uneven" in FAULTS:
            return DataLoader(Stream(), None)
        if "refused" in FAULTS:
            return DataLoader([(torch.ones(8), 1)] * (3 - RANK), 1)
        return DataLoader(
            Rows(), ROWS, num_workers=2 if {"worker", "stopped-worker"} & {*FAULTS} else 0
        )

    def val_dataloader(self):
        uneven = DataLoader([0] * (3 - RANK), 1)
        return uneven if "validation" in FAULTS or "debugger" in FAULTS else []

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        if chosen("validation", 0):
            compute()

    def training_step(self, batch, batch_idx):
        if self.global_step == AT:
            self.misbehave(batch_idx)
        if "steady" in FAULTS:
            time.sleep(0.3)
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def misbehave(self, batch_idx):
        for name, act in (("loop", loop), ("lock", deadlock), ("memory", exhaust_memory)):
            if chosen(name):
                act()
        if chosen("stop") or chosen("terminal", RANK):
            os.kill(os.getpid(), signal.SIGSTOP)
        if "slow" in FAULTS and RANK:
            if batch_idx % 5 == 0:  # trainer.accumulate_grad_batches=5
                chosen("slow")
            time.sleep(PAUSE_S / 5)  # slow
        if "shape" in FAULTS:
            distributed.all_reduce(torch.ones(7 if chosen("shape") else 5))  # shape
        if chosen("log"):
            self.log("alone", 1.0, sync_dist=True)  # log
        if chosen("lone-checkpoint"):
            self.trainer.save_checkpoint("alone.ckpt")  # lone-checkpoint
        if chosen("stopped-worker"):
            for child in psutil.Process().children():
                if "monitor" not in " ".join(child.cmdline()):
                    child.suspend()
        if "skip" in FAULTS and not chosen("skip"):
            distributed.all_reduce(torch.ones(5))  # skip
        if chosen("asleep"):
            time.sleep(PAUSE_S)  # asleep
        chosen("host", 0)
        if chosen("debugger", 0):
            breakpoint()

    def on_save_checkpoint(self, checkpoint):
        if self.global_step == AT:
            chosen("disk", 0)
            if chosen("checkpoint", 0):
                compute()

    def on_fit_end(self):
        if chosen("end"):
            time.sleep(PAUSE_S)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Watcher(pl.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == AT and chosen("raise"):
            raise ValueError("bad weather")  # raise
