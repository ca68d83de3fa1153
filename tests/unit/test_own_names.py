"""A module's own metrics beside distdl's: under its names, and those that something waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel

from distdl.callbacks import StepMetrics
from distdl.validation import misfits


class Own(BoringModel):
    """Logs train/loss once an epoch, under the name that distdl has for its own."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        found = super().training_step(batch, batch_idx)
        self.log("train/loss", found["loss"], on_step=False, on_epoch=True)
        return found

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.step(batch))


@pytest.fixture
def train(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    def run(*callbacks: Any, model: Any = None) -> list[dict[str, Any]]:
        logged: list[dict[str, Any]] = []

        class Kept(CSVLogger):
            def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
                logged.append({"step": step, **metrics})

        trainer = Trainer(
            accelerator="cpu", max_epochs=1, limit_train_batches=4, limit_val_batches=1,
            log_every_n_steps=1, logger=Kept(tmp_path), callbacks=[StepMetrics(None), *callbacks],
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model or Own())
        return logged

    return run


def test_no_value_of_ours_under_a_name_of_theirs(train) -> None:
    logged = train()
    assert [entry["step"] for entry in logged if "train/loss" in entry] == [3]
    assert [entry["step"] for entry in logged if "perf/data_wait" in entry] == [1, 2, 3, 4]


def test_a_metric_that_is_misspelt(train) -> None:
    with pytest.raises(RuntimeError) as raised:
        train(EarlyStopping("val/los"))
    problem = misfits.explained(raised.value)
    assert problem is not None and "val/los" in problem.what and "monitor=" in problem.remedy


class Broken(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (1 if batch_idx < 2 else torch.nan)


def test_a_loss_that_is_no_number_is_said_once_with_the_step(train, caplog) -> None:
    train(model=Broken())
    said = [r.getMessage() for r in caplog.records if "the loss is" in r.getMessage()]
    assert len(said) == 1 and said[0].startswith("the loss is nan since step 3 at the latest")
