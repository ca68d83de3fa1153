"""Checkpoints both ways: a run starts from Lightning's, and Lightning resumes from one of ours."""

import logging
import sys
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from pytest import approx
from schedulefree import SGDScheduleFree
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distdl import tasks
from distdl.config import compose, resources
from distdl.config import recipe as configs
from distdl.config.schema import Size
from distdl.data.sampling import TrainBatches
from distdl.ranks import environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import Attempt, RunDirectory
from distdl.util.errors import UserError
from distdl.worker.build import build
from distdl.worker.initial_state import apply_settings

KEYS = (
    "schedule=none",
    "optimizer=none",
    "tracking=none",
    "callbacks=none",
    "trainer.devices=1",
    "trainer.accelerator=cpu",
    "checkpoint.background=false",
    "trainer.max_epochs=4",
)


class Net(LightningModule):
    def __init__(self, width=4, kind="adam", lr=0.01, decay=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))
        self.kind = kind
        self.lr = lr
        self.decay = decay

    def _loss(self, batch):
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        return self._loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        # For a OneCycleLR, say. Lightning makes the training loader now.
        assert self.trainer.estimated_stepping_batches
        first, last = list(self.parameters())[:2], list(self.parameters())[2:]
        adam = torch.optim.Adam
        if self.kind == "sgd":
            return torch.optim.SGD(first + last, 0.01, 0.9)
        if self.kind == "first":
            return adam(first, self.lr)
        if self.kind == "bare":
            return adam(first + last, self.lr)
        halves = [{"params": first}, {"params": last}]
        params = halves if self.kind == "halves" else first + last
        optimizer = adam(params, lr=self.lr, weight_decay=self.decay)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


class Data(LightningDataModule):
    def _loader(self, rows):
        points = torch.linspace(-1, 1, 2 * rows).reshape(rows, 2)
        return DataLoader(TensorDataset(points, points.sum(1, keepdim=True)), 4)

    def train_dataloader(self):
        return self._loader(16)

    def val_dataloader(self):
        return self._loader(8)

    def test_dataloader(self):
        return [self._loader(8), self._loader(4)]


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Builds a run of `Net`, as a worker does."""
    monkeypatch.setenv("DISTDL_LAUNCHER", "local")
    monkeypatch.chdir(tmp_path)

    def make(name, start=None, *more, **arguments):
        config = compose.compose([*KEYS, *more])
        OmegaConf.update(config, "model", {"_target_": f"{__name__}.Net", **arguments}, merge=False)
        OmegaConf.update(config, "data", {"_target_": f"{__name__}.Data"}, merge=False)
        size = resources.resolve(Size.of(configs.plain(config.trainer)), local=True)
        run = RunDirectory(tmp_path / name)
        run.path.mkdir(exist_ok=True)
        attempt = Attempt(run.path / "attempts/001")
        rank = environment.resolve()
        start = start and str(start)
        return build(config, run, attempt, rank, size, StopRequest(), [], start)

    return make


def train(built):
    tasks.train().run(built)
    assert built.trainer.global_step == 16
    return built


def trainer(epochs, *callbacks):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saves = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks)}
    return pl.Trainer(accelerator="cpu", max_epochs=epochs, **quiet, **saves)


def fit(module, epochs, *callbacks, file=None):
    fitted = trainer(epochs, *callbacks)
    fitted.fit(module, datamodule=Data(), ckpt_path=file)
    return fitted


@pytest.fixture
def file(tmp_path):
    """Lightning's, after two epochs of four steps; in steps/ before the last of these steps."""
    torch.manual_seed(0)
    fitted = fit(Net(), 2, ModelCheckpoint(tmp_path / "steps", every_n_train_steps=7))
    fitted.save_checkpoint(tmp_path / "a.ckpt")
    fitted.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    return tmp_path / "a.ckpt"


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def logged(caplog):
    """The only line on the state that a training begins with; empty if there is none."""
    name = "distdl.worker.initial_state"
    caplog.set_level(logging.INFO, name)

    def logged():
        lines = [r.getMessage() for r in caplog.records if r.name == name]
        assert len(lines) < 2
        return "".join(lines)

    return logged


@pytest.mark.parametrize("name", ["a.ckpt", "steps/epoch=1-step=7.ckpt"])
def test_a_training_resumes_as_lightning_would(ours, file, name, logged):
    built = train(ours("run", file.parent / name))
    torch.manual_seed(1)
    reference = Net()
    fit(reference, 4, file=file.parent / name)
    assert same(built.module, reference)
    assert ("was saved after 3 batches of an epoch" in logged()) == (name != "a.ckpt")


@pytest.mark.parametrize("kind, epochs", [("adam", [2, 3]), ("bare", [0, 1, 2, 3])])
def test_the_order_of_the_data_is_that_of_the_epoch(ours, file, kind, epochs, monkeypatch):
    used = []
    iterate = TrainBatches.__iter__

    def recorded(batches):
        used.append(batches.position.epoch)
        return iterate(batches)

    monkeypatch.setattr(TrainBatches, "__iter__", recorded)
    train(ours("run", file, kind=kind))
    assert used[1:] == epochs  # the first one is made before the checkpoint is read


UNFIT = [
    ("a.ckpt", "sgd", "SGD: it lacks dampening, momentum"),
    ("a.ckpt", "bare", "its schedules are of another kind"),
    ("a.ckpt", "halves", "has a different number of parameter groups"),
    ("weights.ckpt", "adam", "it has no optimizer state"),
    ("ddp.pth", "adam", ""),
    ("compiled.pth", "adam", ""),
]


@pytest.mark.parametrize("name, kind, reason", UNFIT)
def test_what_does_not_fit_leaves_the_weights(ours, file, name, kind, reason, logged):
    weights = torch.load(file)["state_dict"]
    for other, prefix in (("ddp.pth", "module."), ("compiled.pth", "_orig_mod.")):
        prefixed = {f"{prefix}{key}": value for key, value in weights.items()}
        torch.save(prefixed, file.with_name(other))
    built = ours("run", file.with_name(name), kind=kind)
    tasks.train().run(built)
    assert logged()
    assert reason in logged()
    reference = Net(kind=kind)
    reference.load_state_dict(weights)
    fit(reference, 4)
    assert same(built.module, reference)


def test_a_test_of_each_loader_is_lightnings(ours, file):
    module = Net.load_from_checkpoint(file)
    first, second = trainer(1).test(module, datamodule=Data(), verbose=False)
    assert tasks.test(str(file)).run(ours("run")) == first | second
    assert len(first | second) == 2


def test_refusals_name_what_is_wrong(ours, file):
    unfit = r"a.ckpt: its weights do not fit .*\n.*layers.0.weight"
    for task in (tasks.train(), tasks.test(str(file))):
        with pytest.raises(UserError, match=unfit):
            task.run(ours("run", file, width=5))
    with pytest.raises(UserError, match=r"is 2, but a.ckpt .* for 2 epochs") as error:
        tasks.train().run(ours("run", file, "trainer.max_epochs=2"))
    assert error.value.problems[0].path == "trainer.max_epochs"


def rates(built):
    (group,) = train(built).trainer.optimizers[0].param_groups
    return group["lr"], group["weight_decay"]


def test_another_run_has_its_own_rate_and_a_resumed_one_keeps_it(ours, tmp_path, logged, caplog):
    tasks.train().run(ours("first", None, "trainer.max_epochs=2"))
    file = tmp_path / "first/checkpoints/last.ckpt"
    # The schedule resumes from its position.
    assert rates(ours("second", file, lr=0.001, decay=0.1)) == (approx(0.001 / 100), 0.1)
    assert "continues with weight_decay 0.1 instead of 0.0, lr 0.001 instead of 0.01" in logged()
    with pytest.raises(UserError, match=r", but .*last.ckpt was") as error:
        tasks.train().run(ours("third", file, "trainer.max_steps=8"))
    assert error.value.problems[0].path == "trainer.max_steps"
    caplog.clear()
    assert rates(ours("first", file, lr=0.001))[0] == approx(0.01 / 100)
    # Without a schedule, a module may have set the rate in the file by hand: it is not used.
    tasks.train().run(ours("bare", None, "trainer.max_epochs=2", kind="bare"))
    file = tmp_path / "bare/checkpoints/last.ckpt"
    assert rates(ours("fourth", file, kind="bare", lr=0.001))[0] == approx(0.001)


def test_lightning_resumes_from_ours_without_distdl(ours, tmp_path, monkeypatch):
    built = train(ours("run", None, "checkpoint.keep_last=9", width=3))
    for name in [name for name in sys.modules if name.partition(".")[0] == "distdl"]:
        monkeypatch.setitem(sys.modules, name, None)
    file = tmp_path / "run/checkpoints/epoch_001.ckpt"
    module = Net.load_from_checkpoint(file)
    assert module.hparams["width"] == 3
    assert module.hparams["kind"] == "adam"
    resumed = Net(3)
    assert fit(resumed, 4, file=file).global_step == 16
    assert same(resumed, built.module)


def test_what_an_optimizer_counts_is_no_setting():
    """Another run's checkpoint of a schedule-free optimizer, with another momentum."""

    def made(momentum):
        return SGDScheduleFree([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=momentum)

    loaded = made(0.9)
    (group,) = loaded.param_groups
    group |= {"k": 7, "weight_sum": 0.5, "lr_max": 0.1}
    trainer = SimpleNamespace(optimizers=[loaded], lr_scheduler_configs=[])
    apply_settings(trainer, [[{**g} for g in made(0.8).param_groups]], None, "a.ckpt", 1.0)
    assert group["momentum"] == 0.8
    assert (group["k"], group["weight_sum"], group["lr_max"]) == (7, 0.5, 0.1)


def test_parameters_that_no_optimizer_has_are_counted(ours, caplog):
    train(ours("all"))
    assert "in no optimizer" not in caplog.text
    train(ours("first", kind="first"))
    left_out = "2 of 4 trainable parameters are in no optimizer, and stay as they are: layers.2."
    assert left_out in caplog.text


def test_a_time_that_another_run_has_used_is_refused(ours, tmp_path):
    """It had no limit, so nothing has ended it."""
    train(ours("a"))
    path = tmp_path / "a/checkpoints/last.ckpt"
    saved = torch.load(path, weights_only=True)
    saved["distdl"]["budget"] = {"used": 7_000_000}
    torch.save(saved, tmp_path / "long.ckpt")
    limit = "trainer.max_time={seconds:3}"
    with pytest.raises(UserError, match=r"is 00:00:00:03, but .*long.ckpt .* for 00:00:00:07") as e:
        train(ours("b", tmp_path / "long.ckpt", "trainer.max_epochs=9", limit))
    assert "trainer.max_time=00:00:00:10, or" in str(e.value)
