"""Methods that a task calls and the user's classes lack are reported before anything starts."""

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel  # noqa: F401

from distdl import tasks


class Empty(LightningDataModule): ...


DATA, OPTIMIZER = "BoringDataModule", {"_target_": "torch.optim.SGD"}


class Model(LightningModule):
    def training_step(self, batch): ...


class WithTest(Model):
    def test_step(self, batch): ...
    def test_dataloader(self): ...


class SetsIt(Model):
    def __init__(self):
        super().__init__()
        self.test_step = self.training_step


def function() -> LightningModule:
    return LightningModule()


@pytest.mark.parametrize(
    ("task", "model", "data", "lacks", "more"),
    [
        ("train", "WithTest", DATA, "", {}),
        ("train", "LightningModule", DATA, "training_step", {}),
        ("train", "Model", "", "train_dataloader", {}),
        ("train", "Model", DATA, "configure_optimizers", {"optimizer": None}),
        ("train", "BoringModel", DATA, "", {"optimizer": None}),
        ("benchmark", "LightningModule", DATA, "training_step", {}),
        ("validate", "Model", "Empty", "validation_step val_dataloader", {}),
        ("test", "Model", "", "test_step test_dataloader", {}),
        ("test", "WithTest", "Empty", "test_dataloader", {}),  # the data module's counts
        ("test", "SetsIt", DATA, "", {}),
        ("test", "function", DATA, "", {}),
        # Refused and partial models are not checked.
        ("test", "Model", DATA, "", {"refused": ["model"]}),
        ("test", "Model", DATA, "", {"partial": True}),
    ],
)
def test_missing_methods(task, model, data, lacks, more):
    of = {"model": f"{__name__}.{model}", "data": f"{__name__}.{data}"}
    config = {"optimizer": more.get("optimizer", OPTIMIZER)}
    config["model"] = {"_target_": of["model"], "_partial_": more.get("partial", False)}
    if data:
        config["data"] = {"_target_": of["data"]}
    context = {"refused": more.get("refused", []), "config": config}
    problems = [problem.what for problem in getattr(tasks, task).check({}, context)]
    assert problems == [
        f"needs {name}, which {of['data' if data and name.endswith('loader') else 'model']} does "
        "not define"
        for name in lacks.split()
    ]
