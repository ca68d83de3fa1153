"""Methods that a task calls and the user's classes lack are reported before anything starts."""

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel  # noqa: F401
from sample_config import node, rows

from distdl import tasks


class Empty(LightningDataModule): ...


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


# The task, the model, the data module, what is special; each method that is missing, and of whom.
MISSING = """
train LightningModule BoringDataModule | training_step LightningModule
train Model nothing | train_dataloader Model
train Model BoringDataModule no-optimizer | configure_optimizers Model
train BoringModel BoringDataModule no-optimizer
benchmark LightningModule BoringDataModule | training_step LightningModule
validate Model Empty | validation_step Model | val_dataloader Empty
test Model nothing | test_step Model | test_dataloader Model
test WithTest Empty | test_dataloader Empty
test SetsIt BoringDataModule
test function BoringDataModule
# Refused and partial models are not checked.
test Model BoringDataModule refused
test Model BoringDataModule partial
"""


@pytest.mark.parametrize(("chosen", "missing"), rows(MISSING))
def test_missing_methods(chosen, missing):
    task, model, data, *special = chosen.split()
    config = {"optimizer": None if "no-optimizer" in special else node("torch.optim.SGD")}
    config["model"] = node(f"{__name__}.{model}", _partial_="partial" in special)
    if data != "nothing":
        config["data"] = node(f"{__name__}.{data}")
    context = {"refused": ["model"] * ("refused" in special), "config": config}
    problems = [problem.what for problem in getattr(tasks, task).check({}, context)]
    expected = [name.split() for name in missing]
    assert problems == [f"needs {n}, which {__name__}.{of} does not define" for n, of in expected]
