"""Names of Lightning's: `pytorch_lightning` and `lightning_fabric` are lightning's own modules, in
whatever way they are imported; what only Lightning 1 had is reported before a start; and its names
of strategies are known."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import re
import sys

import lightning
import lightning.pytorch as pl
import pytest
from lightning.pytorch.strategies import StrategyRegistry

from distdl.config import compose
from distdl.config.hints import lightning_1
from distdl.config.hints.words import strategy_for
from distdl.util import lightning_names
from distdl.validation.kinds import locate
from tests.unit.sample_config import check_parts, node, problems, rows

# A library of somebody's, which derives from the other name in several ways.
LIBRARY = """
import pytorch_lightning as pl
import pytorch_lightning.loggers.tensorboard
import lightning_fabric
from lightning_fabric.utilities.seed import seed_everything
from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.utilities import rank_zero as zero
class Net(pl.LightningModule): ...
"""
OLD = """
import pytorch_lightning as pl
class Net(pl.LightningModule):
    def training_step(self, batch, batch_idx, optimizer_idx): ...
    def training_epoch_end(self, outputs): ...
    def on_epoch_end(self): ...
    def on_train_epoch_end(self): self.on_epoch_end()
    def on_train_epoch_start(self, *outputs, unused=None): ...
class Watch(pl.Callback):
    def on_batch_end(self, trainer, pl_module): ...
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx): ...
    def on_train_epoch_end(self, trainer, pl_module, outputs=None): ...
class Data(pl.LightningDataModule):
    def train_dataloader(self): ...
    def on_train_dataloader(self): ...
"""
DATA = """
import importlib.util
LOADER = type(importlib.util.find_spec('pytorch_lightning').loader).__module__
class Data:
    def __call__(self):
        assert LOADER == 'distdl.util.lightning_names', LOADER
"""
FILES = {"some_library": LIBRARY, "of_lightning_1": OLD, "some_data": DATA}


@pytest.fixture(autouse=True)
def library(tmp_path, tmp_path_factory, monkeypatch):
    """The finder, as if none of its names had been imported yet, a library, and second copies that
    must not be loaded."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    lightning_names.serve()
    for name in [name for name in sys.modules if lightning_names.real_name(name) or name in FILES]:
        monkeypatch.delitem(sys.modules, name)
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    copies = tmp_path_factory.mktemp("copies")
    for name in lightning_names.NAMES:
        (copies / name).mkdir()
        (copies / name / "__init__.py").write_text("raise RuntimeError('the second copy')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(copies))
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name, None)


def test_every_way_to_import_it_leads_to_lightnings_own(caplog):
    spec = pl.__spec__
    with caplog.at_level(logging.INFO, logger="distdl"):
        library = importlib.import_module("some_library")
    (first,) = [r.message for r in caplog.records if "import pytorch_lightning: " in r.message]
    assert first.startswith("import pytorch_lightning: served by lightning.pytorch 2.")
    assert library.pl is pl
    assert library.lightning_fabric is lightning.fabric
    assert library.pytorch_lightning.loggers.tensorboard is pl.loggers.tensorboard
    assert library.EarlyStopping is pl.callbacks.EarlyStopping
    assert library.Trainer is pl.Trainer
    assert library.zero is pl.utilities.rank_zero
    # The modules themselves are as they were: reload, pickle and relative imports go by these.
    assert pl.__spec__ is spec
    assert pl.__name__ == spec.name == "lightning.pytorch"
    assert importlib.reload(importlib.import_module("pytorch_lightning.callbacks.timer"))
    # What is missing is reported by the name that was written.
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'pytorch_lightning\.metrics'"):
        importlib.import_module("pytorch_lightning.metrics")


def test_a_second_copy_that_was_there_before_is_replaced_with_a_warning(monkeypatch, caplog):
    for name in ("pytorch_lightning", "pytorch_lightning.callbacks"):
        monkeypatch.setitem(sys.modules, name, type(sys)(name))
    lightning_names.serve()
    assert importlib.import_module("pytorch_lightning.callbacks") is pl.callbacks
    (message,) = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert "pytorch_lightning was imported before distdl" in message


def test_a_spawned_process_has_it_before_the_data_set_that_it_is_sent():
    data = importlib.import_module("some_data").Data()
    child = multiprocessing.get_context("spawn").Process(target=data)
    child.start()
    child.join()
    assert child.exitcode == 0


REMOVED = """
callbacks.watch | Watch.on_batch_end is a hook of Lightning 1, and nobody calls | on_train_batch_end
callbacks.watch | Watch.on_train_batch_end takes dataloader_idx, which Lightning 2 | leave it out
data | Data.on_train_dataloader is a hook of | it is now setup
model | Net.training_epoch_end is a hook | on_train_epoch_end; keep the outputs of the steps
model | Net.training_step takes optimizer_idx | self.automatic_optimization = False
"""


def test_what_lightning_2_calls_no_more_is_refused_with_what_replaced_it(tmp_path):
    names = {"model": "Net", "data": "Data", "callbacks.watch": "Watch"}
    changes = {path: node(f"of_lightning_1.{name}") for path, name in names.items()}
    refused = problems(changes, tmp_path)
    for problem, (path, parts) in zip(refused, rows(REMOVED), strict=True):
        assert problem.path == f"{path}._target_"
        check_parts(str(problem), parts)
    # What nobody calls may stand in a library for older versions, and the user cannot change it.
    allowed = problems({**changes, "project.allow": ["of_lightning_1"]}, tmp_path / "nothing")
    assert len(allowed) == 3
    assert not any("nobody calls" in p.what for p in allowed if "epoch" not in p.what)


IMPORTS = """
from pytorch_lightning.metrics import Accuracy | it is now torchmetrics; see
import pytorch_lightning as pl; pl.metrics | it is now torchmetrics; see
from pytorch_lightning.plugins import DDPPlugin | it is now lightning.pytorch.strategies; see
"""


@pytest.mark.parametrize(("line", "parts"), rows(IMPORTS))
def test_an_import_that_only_lightning_1_has_is_reported(line, parts, tmp_path):
    (tmp_path / "of_lightning_1.py").write_text(f"{line}\n")
    (problem,) = problems({"model": node("of_lightning_1.Net")}, tmp_path)
    assert "of_lightning_1.Net cannot be imported: " in problem.what
    assert problem.remedy == f"{parts[0]} {tmp_path / 'of_lightning_1.py'}, line 1"
    assert all(locate(n) for n in lightning_1.IMPORTS.values() if n not in ("list", "torchmetrics"))


def test_names_of_strategies_lead_to_options_of_ours():
    for name in sorted(StrategyRegistry.available_strategies()):
        ours = strategy_for(name)
        assert bool(ours) != bool(re.search("xla|tpu|nvme", name))
        compose.compose([word for word in ours.split() if "=" in word])


def test_another_thread_may_import_meanwhile(monkeypatch):
    """The classes are checked while a thread imports what the run will need."""

    def real_name(name: str) -> str:
        monkeypatch.setitem(sys.modules, f"imported_beside_{name}", sys)
        return ""

    monkeypatch.setattr(lightning_names, "real_name", real_name)
    lightning_names.serve()
