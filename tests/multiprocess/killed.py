"""What test_self_healing trains; copied into a project's folder as mine.py. The last rank is killed
with -9 in step AT of the first attempt. Each rank notes which process started it."""

import os
import signal
import time
from pathlib import Path

import lightning.pytorch as pl
import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

AT, STEPS, ROWS, RANKS = 7, 12, 4, 2
RANK = int(os.environ.get("RANK", 0))
LAST = int(os.environ.get("WORLD_SIZE", 1)) - 1


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        rows = torch.randn(RANKS * ROWS * STEPS, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), ROWS, shuffle=True)


class Net(pl.LightningModule):
    def __init__(self, kill: str) -> None:
        super().__init__()
        self.kill = kill  # "": nothing; "rank"; "both": the standby process before
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def on_train_start(self):
        parent = psutil.Process().parent()
        Path(f"started-{self.global_step}-{RANK}").write_text(
            " ".join(parent.cmdline()), encoding="utf-8"
        )
        Path(f"threads-{self.global_step}-{RANK}").write_text(
            str(parent.num_threads()), encoding="utf-8"
        )

    def training_step(self, batch, batch_idx):
        if self.kill and RANK == LAST and self.global_step == AT and not Path("killed").exists():
            Path("killed").write_text(str(time.time()), encoding="utf-8")
            for process in psutil.Process().parent().children() if self.kill == "both" else ():
                if "distdl.agent.standby" in process.cmdline():
                    process.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step == AT + 1:  # the first step that was not done before
            Path(f"healed-{RANK}").write_text(str(time.time()), encoding="utf-8")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)
