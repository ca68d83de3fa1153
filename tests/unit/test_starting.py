"""Checkpoints both ways: a run starts from Lightning's, and Lightning goes on from one of ours."""

from __future__ import annotations

import functools
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import theirs
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf

from distdl import tasks
from distdl.config import compose, resources
from distdl.config import recipe as configs
from distdl.data.sampling import TrainBatches
from distdl.ranks import environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import Attempt, RunDirectory
from distdl.util.errors import UserError
from distdl.worker import summary
from distdl.worker.build import Built, build
from tests.conftest import ROOT
from tests.conftest import environment as variables

Make = Callable[..., Built]


@pytest.fixture
def ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Builds a run of `theirs.Net`, as a worker does."""
    monkeypatch.setenv("DISTDL_LAUNCHER", "local")
    monkeypatch.chdir(tmp_path)

    def make(
        name: str, start: Any = None, *more: str, model: Any = None, **arguments: Any
    ) -> Built:
        here = environment.resolve()
        groups = ["schedule=none", "optimizer=none", "tracking=none"]
        groups += [] if "callbacks=ema" in more else ["callbacks=none"]
        keys = ("trainer.accelerator=cpu", "trainer.devices=1", "checkpoint.background=false")
        config = compose.compose([*groups, *keys, "trainer.max_epochs=4", *more])
        node = model or {"_target_": "theirs.Net", **arguments}
        OmegaConf.update(config, "model", node, merge=False)
        OmegaConf.update(config, "data", {"_target_": "theirs.Data"}, merge=False)
        size = resources.resolve(configs.plain(config.trainer), local=True)
        run = RunDirectory(tmp_path / name)
        run.path.mkdir(exist_ok=True)
        attempt = Attempt(run.path / "attempts/001")
        start = start and str(start)
        return build(config, run, attempt, here, size, StopRequest(), [], start)

    return make


def trainer(epochs: int, *callbacks: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def lightning(file: Path | None = None, epochs: int = 4, **arguments: Any) -> pl.LightningModule:
    """What Lightning alone makes of it."""
    torch.manual_seed(1)
    module = theirs.Net(**arguments)
    trainer(epochs).fit(module, datamodule=theirs.Data(), ckpt_path=file)
    return module


@pytest.fixture
def theirs_file(tmp_path: Path) -> Path:
    """After two epochs of four steps; in steps/epoch=1-step=7.ckpt before the last of them."""
    torch.manual_seed(0)
    saves = ModelCheckpoint(tmp_path / "steps", every_n_train_steps=7)
    fits = trainer(2, saves)
    fits.fit(theirs.Net(), datamodule=theirs.Data())
    fits.save_checkpoint(tmp_path / "a.ckpt")
    fits.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    return tmp_path / "a.ckpt"


def same(one: pl.LightningModule, other: pl.LightningModule) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def warned(caplog: pytest.LogCaptureFixture) -> str:
    mine = [r.getMessage() for r in caplog.records if r.name == "distdl.worker.initial_state"]
    assert len(mine) < 2
    return "".join(mine)


# -------------------------------------------------------------------------------- from Lightning


@pytest.mark.parametrize("name", ["a.ckpt", "steps/epoch=1-step=7.ckpt"])
def test_a_training_goes_on_as_lightning_would(
    ours: Make, theirs_file: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    built = ours("run", theirs_file.parent / name)
    tasks.train(built)
    assert built.trainer.global_step == 16
    assert same(built.module, lightning(theirs_file.parent / name))
    assert ("was saved after 3 batches of an epoch" in warned(caplog)) == (name != "a.ckpt")


@pytest.mark.parametrize(("kind", "epochs"), [("adam", [2, 3]), ("bare", [0, 1, 2, 3])])
def test_the_order_of_the_data_is_that_of_the_epoch(
    ours: Make, theirs_file: Path, kind: str, epochs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: dict[int, None] = {}
    batches = TrainBatches._batches

    def noted(self: TrainBatches, epoch: int, consumed: int) -> Iterator[Any]:
        for batch in batches(self, epoch, consumed):
            used[epoch] = None
            yield batch

    monkeypatch.setattr(TrainBatches, "_batches", noted)
    tasks.train(ours("run", theirs_file, kind=kind))
    assert list(used) == epochs


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("a.ckpt", {"kind": "sgd"}, "its optimizer is not SGD, without dampening, momentum"),
        ("a.ckpt", {"kind": "bare"}, "its schedules are of another kind"),
        ("a.ckpt", {"kind": "halves"}, "has a different number of parameter groups"),
        ("a.ckpt", {"kind": "two"}, "it has 1 optimizers, not 2"),
        ("two.ckpt", {"kind": "uneven"}, "has a different number of parameter groups"),
        ("weights.ckpt", {}, "it holds no state of optimizers"),
        ("raw.pth", {}, "it holds no state of optimizers"),
        ("ddp.pth", {}, "it holds no state of optimizers"),
    ],
)
def test_what_does_not_fit_leaves_the_weights(
    ours: Make,
    theirs_file: Path,
    name: str,
    arguments: dict[str, Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = theirs_file.parent
    weights = torch.load(theirs_file)["state_dict"]
    torch.save(weights, folder / "raw.pth")
    torch.save({f"module.{key}": value for key, value in weights.items()}, folder / "ddp.pth")
    if name == "two.ckpt":
        fits = trainer(1)
        fits.fit(theirs.Net(kind="two"), datamodule=theirs.Data())
        fits.save_checkpoint(folder / name)
        weights = torch.load(folder / name)["state_dict"]
    built = ours("run", folder / name, **arguments)
    tasks.train(built)
    assert why in warned(caplog)
    control = theirs.Net(**arguments)
    control.load_state_dict(weights)
    trainer(4).fit(control, datamodule=theirs.Data())
    assert same(built.module, control)


def test_names_with_and_without_those_of_compile(ours: Make, tmp_path: Path) -> None:
    for compiled in (True, False):
        given = theirs.Net(compiled=compiled)
        torch.save(given.state_dict(), tmp_path / "w.pth")
        found = tasks.test(ours("run", compiled=not compiled), str(tmp_path / "w.pth"))
        (control, _) = trainer(1).test(given, datamodule=theirs.Data(), verbose=False)
        assert found["loss/dataloader_idx_0"] == control["loss/dataloader_idx_0"]


def test_refusals_name_what_is_wrong(ours: Make, theirs_file: Path) -> None:
    for run in (tasks.train, functools.partial(tasks.test, checkpoint=str(theirs_file))):
        with pytest.raises(UserError, match=r"a.ckpt: its weights are not .*\n.*layers.0.weight"):
            run(ours("run", theirs_file, width=5))
    for longest in (1, 2):
        told = f"trainer.max_epochs: is {longest}, and a.ckpt .* for 2 epochs"
        with pytest.raises(UserError, match=told):
            tasks.train(ours("run", theirs_file, f"trainer.max_epochs={longest}"))


def test_a_module_of_hydras_gets_its_config(ours: Make) -> None:
    model = {"_target_": "theirs.Given", "optimizer": {"lr": 0.1}, "args": {"width": 2}}
    built = ours("run", None, model={**model, "_convert_": "none"})
    assert built.module.make.lr == 0.1 and built.module.layers.out_features == 2


# ------------------------------------------------------------------------------ from another run


def test_another_run_has_its_own_rate(
    ours: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "distdl.worker.initial_state")
    tasks.train(ours("first", None, "trainer.max_epochs=2"))
    start = tmp_path / "first/checkpoints/last.ckpt"
    built = ours("second", start, lr=0.001, decay=0.1)
    tasks.train(built)
    (group,) = built.trainer.optimizers[0].param_groups
    assert group["lr"] == pytest.approx(0.001 / 100)  # the schedule is where it was
    assert group["weight_decay"] == 0.1 and built.trainer.global_step == 16
    assert "continues with weight_decay 0.1 and not 0.0, lr 0.001 and not 0.01" in warned(caplog)
    for longest in ("max_epochs=2", "max_steps=8"):
        with pytest.raises(
            UserError, match=f"{longest.replace('=', ': is ')}, and .*last.ckpt was"
        ):
            tasks.train(ours("third", start, f"trainer.{longest}"))


def test_another_rate_where_no_schedule_tells(ours: Make, tmp_path: Path) -> None:
    """Nor does the rate in the file, which a module may have set by hand."""
    tasks.train(ours("first", None, "trainer.max_epochs=2", kind="bare"))
    start = tmp_path / "first/checkpoints/last.ckpt"
    for lr, expected in ((0.001, 0.001), (0.01, 0.01)):
        built = ours(f"second-{lr}", start, kind="bare", lr=lr)
        tasks.train(built)
        assert built.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(expected)


def test_a_resume_keeps_the_rates_of_its_run(ours: Make, tmp_path: Path) -> None:
    tasks.train(ours("run", None, "trainer.max_epochs=2"))
    built = ours("run", tmp_path / "run/checkpoints/last.ckpt", lr=0.001)
    tasks.train(built)
    assert built.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 / 100)


def test_objects_in_hyperparameters_need_trust(ours: Make, tmp_path: Path) -> None:
    make = functools.partial(torch.optim.SGD, lr=0.1)
    module = theirs.Given(make, Namespace(width=1))
    fits = trainer(1)
    fits.fit(module, datamodule=theirs.Data())
    fits.save_checkpoint(tmp_path / "given.ckpt")
    node = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}
    args = {"_target_": "argparse.Namespace", "width": 1}
    model = {"_target_": "theirs.Given", "optimizer": node, "args": args}
    with pytest.raises(UserError, match=r"functools.partial(.|\n)*checkpoint.trust_pickle=true"):
        tasks.train(ours("run", tmp_path / "given.ckpt", model=model))
    built = ours("run", tmp_path / "given.ckpt", "checkpoint.trust_pickle=true", model=model)
    tasks.train(built)
    assert built.trainer.global_step == 16
    file = tmp_path / "run/checkpoints/last.ckpt"
    again = theirs.Given.load_from_checkpoint(file, optimizer=make, args=Namespace(width=1))
    assert same(again, built.module)


def test_test_counts_each_loader(ours: Make, theirs_file: Path) -> None:
    found = tasks.test(ours("run"), str(theirs_file))
    module = theirs.Net.load_from_checkpoint(theirs_file)
    control = trainer(1).test(module, datamodule=theirs.Data(), verbose=False)
    assert found == {k: v for each in control for k, v in each.items()} and len(found) == 2


@pytest.mark.parametrize("dry", [True, False])
def test_the_end_advises_to_go_on_where_there_is_something(
    ours: Make, dry: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    built = ours("run", None, f"trainer.fast_dev_run={dry}")
    tasks.train(built)
    summary.print_end(built, {}, [], 0)
    assert ("distdl resume" in capsys.readouterr().out) is not dry


# ---------------------------------------------------------------------------------- to Lightning


def test_the_average_is_what_lightning_loads(ours: Make, tmp_path: Path) -> None:
    built = ours("run", None, "callbacks=ema")
    tasks.train(built)  # whose end puts the average into the module
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
trainer.save_checkpoint("on.ckpt")
"""


def test_a_plain_script_goes_on_from_ours(ours: Make, tmp_path: Path) -> None:
    built = ours("run", None, "checkpoint.keep_last=9", width=3)
    tasks.train(built)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env=variables(PYTHONPATH=str(ROOT / "tests/unit")),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    on = torch.load(tmp_path / "on.ckpt")["state_dict"]
    assert all(torch.equal(on[key], value) for key, value in built.module.state_dict().items())
