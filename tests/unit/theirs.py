"""A project that knows nothing of distdl: also imported by a Python that may not know it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(LightningModule):
    def __init__(self, width=4, kind="adam", compiled=False, lr=0.01, decay=0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.layers: Any = torch.compile(layers, backend="eager") if compiled else layers
        self.kind, self.lr, self.decay = kind, lr, decay
        self.automatic_optimization = kind not in ("two", "uneven")

    def _loss(self, batch: list[Tensor]) -> Tensor:
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        # For a OneCycleLR, say. Lightning makes the training loader now.
        assert self.trainer.estimated_stepping_batches
        first, last = list(self.parameters())[:2], list(self.parameters())[2:]
        groups: list[Any] = [{"params": first}, {"params": last}]
        adam, sgd = torch.optim.Adam, torch.optim.SGD
        if self.kind in ("two", "uneven"):
            uneven = [{"params": [each]} for each in last]
            return adam(first, 0.01), adam(uneven if self.kind == "uneven" else last, 0.01)
        if self.kind == "sgd":
            return sgd(first + last, 0.01, 0.9)
        if self.kind == "bare":
            return adam(first + last, self.lr)
        rates: dict[str, Any] = {"lr": self.lr, "weight_decay": self.decay}
        optimizer = adam(groups if self.kind == "halves" else first + last, **rates)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Given(LightningModule):
    """Is given what it trains with."""

    def __init__(self, optimizer: Callable[..., Any], args: Namespace) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Linear(2, args.width)
        self.make = optimizer

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Data(LightningDataModule):
    def _loader(self, rows: int, **more: Any) -> DataLoader[Any]:
        points = torch.linspace(-1, 1, 2 * rows).reshape(rows, 2)
        return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), 4, **more)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(16)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(8)

    def test_dataloader(self) -> list[DataLoader[Any]]:
        return [self._loader(8), self._loader(4)]
