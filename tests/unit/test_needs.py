"""Methods that a task calls and the user's classes lack are reported before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel  # noqa: F401

from distdl import tasks

DATA, OPTIMIZER = "BoringDataModule", {"_target_": "torch.optim.SGD"}


class Model(LightningModule):
    def training_step(self, batch: Any) -> None: ...


class Mixin:
    def test_step(self, batch: Any) -> None: ...


class WithTest(Mixin, Model):
    def test_dataloader(self) -> None: ...


class SetsIt(Model):
    def __init__(self) -> None:
        super().__init__()
        self.test_step = self.training_step


class Trains(LightningDataModule):
    def train_dataloader(self) -> None: ...


def function() -> LightningModule:
    return LightningModule()


def lacking(task: str, model: str, data: str = "", partial: bool = False, **more: Any) -> list[str]:
    config = {"model": {"_target_": f"{__name__}.{model}", "_partial_": partial}, **more}
    if data:
        config["data"] = {"_target_": f"{__name__}.{data}"}
    context = {"refused": config.pop("refused", []), "config": {"optimizer": OPTIMIZER, **config}}
    return [problem.what for problem in getattr(tasks, task).check({}, context)]


@pytest.mark.parametrize(
    ("task", "model", "data", "lacks"),
    [
        ("train", "WithTest", DATA, []),
        ("train", "LightningModule", DATA, ["training_step"]),
        ("train", "Model", "", ["train_dataloader"]),
        ("benchmark", "LightningModule", "Trains", ["training_step"]),
        ("validate", "Model", DATA, ["validation_step"]),
        ("validate", "Model", "Trains", ["validation_step", "val_dataloader"]),
        ("test", "Model", DATA, ["test_step"]),
        ("test", "Model", "", ["test_step", "test_dataloader"]),
        ("test", "WithTest", "Trains", ["test_dataloader"]),  # the data module's counts
        ("test", "WithTest", "", []),
        ("test", "SetsIt", DATA, []),
        ("test", "function", DATA, []),
    ],
)
def test_missing_methods(task: str, model: str, data: str, lacks: list[str]) -> None:
    owners = [data if data and name.endswith("loader") else model for name in lacks]
    assert lacking(task, model, data) == [
        f"needs {name}, which {__name__}.{owner} does not define"
        for name, owner in zip(lacks, owners, strict=True)
    ]


def test_the_optimizer_comes_from_the_config_or_the_module() -> None:
    (what,) = lacking("train", "Model", "Trains", optimizer=None)
    assert what.startswith("needs configure_optimizers")
    assert not lacking("train", "BoringModel", "Trains", optimizer=None)
    # Refused and partial models are not checked.
    assert not lacking("test", "Model", refused=["model"])
    assert not lacking("test", "Model", partial=True)
