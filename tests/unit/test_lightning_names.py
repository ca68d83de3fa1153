"""`pytorch_lightning` and `lightning_fabric` are lightning's own modules, in whatever way they are
imported, and what only Lightning 1 had is told before a start."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_config import in_process, refusals, sample

from distdl.util import lightning_names
from distdl.validation import lightning_1

# A library of somebody's, which derives from the other name in several ways.
LIBRARY = """
import pytorch_lightning as pl
import pytorch_lightning.loggers.tensorboard
import lightning_fabric
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning import LightningDataModule, Trainer
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.utilities import rank_zero as zero
from torch import nn

class Net(pl.LightningModule):
    def __init__(self, loss=None): super().__init__()
    def training_step(self, batch, batch_idx): ...
    def configure_optimizers(self): ...

class Loss(nn.Module): ...

class Data(LightningDataModule):
    def train_dataloader(self): ...

class Stop(pl.callbacks.EarlyStopping):
    def __init__(self):
        super().__init__(monitor="x")
"""


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the finder, and as if none of its names had been imported yet."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    lightning_names.serve()
    for name in [name for name in sys.modules if lightning_names.real_name(name)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library, and a second pytorch_lightning that must not be loaded."""
    (tmp_path / "some_library.py").write_text(LIBRARY)
    for name in lightning_names.NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the second copy')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("some_library", None)


def test_every_way_to_import_it_leads_to_lightnings_own(library: Path) -> None:
    import lightning
    import lightning.pytorch as real

    spec = real.__spec__
    found = importlib.import_module("some_library")
    assert found.pl is real and found.lightning_fabric is lightning.fabric
    assert found.pytorch_lightning.loggers.tensorboard is real.loggers.tensorboard
    assert found.EarlyStopping is real.callbacks.EarlyStopping and found.Trainer is real.Trainer
    assert found.zero is real.utilities.rank_zero
    assert issubclass(found.Net, real.LightningModule)
    # The modules themselves are as they were: reload, pickle and relative imports go by these.
    assert real.__spec__ is spec and real.__name__ == spec.name == "lightning.pytorch"
    assert real.loggers.tensorboard.__spec__.name == "lightning.pytorch.loggers.tensorboard"
    assert importlib.reload(importlib.import_module("pytorch_lightning.callbacks.timer"))


def test_nothing_is_imported_before_somebody_asks() -> None:
    code = (
        "import sys, importlib.util, distdl.__main__\n"
        "print(importlib.util.find_spec('pytorch_lightning') is not None, end=' ')\n"
        "print({'torch', 'lightning', 'pytorch_lightning'} & {*sys.modules})"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "True set()"


def test_what_is_not_there_is_told_by_the_name_that_was_written(library: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'pytorch_lightning\.metrics'"):
        importlib.import_module("pytorch_lightning.metrics")
    assert importlib.util.find_spec("pytorch_lightning.metrics") is None
    assert importlib.util.find_spec("pytorch_lightning.tuner") is not None
    with pytest.raises(ImportError, match="nosuch"):
        exec("from pytorch_lightning import nosuch")
    with pytest.raises(ModuleNotFoundError, match="is not a package"):
        importlib.import_module("pytorch_lightning.callbacks.timer.x")


def test_its_first_use_is_logged_once(library: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="distdl"):
        importlib.import_module("pytorch_lightning.callbacks")
        importlib.import_module("pytorch_lightning.loggers")
    (record,) = caplog.records
    assert record.message.startswith("import pytorch_lightning: served by lightning.pytorch 2.")


def test_a_second_copy_that_was_there_before_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import lightning.pytorch as real

    for name in ("pytorch_lightning", "pytorch_lightning.callbacks"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    lightning_names.serve()
    assert importlib.import_module("pytorch_lightning.callbacks") is real.callbacks
    warned = [r.message for r in caplog.records if r.levelname == "WARNING"]
    (message,) = warned
    assert "pytorch_lightning was imported before distdl began" in message
    caplog.clear()
    lightning_names.serve()
    assert not caplog.records
    assert sum(isinstance(f, lightning_names.Names) for f in sys.meta_path) == 1


def test_a_spawned_process_has_it_before_the_data_set_that_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_data.py").write_text(
        "import importlib.util\n"
        "FOUND = type(importlib.util.find_spec('pytorch_lightning').loader).__module__\n"
        "class Data:\n"
        "    def __call__(self):\n"
        "        assert FOUND == 'distdl.util.lightning_names', FOUND\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    data = importlib.import_module("some_data").Data()
    child = multiprocessing.get_context("spawn").Process(target=data)
    child.start()
    child.join()
    assert child.exitcode == 0


def problems(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, root: Path | None = None
) -> list[str]:
    """What both stages refuse; the child's work is done in this process."""
    in_process(monkeypatch)
    return refusals(sample(changes), root)


def test_a_librarys_classes_are_components_once_it_is_allowed(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "project"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    changes: dict[str, Any] = {
        "model": {"_target_": "some_library.Net", "loss": {"_target_": "some_library.Loss"}},
        "data": {"_target_": "some_library.Data"},
        "callbacks.early_stopping": {
            "_target_": "pytorch_lightning.callbacks.EarlyStopping",
            "monitor": "loss",
        },
        "callbacks.stop": {"_target_": "some_library.Stop"},
        "checkpoint.monitor": None,
    }
    refused = problems(changes, monkeypatch, elsewhere)
    assert len(refused) == 4
    assert all("if you trust it: project.allow=[some_library]" in problem for problem in refused)
    allowed = {**changes, "project.allow": ["some_library"]}
    assert problems(allowed, monkeypatch, elsewhere) == []


OLD = """
import pytorch_lightning as pl

class Net(pl.LightningModule):
    def training_step(self, batch, batch_idx, optimizer_idx): ...
    def training_epoch_end(self, outputs): ...
    def validation_step_end(self, outputs): ...
    def on_epoch_end(self): ...
    def on_train_epoch_end(self): self.on_epoch_end()
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_idx, closure=None): ...
    def on_train_epoch_start(self, *outputs, unused=None): ...

class Watch(pl.Callback):
    def on_batch_end(self, trainer, pl_module): ...
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx): ...
    def on_train_epoch_end(self, trainer, pl_module, outputs=None): ...

class Data(pl.LightningDataModule):
    def train_dataloader(self): ...
    def on_train_dataloader(self): ...
"""


def test_what_lightning_2_calls_no_more_is_refused_with_what_replaced_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_lightning_1.py").write_text(OLD)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "of_lightning_1", raising=False)
    changes: dict[str, Any] = {
        "model": {"_target_": "of_lightning_1.Net"},
        "data": {"_target_": "of_lightning_1.Data"},
        "callbacks.watch": {"_target_": "of_lightning_1.Watch"},
    }
    gone, takes = "is a hook of Lightning 1, and nobody calls it", "which Lightning 2 does not pass"
    by_hand = "self.automatic_optimization = False, and step each of self.optimizers()"
    assert problems(changes, monkeypatch, tmp_path) == [
        f"callbacks.watch._target_: Watch.on_batch_end {gone}\n    it is now on_train_batch_end",
        f"callbacks.watch._target_: Watch.on_train_batch_end takes dataloader_idx, {takes}\n"
        "    leave it out",
        f"data._target_: Data.on_train_dataloader {gone}\n    it is now setup",
        f"model._target_: Net.optimizer_step takes optimizer_idx, {takes}\n    {by_hand}",
        f"model._target_: Net.training_epoch_end {gone}\n    it is now on_train_epoch_end, "
        "for which the step keeps its outputs in self",
        f"model._target_: Net.training_step takes optimizer_idx, {takes}\n    {by_hand}",
        f"model._target_: Net.validation_step_end {gone}\n    it is now the end of the step itself",
    ]
    # What nobody calls may stand in a library for older versions, and the user cannot change it.
    allowed = {**changes, "project.allow": ["of_lightning_1"]}
    refused = problems(allowed, monkeypatch, tmp_path / "nothing")
    assert len(refused) == 4 and not any("nobody calls" in p for p in refused if "epoch" not in p)


def test_lightnings_own_classes_and_ours_have_nothing_of_lightning_1() -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.demos import boring_classes, mnist_datamodule

    from distdl import callbacks, models

    modules = (pl.callbacks, boring_classes, mnist_datamodule, callbacks, models)
    bases = (pl.LightningModule, pl.LightningDataModule, pl.Callback)
    looked = 0
    for found in (value for module in modules for value in vars(module).values()):
        for base in (b for b in bases if isinstance(found, type) and issubclass(found, b)):
            assert list(lightning_1.problems(found, base, lambda name: True)) == []
            looked += 1
    assert looked > 30


@pytest.mark.parametrize(
    ("line", "now"),
    [
        ("from pytorch_lightning.metrics import Accuracy", "torchmetrics"),
        ("import lightning.pytorch.metrics", "torchmetrics"),
        ("import pytorch_lightning as pl; pl.metrics", "torchmetrics"),
        ("from pytorch_lightning.plugins import DDPPlugin", "lightning.pytorch.strategies"),
        ("from pytorch_lightning.core.nothing import x", ""),
    ],
)
def test_an_import_that_only_lightning_1_has_is_told_with_what_it_is_now(
    line: str, now: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imports_old.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"model": {"_target_": "imports_old.Net"}}
    (problem,) = problems(changes, monkeypatch, tmp_path)
    assert "imports_old.Net cannot be imported: " in problem
    told = f"it is now {now}; " if now else ""
    assert problem.endswith(f"\n    {told}see {tmp_path / 'imports_old.py'}, line 1")


def test_what_is_said_to_be_there_now_is() -> None:
    from distdl.validation.kinds import locate

    for now in lightning_1.IMPORTS.values():
        assert now in ("list", "torchmetrics") or locate(now)
