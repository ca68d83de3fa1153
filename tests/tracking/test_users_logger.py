"""`self.logger` in a module, under TensorBoard, CSV and MLflow, with a real Trainer."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch.utils.data import DataLoader

from distdl.runs.records import journal_path, read
from distdl.tracking import start_tracking
from distdl.tracking.delivery import Delivery
from distdl.tracking.journal import Journal
from distdl.tracking.outbox import Outbox
from tests.tracking.test_journal import built
from tests.tracking.tracked import (
    client,
    database,
    delivered,
    draw,
    figure,
    info_of,
    logger,
    runs_of,
)


class Autoencoder(pl.LightningModule):
    """Writes what a VAE's author writes: losses, samples, histograms, text, a figure, a file."""

    def __init__(self, latent: int = 2, api_token: str = "abc-not-for-all", **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, latent), torch.nn.Linear(latent, 4))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self.net(batch), batch)
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.paint(self.current_epoch)

    def paint(self, epoch: int) -> None:
        picture, step = torch.full((3, 4, 4), epoch / 10), self.global_step
        if isinstance(self.logger, TensorBoardLogger):
            writer = self.logger.experiment
            writer.add_image("samples", picture, step)
            writer.add_histogram("weights", self.net[0].weight, step)
            writer.add_text("note", f"epoch {epoch}", step)
            writer.add_scalar("mine", epoch, step)
        if isinstance(self.logger, MLFlowLogger):
            draw(self.logger, picture.permute(1, 2, 0).numpy(), epoch)
        for each in self.loggers:
            if not isinstance(each, MLFlowLogger | CSVLogger):
                each.experiment.add_image("each", picture, step)
                each.experiment.add_figure("figure", figure(), step)


def train(loggers: Any, folder: Path, epochs: int, module: pl.LightningModule | None = None) -> Any:
    """A plain Trainer, that goes on from `folder/last.ckpt` if it is there."""
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        max_epochs=epochs,
        logger=loggers,
        log_every_n_steps=1,
        accelerator="cpu",
        devices=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    last = folder / "last.ckpt"
    module = module or Autoencoder(nested={"width": 3, "names": ["a"]})
    trainer.fit(module, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    trainer.save_checkpoint(last)
    return trainer


def events(folder: Path) -> dict[str, list[Any]]:
    """Tag to (step, value) of all event files of a folder, and the hyperparameters' names."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), {"tensors": 0, "images": 0, "histograms": 0})
    found.Reload()
    told: dict[str, list[Any]] = {}
    for tag in found.Tags()["scalars"]:
        told[tag] = [(e.step, e.value) for e in found.Scalars(tag)]
    for tag in found.Tags()["images"]:
        told[tag] = [(e.step, e.width, e.height) for e in found.Images(tag)]
    for tag in found.Tags()["histograms"]:
        told[tag] = [(e.step, e.histogram_value.sum) for e in found.Histograms(tag)]
    for tag in found.Tags()["tensors"]:
        told[tag] = [(e.step, e.tensor_proto.string_val[0]) for e in found.Tensors(tag)]
    return told


def test_tensorboard_is_lightnings_own_and_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    plain = TensorBoardLogger(tmp_path / "plain/tensorboard", name="", version="")
    (tmp_path / "plain").mkdir()
    train(plain, tmp_path / "plain", 4)
    for attempt, epochs in ((1, 2), (2, 4)):
        tracking = start_tracking(info_of(tmp_path, "e/r", attempt), built(["tensorboard", "csv"]))
        ours = train(tracking.loggers, tmp_path / "e/r", epochs).logger
        tracking.finish("SUCCEEDED")
    assert type(ours) is TensorBoardLogger and isinstance(tracking.loggers[-1], Journal)
    assert ours.save_dir == str(tmp_path / "e/r/logs/tensorboard")
    for name in ("log_dir", "root_dir", "save_dir"):
        there = Path(getattr(plain, name)).relative_to(plain.save_dir)
        assert Path(getattr(ours, name)).relative_to(ours.save_dir) == there
    assert (ours.name, ours.version, ours.sub_dir) == (plain.name, plain.version, plain.sub_dir)
    told, expected = events(Path(ours.log_dir)), events(Path(plain.log_dir))
    hparams = {tag: told.pop(tag) for tag in list(told) if "hparams" in tag or tag == "hp_metric"}
    assert told == {tag: value for tag, value in expected.items() if tag not in hparams}
    assert {"loss", "samples", "each", "figure", "weights", "mine", "epoch"} <= set(told)
    assert [step for step, _ in told["loss"]] == list(range(16))
    assert "latent: 2" in (Path(ours.log_dir) / "hparams.yaml").read_text() and hparams
    records = [r for r in read(journal_path(tmp_path / "e/r")) if "loss" in r.metrics]
    assert [(r.step, r.metrics["loss"]) for r in records] == pytest.approx(told["loss"])
    assert not any("hp_metric" in r.metrics for r in read(journal_path(tmp_path / "e/r")))
    tables = sorted((tmp_path / "e/r/logs/csv").rglob("metrics.csv"))
    assert [table.parent.name for table in tables] == ["version_0", "version_1"]


def test_mlflow_has_what_a_module_logs_through_its_logger(outputs: Path) -> None:
    for attempt, epochs in ((1, 2), (2, 3)):
        info = info_of(outputs, "paint/r", attempt)
        tracking = start_tracking(info, {"mlflow": logger(), **built(["tensorboard"])})
        assert isinstance(tracking.loggers[1], TensorBoardLogger)
        trainer = train(tracking.loggers, info.run_dir, epochs)
        ours, mlflow = trainer.logger, trainer.logger.experiment
        assert isinstance(ours, MLFlowLogger) and isinstance(
            mlflow, type(client(database(outputs)))
        )
        mlflow.log_table(ours.run_id, {"epoch": [attempt]}, "table.json")
        mlflow.log_table(ours.run_id, {"epoch": [attempt + 10]}, "table.json")
        mlflow.log_metric(None, "read", attempt, step=attempt)
        assert mlflow.get_metric_history(ours.run_id, "read")[-1].value == attempt
        assert mlflow.get_run(None).data.tags["seen"] == str(epochs - 1)
        tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "paint")
    assert (ours.run_id, ours.version) == (run.info.run_id, run.info.run_id)
    assert (ours.experiment_id, ours.name) == (run.info.experiment_id, run.info.experiment_id)
    assert (ours.save_dir, trainer.log_dir) == (str(info.run_dir), str(info.run_dir))
    stored = outputs / "mlflow-artifacts" / run.info.run_id / "artifacts"
    for epoch in range(3):
        assert (stored / f"notes/{epoch}.txt").read_text() == f"epoch {epoch}"
        assert json.loads((stored / f"{epoch}.json").read_text()) == {"epoch": epoch}
        assert (stored / f"samples/{epoch}.png").stat().st_size > 0
        assert (stored / f"figures/{epoch}.png").stat().st_size > 0
    assert (stored / "notes/latest.txt").read_text() == "epoch 2"
    assert json.loads((stored / "table.json").read_text())["data"] == [[1], [11], [2], [12]]
    assert len(list((stored / "images").iterdir())) == 6  # whole and compressed
    assert not [f for f in (info.run_dir / "tracking/artifacts").rglob("*") if f.is_file()]
    params = run.data.params
    assert (params["latent"], params["nested/width"], params["nested/names"]) == ("2", "3", "['a']")
    assert (params["api_token"], params["p0"], params["p2"]) == ("***", "0", "2")
    assert run.data.tags["seen"] == "2" and run.data.tags["mlflow.loggedImages"] == "True"
    points = delivered(database(outputs), run.info.run_id)
    assert [p[2] for p in points if p[0] == "loss"] == list(range(12))  # each once
    assert [p[2] for p in points if p[0] == "mine"] == [0, 1, 2]
    assert [p[1] for p in points if p[0] == "mine_2"] == [1700000000123] * 3
    assert not Delivery(Outbox(info.run_dir), "").owes()


def test_what_is_told_by_turns_is_recorded_once_and_before_a_logger_raises(tmp_path: Path) -> None:
    class Full(DummyLogger):
        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            raise OSError(28, "No space left on device")

    tracking = start_tracking(info_of(tmp_path, "e/r"), {"full": Full(), "a": DummyLogger()})
    _, other, journal = tracking.loggers
    journal.log_metrics({"x": float("nan"), "y": torch.tensor(0.5)}, 1)
    other.log_metrics({"x": float("nan"), "y": torch.tensor(0.5)}, 1)  # in whatever order
    other.log_metrics({"x": float("nan"), "y": torch.tensor(0.5)}, 1)  # said again
    other.log_metrics({"mine": 2.0}, 2)  # a module may tell its first logger alone
    with pytest.raises(OSError, match="No space"):
        train(tracking.loggers, tmp_path, 1)
    tracking.finish("FAILED")
    told = [(r.step, *r.metrics) for r in read(journal_path(tmp_path / "e/r"))]
    assert [t for t in told if not t[1].startswith("system")] == [
        *((1, "x", "y"), (1, "x", "y"), (2, "mine")),
        (0, "loss", "epoch"),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_logger_on_every_rank_can_be_written_to(tmp_path: Path, rank: int) -> None:
    info = info_of(tmp_path, "e/r", rank=rank, node_rank=rank, world_size=2)
    for components in ({}, {"mlflow": logger(tracking_uri="http://127.0.0.1:9", flush_timeout=0)}):
        tracking = start_tracking(info, components)
        journal = tracking.loggers[-1]
        for each in tracking.loggers if rank else [journal]:
            each.experiment.add_image("x", 1)
            each.experiment.log_text(each.run_id, "x", os.path.join(each.experiment_id or "", "x"))
        journal.log_image(key="x", images=[])
        journal.watch(None)
        assert journal.log_dir == journal.root_dir == str(info.run_dir)
        for each in tracking.loggers:
            each.log_hyperparams({"x": 1})
            each.log_metrics({"x": 1.0}, 1)
        if rank and components:
            ours = tracking.loggers[0]
            assert isinstance(ours, MLFlowLogger) and (ours.run_id, ours.name) == (None, None)
        tracking.finish("SUCCEEDED")
    assert (info.run_dir / "tracking/mlflow.json").exists() == (rank == 0)


def test_no_name_and_no_value_leads_out_or_holds_up_the_others(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import get_tracking_uri as mlflow_uri
    from mlflow.exceptions import MlflowException

    monkeypatch.setenv("MY_SECRET", "hunter2-canary")
    info = info_of(outputs, "odd/r")
    tracking = start_tracking(info, {"mlflow": logger()})
    assert tracking.loggers[0].run_id and mlflow_uri() == database(outputs)  # for start_run(run_id)
    mlflow = tracking.loggers[0].experiment
    assert not hasattr(mlflow, "add_image")
    for path in ("../x.txt", "/x.txt", "a/../../x.txt"):
        with pytest.raises(MlflowException, match="Invalid artifact path"):
            mlflow.log_text(None, "x", path)
    with pytest.raises(FileNotFoundError):
        mlflow.log_artifact(None, "nothing.txt")
    folder = Path("folder")
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/own.txt").write_text("own")
    mlflow.log_artifact(None, folder, "copied")
    mlflow.log_artifacts(None, folder)
    for name in ("größe 1%.txt", "a\nb.txt", "a#b", "x" * 200, ".hidden/y"):
        mlflow.log_text(None, "odd", name)
    mlflow.log_text(None, "a file", "both")
    mlflow.log_text(None, "in a folder of its name", "both/x.txt")
    tracking.loggers[0].log_hyperparams(
        {"acc@1": 1, "long": "y" * 9000, "key": "is hunter2-canary", "a": {"password": "p"}}
        | {f"many{i}": i for i in range(150)}
    )
    mlflow.set_tag(None, "t@g", "hunter2-canary")
    mlflow.log_metric(None, "m@", "no number")
    tracking.finish("SUCCEEDED")
    (run,) = runs_of(database(outputs), "odd")
    params = run.data.params
    assert (params["acc_1"], len(params["long"]), len(params)) == ("1", 500, 154)
    assert (params["key"], params["a/password"]) == ("is ***MY_SECRET***", "***")
    assert run.data.tags["t_g"] == "***MY_SECRET***"
    stored = outputs / "mlflow-artifacts" / run.info.run_id / "artifacts"
    assert (stored / "copied/folder/inner/own.txt").read_text() == "own"
    assert (stored / "inner/own.txt").read_text() == "own"
    assert (stored / "größe 1%.txt").read_text() == "odd"
    assert {"a\nb.txt", "a#b", "both", ".hidden"} <= {path.name for path in stored.iterdir()}
    assert not Delivery(Outbox(info.run_dir), "").owes()
    assert not list(outputs.parent.rglob("x.txt"))
