"""What test_signals and the runs under Slurm train; copied into a project's folder as mine.py.

Data and loader are the project's own, as a user writes them: a worker process, a worker_init_fn, a
thread and a program in each worker. Dropout draws from the generators that a checkpoint must keep.
"""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

AT = 4  # the step in which the last rank is killed, once, if asked to
RANK = int(os.environ.get("RANK", 0))
LAST = int(os.environ.get("WORLD_SIZE", 1)) - 1


class Rows(Dataset):
    def __init__(self, rows: int, pause: float) -> None:
        self.rows = rows
        self.pause = pause

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int):
        time.sleep(self.pause)
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return row + 0.01 * torch.randn(8), row.sum(0, keepdim=True)


def begin(worker: int) -> None:
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    sleeper = subprocess.Popen(["sleep", "3600"])
    sleeper.terminate()  # a program that a worker starts obeys as always
    assert sleeper.wait(30) == -signal.SIGTERM


class Data(pl.LightningDataModule):
    def __init__(self, rows: int = 480, pause: float = 0.01, start: str = "fork") -> None:
        super().__init__()
        self.rows = rows
        self.pause = pause
        self.start = start

    def train_dataloader(self):
        more = {"num_workers": 1, "multiprocessing_context": self.start, "worker_init_fn": begin}
        return DataLoader(Rows(self.rows, self.pause), 4, shuffle=True, **more)


class Net(pl.LightningModule):
    def __init__(self, kill: bool = False) -> None:
        super().__init__()
        self.kill = kill
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        if self.kill and RANK == LAST and self.global_step == AT and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with Path(f"steps-{RANK}").open("a", encoding="utf-8") as file:
            file.write(f"{self.global_step}\n")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
