"""What `distdl.loops` takes for granted of Lightning's loops and connectors, one test for each.

A test that fails after an upgrade names what to look at. `make lightnings` runs this file with the
oldest Lightning that is allowed and with the newest.
"""

from __future__ import annotations

import ast
import inspect
import signal
import traceback
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loops import _EvaluationLoop, _FitLoop, _TrainingEpochLoop
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.exceptions import _TunerExitException
from torch.utils.data import DataLoader

from distdl.loops import connectors, fit, trainer, validation
from distdl.loops.epoch_metrics import SETTINGS, STATES
from distdl.loops.small_state import METRICS
from tests.conftest import ROOT

BATCHES, EPOCHS = 3, 2
OVERRIDDEN = {
    (ours, base, name)
    for ours, base, names in (
        (
            fit.EpochLoop,
            _TrainingEpochLoop,
            "done on_advance_end _on_before_fetch _broadcast_sigterm_tensor _should_check_val_fx",
        ),
        (fit.FitLoop, _FitLoop, "on_run_start advance on_advance_end _iteration_based_training"),
        (
            validation.ValidationLoop,
            _EvaluationLoop,
            "run reset _on_evaluation_start _evaluation_step _store_dataloader_outputs on_run_end",
        ),
        (
            connectors.CheckpointConnector,
            _CheckpointConnector,
            "restore_model restore_training_state",
        ),
        (connectors.DataConnector, _DataConnector, "_prepare_dataloader"),
        (connectors.SignalConnector, _SignalConnector, "register_signal_handlers"),
        (trainer.Trainer, pl.Trainer, "save_checkpoint fit"),
    )
    for name in names.split()
}
OWN_NAMES = {
    "_before",
    "_done_before",
    "_states",
    "_states_before",
    "_run_hook",
    "_run_hooks_at_the_end",
    "_is_due",
    "_of_all",
    "_validates",
}


class Net(BoringModel):
    """Logs what it trains with, and records who called its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, set[str]]] = []

    def note(self, hook: str) -> None:
        callers = {
            f"{frame.f_locals['self'].__class__.__name__}.{frame.f_code.co_name}"
            for frame, _ in traceback.walk_stack(None)
            if "self" in frame.f_locals
        }
        self.seen.append((hook, callers))

    def training_step(self, batch, batch_idx):
        self.log("mean", float(batch_idx), on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.note("validation_step")

    def on_train_epoch_end(self):
        self.note("on_train_epoch_end")


def lightning(module: pl.LightningModule | None = None, **more: Any) -> tuple[pl.Trainer, Any]:
    """Lightning's own Trainer after a training."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **dict.fromkeys(off, False)}
    made = pl.Trainer(accelerator="cpu", **{**options, **more})
    module = module or Net()
    made.fit(module, rows(), rows())
    return made, module


def rows() -> Any:
    return DataLoader(RandomDataset(32, BATCHES))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, Any]]]:
    """Records the calls of methods, in their order, with what `look` says before and after."""

    def record(kind: type, *names: str, look: Callable[[Any], Any] = id) -> list[tuple[str, Any]]:
        done: list[tuple[str, Any]] = []
        for name in names:
            original = getattr(kind, name)

            def called(self, *args, _name=name, _original=original, **more):
                before = look(self)
                result = _original(self, *args, **more)
                done.append((_name, (before, look(self))))
                return result

            monkeypatch.setattr(kind, name, called)
        return done

    return record


def function(owner: type, name: str) -> Callable[..., Any]:
    """A method, or what a property calls."""
    member = getattr(owner, name)
    return member.fget if isinstance(member, property) else member


@pytest.mark.parametrize(("ours", "base", "name"), sorted(OVERRIDDEN, key=str))
def test_what_is_overridden_is_there_with_these_arguments(ours, base, name) -> None:
    assert name in vars(ours), "not overridden any more"
    theirs = [*inspect.signature(function(base, name)).parameters.values()]
    own = [*inspect.signature(function(ours, name)).parameters.values()]
    if not any(each.kind == each.VAR_POSITIONAL for each in own + theirs):
        assert [each.name for each in own] == [each.name for each in theirs]


def private_names() -> set[str]:
    """Those that the files of loops/ use."""
    trees = (
        ast.parse(each.read_text("utf-8")) for each in (ROOT / "src/distdl/loops").glob("*.py")
    )
    nodes = (node for tree in trees for node in ast.walk(tree))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    return private - OWN_NAMES - {"_call_callback_hooks", "_call_strategy_hook"}


@pytest.fixture(scope="module")
def trained() -> pl.Trainer:
    return lightning()[0]


@pytest.mark.parametrize("name", sorted(private_names()))
def test_a_private_name_is_still_there(name: str, trained) -> None:
    loop = trained.fit_loop.epoch_loop
    begun = CombinedLoader([rows()], "max_size_cycle")
    iter(begun)
    metric = next(iter(loop._results.result_metrics))
    owners = [trained, trained.fit_loop, loop, loop.val_loop, metric, trained.lightning_module]
    owners += [value for key, value in vars(trained).items() if key.endswith("_connector")]
    owners += [pl.trainer.call, torch.nn.Module(), begun, begun._iterator]
    assert any(hasattr(owner, name) for owner in owners)


def test_each_batch_is_followed_by_one_on_advance_end(calls) -> None:
    done = calls(_TrainingEpochLoop, "advance", "on_advance_end")
    lightning()
    assert [name for name, _ in done] == ["advance", "on_advance_end"] * BATCHES * EPOCHS


def test_a_validation_runs_inside_on_advance_end_of_the_batches() -> None:
    seen = [callers for hook, callers in lightning()[1].seen if hook == "validation_step"]
    assert len(seen) == BATCHES * EPOCHS
    assert all("_TrainingEpochLoop.on_advance_end" in callers for callers in seen)


def test_the_hooks_at_an_epochs_end_run_inside_on_advance_end_of_the_epochs() -> None:
    seen = [callers for hook, callers in lightning()[1].seen if hook == "on_train_epoch_end"]
    assert len(seen) == EPOCHS
    assert all("_FitLoop.on_advance_end" in callers for callers in seen)


def test_one_exception_leaves_a_fit_torn_down_and_neither_failed_nor_at_its_end() -> None:
    class Leaves(Net):
        def on_train_epoch_end(self):
            raise _TunerExitException

        def teardown(self, stage):
            self.note("teardown")

        def on_train_end(self):
            self.note("on_train_end")

        def on_exception(self, exception):
            self.note("on_exception")

    made, module = lightning(Leaves())
    assert {hook for hook, _ in module.seen} == {"validation_step", "teardown"}
    assert made.fit_loop.epoch_progress.current.completed == 0


def test_an_epoch_is_completed_at_the_end_of_on_advance_end(calls) -> None:
    look: Callable[[Any], Any] = lambda loop: loop.epoch_progress.current.completed  # noqa: E731
    done = calls(_FitLoop, "on_advance_end", look=look)
    lightning()
    assert [change for _, change in done] == [(0, 1), (1, 2)]


def test_that_a_validation_is_due_may_be_asked_at_any_time(calls) -> None:
    done = calls(_TrainingEpochLoop, "_should_check_val_fx", look=lambda loop: loop.state_dict())
    lightning()
    assert done
    assert all(before == after for _, (before, after) in done)


def test_skip_next_val_skips_the_rest_of_a_step(calls, monkeypatch) -> None:
    original = _TrainingEpochLoop.advance

    def advance(self, fetcher):
        original(self, fetcher)
        self._skip_next_val = True

    monkeypatch.setattr(_TrainingEpochLoop, "advance", advance)
    made, module = lightning()
    assert not [hook for hook, _ in module.seen if hook == "validation_step"]
    assert made.fit_loop.epoch_loop._skip_next_val is False


def test_the_flag_of_a_signal_is_broadcast_in_advance() -> None:
    """Where `_broadcast_sigterm_tensor` is called, and nowhere else."""
    source = inspect.getsource(_TrainingEpochLoop)
    assert source.count("self._broadcast_sigterm_tensor()") == 1
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_with_max_steps_a_loop_always_restarts() -> None:
    """Why `_iteration_based_training` is overridden."""
    made = pl.Trainer(accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False)
    made.fit_loop.restarting = False
    assert made.fit_loop.restarting is True
    ours = trainer.Trainer(accelerator="cpu", max_steps=5, logger=False, enable_checkpointing=False)
    ours.fit_loop.restarting = False
    assert ours.fit_loop.restarting is False


def test_stop_iteration_ends_an_evaluation_with_its_hooks(calls, monkeypatch) -> None:
    done = calls(_EvaluationLoop, "on_run_end")
    original = _EvaluationLoop._evaluation_step

    def once(self, *args):
        original(self, *args)
        raise StopIteration

    monkeypatch.setattr(_EvaluationLoop, "_evaluation_step", once)
    _, module = lightning()
    assert len([hook for hook, _ in module.seen if hook == "validation_step"]) == EPOCHS
    assert len(done) == EPOCHS


def test_an_evaluation_remembers_which_layers_trained(monkeypatch) -> None:
    modes = []
    original = _EvaluationLoop._evaluation_step

    def noted(self, *args):
        modes.append(dict(self._module_mode.mode))
        original(self, *args)

    monkeypatch.setattr(_EvaluationLoop, "_evaluation_step", noted)
    lightning()
    assert modes[0]["layer"] is True


def test_weights_are_restored_before_the_rest_and_the_file_is_at_hand(tmp_path, calls) -> None:
    made, _ = lightning()
    made.save_checkpoint(tmp_path / "a.ckpt")
    look: Callable[[Any], Any] = lambda connector: "state_dict" in connector._loaded_checkpoint  # noqa: E731
    done = calls(_CheckpointConnector, "restore_model", "restore_training_state", look=look)
    fresh = pl.Trainer(accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False)
    fresh.fit(Net(), rows(), rows(), ckpt_path=tmp_path / "a.ckpt")
    assert done == [("restore_model", (True, True)), ("restore_training_state", (True, True))]


def test_a_dumped_checkpoint_has_the_progress_of_the_loops(trained) -> None:
    loops = trained._checkpoint_connector.dump_checkpoint(weights_only=False)["loops"]["fit_loop"]
    for name in ("epoch_loop.val_loop.batch_progress", "epoch_progress"):
        assert {"total", "current"} <= loops[name].keys()
        assert {"ready", "started", "processed", "completed"} == loops[name]["total"].keys()


def test_a_loader_of_a_prediction_is_prepared_with_its_mode(calls) -> None:
    seen: list[Any] = []
    ours = trainer.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    ours.look_at_loader(seen.append)
    loader = rows()
    ours.predict(Net(), loader)
    assert seen == [loader]


def test_handlers_are_installed_by_register_signal_handlers_alone() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    inside: dict[int, Any] = {}

    class Looks(Net):
        def on_train_start(self):
            inside.update({number: signal.getsignal(number) for number in before})

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    ours = trainer.Trainer(accelerator="cpu", max_steps=1, **dict.fromkeys(off, False))
    ours.fit(Looks(), rows())
    assert inside == before


def test_sums_of_metrics_are_where_they_are_read(trained) -> None:
    metrics = trained.fit_loop.epoch_loop._results.result_metrics
    (mean,) = [each for each in metrics if each.meta.name == "mean"]
    assert {name for name in SETTINGS if hasattr(mean.meta, name)} == {*SETTINGS}
    assert {name for name in STATES if hasattr(mean, name)} == {*STATES}
    assert mean.meta.sync.should is False
    assert mean.meta.reduce_fx is torch.mean


def test_last_metrics_are_where_they_are_put_back(trained) -> None:
    assert {*METRICS} <= vars(trained._logger_connector).keys()
