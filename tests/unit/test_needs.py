"""What a task calls and the user's classes do not define is said before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule

from distdl import tasks


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


def made() -> LightningModule:
    return LightningModule()


def said(task: str, **more: Any) -> list[str]:
    nodes = {key: {"_target_": f"{__name__}.{name}"} for key, name in more.items() if name}
    nodes["optimizer"] = {"_target_": "torch.optim.SGD"}
    context = {"refused": [], "config": nodes}
    found = getattr(tasks, task).check({}, context)
    return [problem.what for problem in found]


@pytest.mark.parametrize(
    ("task", "model", "data", "lacks"),
    [
        ("train", "WithTest", "BoringDataModule", []),
        ("train", "LightningModule", "BoringDataModule", ["training_step"]),
        ("train", "Model", None, ["train_dataloader"]),
        ("benchmark", "LightningModule", "Trains", ["training_step"]),
        ("validate", "Model", "BoringDataModule", ["validation_step"]),
        ("validate", "Model", "Trains", ["validation_step", "val_dataloader"]),
        ("test", "Model", "BoringDataModule", ["test_step"]),
        ("test", "Model", None, ["test_step", "test_dataloader"]),
        ("test", "WithTest", "Trains", ["test_dataloader"]),  # the module's own is not asked for
        ("test", "WithTest", None, []),
        ("test", "SetsIt", "BoringDataModule", []),
        ("test", "made", "BoringDataModule", []),
    ],
)
def test_what_is_not_defined_is_named(
    task: str, model: str, data: str | None, lacks: list[str]
) -> None:
    owners = [data if data and name.endswith("loader") else model for name in lacks]
    assert said(task, model=model, data=data) == [
        f"needs {name}, which {__name__}.{owner} does not define"
        for name, owner in zip(lacks, owners, strict=True)
    ]


def test_somebody_makes_the_optimizer() -> None:
    node = {"_target_": f"{__name__}.Model"}
    config = {"model": node, "data": {"_target_": f"{__name__}.Trains"}, "optimizer": None}
    context = {"refused": [], "config": config}
    (problem,) = tasks.train.check({}, context)  # type: ignore[attr-defined]
    assert problem.what == f"needs configure_optimizers, which {__name__}.Model does not define"
    assert problem.remedy == "define it, or choose one: optimizer=sgd"
    node["_target_"] = "lightning.pytorch.demos.boring_classes.BoringModel"
    assert not list(tasks.train.check({}, context))  # type: ignore[attr-defined]


def test_what_could_not_be_imported_or_is_partial_is_left_alone() -> None:
    node = {"_target_": f"{__name__}.Model"}
    context = {"refused": ["model"], "config": {"model": node}}
    assert not list(tasks.test.check({}, context))  # type: ignore[attr-defined]
    context = {"refused": [], "config": {"model": {**node, "_partial_": True}}}
    assert not list(tasks.test.check({}, context))  # type: ignore[attr-defined]


assert BoringDataModule  # named by `_target_`
