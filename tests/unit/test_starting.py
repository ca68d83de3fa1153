"""Checkpoints both ways: a run starts from Lightning's, and Lightning resumes from one of ours."""

import functools
import logging
import subprocess
import sys
from argparse import Namespace

import lightning.pytorch as pl
import pytest
import theirs
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from pytest import approx

from distdl import tasks
from distdl.config import compose, resources
from distdl.config import recipe as configs
from distdl.data.sampling import TrainBatches
from distdl.ranks import environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import Attempt, RunDirectory
from distdl.util.errors import UserError
from distdl.worker import summary
from distdl.worker.build import build
from tests.conftest import ROOT
from tests.conftest import environment as variables

KEYS = ("schedule=none", "optimizer=none", "tracking=none", "trainer.accelerator=cpu")
KEYS += ("trainer.devices=1", "checkpoint.background=false", "trainer.max_epochs=4")


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """Builds a run of `theirs.Net`, as a worker does."""
    monkeypatch.setenv("DISTDL_LAUNCHER", "local")
    monkeypatch.chdir(tmp_path)

    def make(name, start=None, *more, model=None, **arguments):
        callbacks = () if "callbacks=ema" in more else ("callbacks=none",)
        config = compose.compose([*KEYS, *callbacks, *more])
        node = model or {"_target_": "theirs.Net", **arguments}
        OmegaConf.update(config, "model", node, merge=False)
        OmegaConf.update(config, "data", {"_target_": "theirs.Data"}, merge=False)
        size = resources.resolve(configs.plain(config.trainer), local=True)
        run = RunDirectory(tmp_path / name)
        run.path.mkdir(exist_ok=True)
        attempt = Attempt(run.path / "attempts/001")
        rank, start = environment.resolve(), start and str(start)
        return build(config, run, attempt, rank, size, StopRequest(), [], start)

    return make


def train(built):
    tasks.train(built)
    assert built.trainer.global_step == 16
    return built


def trainer(epochs, *callbacks):
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saves = {"callbacks": list(callbacks), "enable_checkpointing": bool(callbacks)}
    return pl.Trainer(accelerator="cpu", max_epochs=epochs, **quiet, **saves)


def fit(module, epochs, *callbacks, file=None):
    fitted = trainer(epochs, *callbacks)
    fitted.fit(module, datamodule=theirs.Data(), ckpt_path=file)
    return fitted


@pytest.fixture
def file(tmp_path):
    """Lightning's, after two epochs of four steps; in steps/ before the last of these steps."""
    torch.manual_seed(0)
    fitted = fit(theirs.Net(), 2, ModelCheckpoint(tmp_path / "steps", every_n_train_steps=7))
    fitted.save_checkpoint(tmp_path / "a.ckpt")
    fitted.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    return tmp_path / "a.ckpt"


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture
def logged(caplog):
    """The only line on the state that a training begins with; empty if there is none."""
    caplog.set_level(logging.INFO, name := "distdl.worker.initial_state")

    def logged():
        lines = [r.getMessage() for r in caplog.records if r.name == name]
        assert len(lines) < 2
        return "".join(lines)

    return logged


@pytest.mark.parametrize("name", ["a.ckpt", "steps/epoch=1-step=7.ckpt"])
def test_a_training_resumes_as_lightning_would(ours, file, name, logged):
    built = train(ours("run", file.parent / name))
    torch.manual_seed(1)
    reference = theirs.Net()
    fit(reference, 4, file=file.parent / name)
    assert same(built.module, reference)
    assert ("was saved after 3 batches of an epoch" in logged()) == (name != "a.ckpt")


@pytest.mark.parametrize("kind, epochs", [("adam", [2, 3]), ("bare", [0, 1, 2, 3])])
def test_the_order_of_the_data_is_that_of_the_epoch(ours, file, kind, epochs, monkeypatch):
    used, iterate = [], TrainBatches.__iter__
    monkeypatch.setattr(
        TrainBatches, "__iter__", lambda self: used.append(self.position.epoch) or iterate(self)
    )
    train(ours("run", file, kind=kind))
    assert used[1:] == epochs  # the first one is made before the checkpoint is read


UNFIT = [
    ("a.ckpt", "sgd", "SGD: it lacks dampening, momentum"),
    ("a.ckpt", "bare", "its schedules are of another kind"),
    ("a.ckpt", "halves", "has a different number of parameter groups"),
    ("a.ckpt", "two", "its optimizers is 1, not 2"),
    ("two.ckpt", "uneven", ""),
    ("weights.ckpt", "adam", "it has no optimizer state"),
    ("ddp.pth", "adam", ""),
]


@pytest.mark.parametrize("name, kind, reason", UNFIT)
def test_what_does_not_fit_leaves_the_weights(ours, file, name, kind, reason, logged):
    weights = torch.load(file)["state_dict"]
    prefixed = {f"module.{key}": value for key, value in weights.items()}
    torch.save(prefixed, file.with_name("ddp.pth"))
    if name == "two.ckpt":
        fit(theirs.Net(kind="two"), 1).save_checkpoint(file.with_name(name))
        weights = torch.load(file.with_name(name))["state_dict"]
    built = ours("run", file.with_name(name), kind=kind)
    tasks.train(built)
    assert logged() and reason in logged()
    reference = theirs.Net(kind=kind)
    reference.load_state_dict(weights)
    fit(reference, 4)
    assert same(built.module, reference)


def test_tests_of_compiled_weights_and_of_each_loader(ours, file, tmp_path):
    for compiled in (True, False):
        module, weights = theirs.Net(compiled=compiled), tmp_path / "w.pth"
        torch.save(module.state_dict(), weights)
        result = tasks.test(ours("run", compiled=not compiled), str(weights))
        (reference, _) = trainer(1).test(module, datamodule=theirs.Data(), verbose=False)
        assert result["loss/dataloader_idx_0"] == reference["loss/dataloader_idx_0"]
    module = theirs.Net.load_from_checkpoint(file)
    first, second = trainer(1).test(module, datamodule=theirs.Data(), verbose=False)
    assert tasks.test(ours("run"), str(file)) == first | second and len(first | second) == 2


def test_refusals_name_what_is_wrong(ours, file):
    for run in (tasks.train, functools.partial(tasks.test, checkpoint=str(file))):
        with pytest.raises(
            UserError, match=r"a.ckpt: its weights do not fit .*\n.*layers.0.weight"
        ):
            run(ours("run", file, width=5))
    for longest in (1, 2):
        with pytest.raises(UserError, match=f"is {longest}, but a.ckpt .* for 2 epochs") as error:
            tasks.train(ours("run", file, f"trainer.max_epochs={longest}"))
        assert error.value.problems[0].path == "trainer.max_epochs"


def test_hyperparameters_may_be_configs_and_objects_that_need_trust(ours, tmp_path):
    model = {"_target_": "theirs.Given", "optimizer": {"lr": 0.1}, "args": {"width": 2}}
    built = ours("run", None, model={**model, "_convert_": "none"})
    assert built.module.make.lr == 0.1 and built.module.layers.out_features == 2

    make = functools.partial(torch.optim.SGD, lr=0.1)
    file = tmp_path / "given.ckpt"
    fit(theirs.Given(make, Namespace(width=1)), 1).save_checkpoint(file)
    node = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}
    model |= {"optimizer": node, "args": {"_target_": "argparse.Namespace", "width": 1}}
    with pytest.raises(UserError, match=r"functools.partial(.|\n)*checkpoint.trust_pickle=true"):
        tasks.train(ours("run", file, model=model))
    built = train(ours("run", file, "checkpoint.trust_pickle=true", model=model))
    last = tmp_path / "run/checkpoints/last.ckpt"
    again = theirs.Given.load_from_checkpoint(last, optimizer=make, args=Namespace(width=1))
    assert same(again, built.module)


def rates(built):
    (group,) = train(built).trainer.optimizers[0].param_groups
    return group["lr"], group["weight_decay"]


def test_another_run_has_its_own_rate_and_a_resumed_one_keeps_it(ours, tmp_path, logged, caplog):
    tasks.train(ours("first", None, "trainer.max_epochs=2"))
    file = tmp_path / "first/checkpoints/last.ckpt"
    # The schedule resumes from its position.
    assert rates(ours("second", file, lr=0.001, decay=0.1)) == (approx(0.001 / 100), 0.1)
    assert "continues with weight_decay 0.1 instead of 0.0, lr 0.001 instead of 0.01" in logged()
    for longest in ("max_epochs=2", "max_steps=8"):
        with pytest.raises(UserError, match=r", but .*last.ckpt was") as error:
            tasks.train(ours("third", file, f"trainer.{longest}"))
        assert error.value.problems[0].path == f"trainer.{longest.partition('=')[0]}"
    caplog.clear()
    assert rates(ours("first", file, lr=0.001))[0] == approx(0.01 / 100)


def test_another_rate_without_a_schedule_and_the_advice_at_the_end(ours, tmp_path, capsys):
    """The rate in the file is not used, which a module may have set by hand."""
    for dry in (True, False):
        built = ours(
            "first", None, "trainer.max_epochs=2", f"trainer.fast_dev_run={dry}", kind="bare"
        )
        tasks.train(built)
        summary.print_end(built, {}, [], 0)
        assert ("distdl resume" in capsys.readouterr().out) is not dry
    file = tmp_path / "first/checkpoints/last.ckpt"
    for lr in (0.001, 0.01):
        assert rates(ours(f"second-{lr}", file, kind="bare", lr=lr))[0] == approx(lr)


def test_lightning_loads_the_average(ours, tmp_path):
    built = train(ours("run", None, "callbacks=ema"))  # its end puts the average into the module
    file = tmp_path / "run/checkpoints/last.ckpt"
    assert same(theirs.Net.load_from_checkpoint(file), built.module)
    trained = theirs.Net()
    trained.load_state_dict(torch.load(file)["current_model_state"])
    assert not same(trained, built.module)


SCRIPT = """
import sys
sys.modules["distdl"] = None  # this Python has none
import lightning.pytorch as pl, theirs
module = theirs.Net.load_from_checkpoint("run/checkpoints/epoch_001.ckpt")
assert module.hparams["width"] == 3 and module.hparams["kind"] == "adam", module.hparams
trainer = pl.Trainer(accelerator="cpu", max_epochs=4, logger=False, enable_checkpointing=False)
trainer.fit(theirs.Net(3), datamodule=theirs.Data(), ckpt_path="run/checkpoints/epoch_001.ckpt")
assert trainer.global_step == 16
trainer.save_checkpoint("resumed.ckpt")
"""


def test_a_plain_script_resumes_from_ours(ours, tmp_path):
    built = train(ours("run", None, "checkpoint.keep_last=9", width=3))
    env = variables(PYTHONPATH=str(ROOT / "tests/unit"))
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / "resumed.ckpt")["state_dict"]
    assert all(torch.equal(weights[key], value) for key, value in built.module.state_dict().items())
