"""What test_drill trains; copied into a project's folder as mine.py."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((64,), index / 96), index % 2


class Net(pl.LightningModule):
    """Its dropout draws from torch's generator. `width` makes a checkpoint larger than the logs."""

    def __init__(self, width: int = 256):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.Dropout(), nn.Linear(width, 2))

    def train_dataloader(self):
        return DataLoader(Rows(), 4)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


class Forgetful(Checkpoint):
    """A broken build: its checkpoints lack the state of the generators."""

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["distdl"]["rng"] = []
