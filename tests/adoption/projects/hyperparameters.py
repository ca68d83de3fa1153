"""Hyperparameters that are no plain values: a partial optimizer, a Namespace."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from points import Regression
from torch import nn


class Partial(Regression):
    """As lightning-hydra-template's users write it: the network and half-called optimizers."""

    def __init__(self, net: nn.Module, optimizer: Callable, scheduler: Callable | None = None):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.network = net

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(params=self.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler}}


class FromNamespace(Regression):
    """As argparse gave them."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        hparams = Namespace(**given)
        self.save_hyperparameters(hparams)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        hparams = self.hparams
        return torch.optim.SGD(self.parameters(), hparams.lr, momentum=hparams.momentum)
