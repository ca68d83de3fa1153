"""`self.logger` in a module, under TensorBoard, CSV and MLflow, with a real Trainer."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from mlflow import MlflowClient, get_tracking_uri
from mlflow.exceptions import MlflowException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distdl.config import compose
from distdl.tracking.client import metric_name
from distdl.tracking.journal import Journal
from distdl.worker import performing
from tests.prepared import quiet_trainer
from tests.tracking.conftest import Tracked, database, draw, logger


class Painter(BoringModel):
    """Writes what its author wants to see: losses, samples, text, a figure, a file."""

    def __init__(self, latent=2, api_token="abc-not-for-all", **more):
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/own", torch.tensor(float(batch_idx)))

    def on_train_epoch_end(self):
        epoch, step = self.current_epoch, self.global_step
        picture = torch.full((3, 4, 4), epoch / 10)
        if isinstance(self.logger, MLFlowLogger):
            draw(self.logger, picture.permute(1, 2, 0).numpy(), epoch)
        for each in self.loggers:
            if not isinstance(each, MLFlowLogger | CSVLogger):  # the journal's ignores it
                each.experiment.add_image("samples", picture, step)
                each.experiment.add_scalar("mine", epoch, step)


def train(loggers, folder, epochs):
    """A plain Trainer, which resumes from `folder/last.ckpt` if that exists."""
    pl.seed_everything(1, verbose=False)
    options = {
        "max_epochs": epochs,
        "log_every_n_steps": 1,
        "limit_train_batches": 4,
        "logger": loggers,
        "callbacks": [LearningRateMonitor()],
    }
    trainer = quiet_trainer(folder / "elsewhere", **options)
    last = folder / "last.ckpt"
    module = Painter(nested={"width": 3, "names": ["a"]})
    trainer.fit(module, ckpt_path=str(last) if last.exists() else None, weights_only=True)
    trainer.save_checkpoint(last)
    assert not (folder / "elsewhere").exists()
    return trainer


def built(*options):
    """The `tracking` part of a config with these options, composed and built by Hydra."""
    config = compose.compose([f"tracking=[{','.join(options)}]"])
    return dict(instantiate(config.tracking) or {})


def test_tensorboard_is_lightnings_own_and_continues_its_curves(tmp_path):
    assert built("none") == {}
    for attempt, epochs in ((1, 2), (2, 3)):
        tracked = Tracked(tmp_path, "e/r", attempt, built("tensorboard", "csv"))
        optimizer = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}
        for each in tracked.loggers:
            each.log_hyperparams({"optimizer": instantiate(optimizer)})
        ours = train(tracked.loggers, tracked.folder, epochs).logger
        tracked.finish()
    logs = tracked.folder / "logs"
    assert type(ours) is TensorBoardLogger
    assert isinstance(tracked.loggers[-1], Journal)
    assert {*map(Path, (ours.save_dir, ours.log_dir, ours.root_dir))} == {logs / "tensorboard"}
    assert (ours.name, ours.version) == ("", "")
    assert any(x.startswith("tensorboard --logdir") for x in tracked.tracking.how_to_open())
    events = EventAccumulator(ours.log_dir).Reload()
    tags = events.Tags()
    losses = [(e.step, e.value) for e in events.Scalars("loss")]
    assert {"mine", "epoch", "val/own", "lr-SGD"} <= {*tags["scalars"]}
    assert tags["images"] == ["samples"]
    assert [step for step, _ in losses] == [*range(12)]
    for file in (logs / "tensorboard/hparams.yaml", logs / "csv/version_0/hparams.yaml"):
        text = file.read_text()  # plain data, also of what Hydra made
        assert "_DeferredTarget" not in text
        assert "!!python" not in text
        assert all(part in text for part in ("latent: 2", "lr: 0.1", "SGD"))
    records = tracked.records()
    recorded = [(r.step, r.metrics["loss"]) for r in records if "loss" in r.metrics]
    assert recorded == pytest.approx(losses)
    names = {name for record in records for name in record.metrics}
    assert {"val/own", "lr-SGD", "epoch", "system/cpu_percent"} <= names - {"hp_metric"} == names
    tables = sorted((logs / "csv").rglob("metrics.csv"))
    assert [table.parent.name for table in tables] == ["version_0", "version_1"]


def test_mlflow_has_what_a_module_logs_through_its_logger(outputs):
    for attempt, epochs in ((1, 2), (2, 3)):
        components = {"mlflow": logger(), **built("tensorboard")}
        tracked = Tracked(outputs, "paint/r", attempt, components)
        trainer = train(tracked.loggers, tracked.folder, epochs)
        ours = trainer.logger
        mlflow = trainer.logger.experiment
        assert isinstance(ours, MLFlowLogger)
        assert isinstance(mlflow, MlflowClient)
        mlflow.log_table(ours.run_id, {"epoch": [attempt]}, "table.json")
        mlflow.log_table(ours.run_id, {"epoch": [attempt + 10]}, "table.json")
        mlflow.log_metric(None, "read", attempt, step=attempt)
        assert mlflow.get_metric_history(ours.run_id, "read")[-1].value == attempt
        assert mlflow.get_run(None).data.tags["seen"] == str(epochs - 1)
        run = tracked.finish().run
    assert (ours.run_id, ours.version) == (run.info.run_id, run.info.run_id)
    assert (ours.experiment_id, ours.name) == (run.info.experiment_id, run.info.experiment_id)
    assert ours.save_dir == trainer.log_dir == str(tracked.folder)
    stored = tracked.stored
    for epoch in range(3):
        assert (stored / f"notes/{epoch}.txt").read_text() == f"epoch {epoch}"
        assert json.loads((stored / f"{epoch}.json").read_text()) == {"epoch": epoch}
        for kind in ("samples", "figures"):
            assert (stored / f"{kind}/{epoch}.png").stat().st_size > 0
    assert (stored / "notes/latest.txt").read_text() == "epoch 2"
    assert json.loads((stored / "table.json").read_text())["data"] == [[1], [11], [2], [12]]
    assert len([*(stored / "images").iterdir()]) == 6  # complete and compressed
    assert not [f for f in (tracked.folder / "tracking/artifacts").rglob("*") if f.is_file()]
    flat = {"latent": "2", "nested/width": "3", "nested/names": "['a']", "api_token": "***"}
    assert run.data.params.items() >= {**flat, "p0": "0", "p2": "2"}.items()
    assert run.data.tags.items() >= {"seen": "2", "mlflow.loggedImages": "True"}.items()
    points = tracked.delivered
    assert [p[2] for p in points if p[0] == "loss"] == [*range(12)]  # each once
    assert [p[2] for p in points if p[0] == "mine"] == [0, 1, 2]
    assert [p[1] for p in points if p[0] == metric_name("mine@2")] == [1700000000123] * 3


def test_metrics_are_recorded_once_and_before_a_logger_raises(tmp_path):
    class Full(DummyLogger):
        def log_metrics(self, metrics, step=None):
            raise OSError(28, "No space left on device")

    tracked = Tracked(tmp_path, components={"full": Full(), "a": DummyLogger()})
    _, other, journal = tracked.loggers
    for each in (journal, other, other):  # in whatever order; the third repeats them
        each.log_metrics({"x": float("nan"), "y": torch.tensor(0.5)}, 1)
    other.log_metrics({"mine": 2.0}, 2)  # a module may use its first logger alone
    with pytest.raises(OSError, match="No space"):
        train(tracked.loggers, tmp_path, 1)
    tracked.finish("FAILED")
    rows = [(record.step, *record.metrics) for record in tracked.records()]
    rows = [row for row in rows if not row[1].startswith("system")]
    assert rows[:3] == [(1, "x", "y"), (1, "x", "y"), (2, "mine")]
    assert len(rows) == 4


def test_a_loggers_own_arguments_reach_it(tmp_path):
    """In a training, and in an evaluation of a run that has trained."""

    class Own(DummyLogger):
        def log_metrics(self, metrics, step=None, split="", *, commit=False):
            self.got = metrics, step, split, commit

    own = Own()
    Tracked(tmp_path, components={"own": own}).finish()
    own.log_metrics({"x": 1.0}, 3, "val", commit=True)
    assert own.got == ({"x": 1.0}, 3, "val", True)
    performing.name_by_task([own], "test")
    own.log_metrics({"x": 1.0, "epoch": 2}, 4, "val", commit=True)
    assert own.got == ({"test/x": 1.0, "epoch": 2}, 4, "val", True)
    own.log_metrics(metrics={"x": 1.0}, step=4)  # as Lightning calls it
    assert own.got == ({"test/x": 1.0}, 4, "", False)


def test_no_name_and_no_value_leads_out_or_delays_the_others(outputs, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2-canary")
    tracked = Tracked(outputs, "odd/r")
    ours = tracked.loggers[0]
    mlflow = tracked.loggers[0].experiment
    assert ours.run_id
    assert get_tracking_uri() == database(outputs)
    assert not hasattr(mlflow, "add_image")
    for path in ("../x.txt", "/x.txt", "a/../../x.txt"):
        with pytest.raises(MlflowException, match="Invalid artifact path"):
            mlflow.log_text(None, "x", path)
    with pytest.raises(FileNotFoundError):
        mlflow.log_artifact(None, "nothing.txt")
    Path("folder/inner").mkdir(parents=True)
    Path("folder/inner/own.txt").write_text("own", encoding="utf-8")
    mlflow.log_artifact(None, Path("folder"), "copied")
    mlflow.log_artifacts(None, Path("folder"))
    for name in ("größe 1%.txt", "a\nb.txt", "a#b", "x" * 200, ".hidden/y", "both", "both/x.txt"):
        mlflow.log_text(None, "odd", name)  # the last in a folder of another one's name
    params = {"acc@1": 1, "long": "y" * 9000, "key": "is hunter2-canary", "a": {"password": "p"}}
    ours.log_hyperparams(params | {f"many{i}": i for i in range(150)})
    mlflow.set_tag(None, "t@g", "hunter2-canary")
    mlflow.log_metric(None, "m@", "no number")
    run = tracked.finish().run
    params = run.data.params
    assert (params[metric_name("acc@1")], len(params["long"]), len(params)) == ("1", 500, 154)
    assert (params["key"], params["a/password"]) == ("is ***MY_SECRET***", "***")
    assert run.data.tags[metric_name("t@g")] == "***MY_SECRET***"
    for path in ("copied/folder/inner/own.txt", "inner/own.txt", "größe 1%.txt"):
        assert (tracked.stored / path).read_text() in ("own", "odd")
    assert {"a\nb.txt", "a#b", "both", ".hidden"} <= {x.name for x in tracked.stored.iterdir()}
    assert not [*outputs.parent.rglob("x.txt")], "one led out, or waits for ever"
