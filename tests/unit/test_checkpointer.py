"""When a checkpoint is written, and which of them is the best."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from distdl.callbacks import Checkpointer, checkpointer
from distdl.checkpoint.saving import Saver
from distdl.distributed import agreement
from distdl.runs.checkpoints import CheckpointStore, damage_of, manifest_of
from distdl.runs.records import journal_path, read
from distdl.tracking.journal import Journal
from distdl.util.errors import UserError
from tests.unit import checkpointing
from tests.unit.checkpointing import checkpointer as made
from tests.unit.checkpointing import numbers

INF, NAN = math.inf, math.nan


# -------------------------------------------------------------------------- by time, on two ranks


class Wire:
    """The all-reduce of two ranks that take turns in this thread: each waits a step later, when
    the other has sent its flags too."""

    def __init__(self) -> None:
        self.sent: list[list[tuple[Tensor, Tensor]]] = []
        self.count = [0, 0]
        self.rank = 0

    def all_reduce(self, flags: Tensor, *, op: Any, async_op: bool) -> Any:
        number = self.count[self.rank]
        self.count[self.rank] += 1
        if number == len(self.sent):
            self.sent.append([])
        both = self.sent[number]
        both.append((flags, flags.clone()))

        def wait() -> None:
            assert len(both) == 2, "a rank waits for what the other has not sent"
            flags.copy_(torch.stack([kept for _, kept in both]).amax(0))

        return SimpleNamespace(wait=wait)


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[int]]]:
    """Two ranks of 30 steps, a second each: after which steps each of them saved."""

    def run(steps: int = 30, **more: Any) -> list[list[int]]:
        wire, now = Wire(), [0.0]
        monkeypatch.setattr(agreement.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(agreement.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(agreement.dist, "all_reduce", wire.all_reduce)
        monkeypatch.setattr(checkpointer.time, "monotonic", lambda: now[0])
        ranks = []
        for rank in range(2):
            loop = SimpleNamespace(_num_ready_batches_reached=lambda: False)
            trainer: Any = SimpleNamespace(
                global_rank=rank,
                global_step=0,
                current_epoch=0,
                world_size=2,
                callback_metrics={},
                fast_dev_run=False,
                loggers=[],
                lightning_module=SimpleNamespace(automatic_optimization=True),
                fit_loop=SimpleNamespace(epoch_loop=loop),
            )
            ours = made(tmp_path / "checkpoints", **more)
            ours._agreement = agreement.Agreement(3)
            saved: list[int] = []
            ours.saver.save = (  # type: ignore[method-assign]
                lambda trainer, name, saved=saved, **facts: saved.append(facts["step"])
            )
            ranks.append((trainer, ours, saved))
        for step in range(1, steps + 1):
            now[0] = float(step)
            for rank, (trainer, ours, _) in enumerate(ranks):
                wire.rank, trainer.global_step = rank, step
                ours._batch_ended(trainer)
        return [saved for _, _, saved in ranks]

    return run


def test_what_is_due_is_saved_once_on_all_ranks(saves) -> None:
    first, second = saves(every_minutes=10 / 60)
    assert first == second == [11, 22], "asked for at 10 and 21, agreed on a step later"


@pytest.mark.parametrize("every", [10, 11, 12])
def test_what_is_due_by_steps_as_well_is_saved_once(saves, every: int) -> None:
    first, second = saves(every_minutes=10 / 60, every_n_steps=every)
    assert first == second
    gaps = [b - a for a, b in zip([0, *first], first, strict=False)]
    assert min(gaps) > 1, first


# ------------------------------------------------------------------------------------- the best


class Scripted(LightningModule):
    """Logs, in each validation, the next of some values."""

    def __init__(self, name: str, values: list[float]) -> None:
        super().__init__()
        self.name, self.values = name, values
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.weight.sum()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log(self.name, 0.0 if self.trainer.sanity_checking else self.values.pop(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(
    folder: Path, values: list[float], *, resume: Path | None = None, mode: str = "max", **more: Any
) -> Checkpointer:
    arguments = {"monitor": "val/acc1", "name": "val/acc1", "epochs": len(values), **more}
    ours = made(folder / "checkpoints", monitor=arguments.pop("monitor"), mode=mode)
    others = arguments.pop("callbacks", [])
    module = arguments.pop("module", Scripted)(arguments.pop("name"), values)
    checkpointing.fit(
        module,
        [*others, ours],
        *(numbers(4), numbers(4)),
        resume=resume,
        max_epochs=arguments.pop("epochs"),
        default_root_dir=folder,
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in others),
        limit_val_batches=1,
        **{"num_sanity_val_steps": 0, **arguments},
    )
    return ours


class Draws(Scripted):
    drawn: ClassVar[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)


class EndsEarly(Callback):
    """As a Timer does, `trainer.max_time`'s too."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


def test_a_resume_of_what_was_cut_draws_the_same_numbers(tmp_path: Path) -> None:
    """Lightning validates where a time limit ends it, and so moves the generators."""
    torch.manual_seed(0)
    fit(tmp_path / "whole", [0.1], module=Draws)
    whole = Draws.drawn.copy()
    torch.manual_seed(0)
    Draws.drawn.clear()
    fit(tmp_path / "cut", [0.1], module=Draws, callbacks=[EndsEarly()])
    assert Draws.drawn == whole[:2]
    newest = CheckpointStore(tmp_path / "cut/checkpoints").newest()
    fit(tmp_path / "cut", [0.1], module=Draws, resume=newest)
    assert Draws.drawn == whole and len(whole) == 4


class LogsEachStep(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.loggers[0].log_metrics({"x": 1.0}, trainer.global_step)


def test_what_a_checkpoint_covers_stands_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9 a run goes on behind the checkpoint, and logs no step before it again."""
    monkeypatch.setattr("distdl.tracking.journal.FLUSH_SECONDS", 3600)  # its thread writes nothing
    journal = Journal(journal_path(tmp_path), tmp_path)
    save, written = Saver.save, []

    def looks(self: Saver, *args: Any, **kw: Any) -> None:
        written.append([r.step for r in read(journal_path(tmp_path)) if "x" in r.metrics])
        save(self, *args, **kw)

    monkeypatch.setattr(Saver, "save", looks)
    fit(tmp_path, [0.1, 0.2], logger=journal, callbacks=[LogsEachStep()])
    assert written == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]]


def best(folder: Path) -> str | None:
    manifest = manifest_of(folder / "checkpoints/best.ckpt")
    return json.loads(manifest.read_text())["alias_of"] if manifest.exists() else None


@pytest.mark.parametrize(
    ("values", "mode", "chosen"),
    [
        ([NAN, 0.5, NAN, 0.7], "max", 3),
        ([0.5, NAN, 0.3], "max", 0),
        ([NAN, 2.0, 1.0], "min", 2),
        ([-INF, 0.5], "max", 1),
        ([INF, 0.5], "max", 0),
        ([INF, 0.5], "min", 1),
        ([NAN], "max", None),
    ],
)
def test_what_is_no_number_is_never_the_best(tmp_path, values, mode, chosen) -> None:
    fit(tmp_path, values, mode=mode)
    assert best(tmp_path) == (None if chosen is None else f"epoch_{chosen:03d}.ckpt")


def test_a_resume_that_reads_nan_as_the_best(tmp_path: Path) -> None:
    fit(tmp_path, [0.5])
    file = tmp_path / "checkpoints/epoch_000.ckpt"
    state = torch.load(file, weights_only=True)
    state["distdl"]["best"] = NAN
    del state["distdl"]["monitor"]  # as distdl 0.1 wrote it
    torch.save(state, tmp_path / "old.ckpt")
    fit(tmp_path, [0.4], resume=tmp_path / "old.ckpt", epochs=2)
    assert best(tmp_path) == "epoch_001.ckpt"


def test_the_best_by_another_metric_is_none(tmp_path: Path) -> None:
    fit(tmp_path, [0.9])
    resume = {"resume": tmp_path / "checkpoints/epoch_000.ckpt", "epochs": 2}
    fit(tmp_path, [0.3], monitor="val/f1", name="val/f1", **resume)
    assert best(tmp_path) == "epoch_001.ckpt"


def test_a_metric_that_is_never_logged_ends_the_training(tmp_path: Path) -> None:
    """After the first validation, when all is saved; not with what the default is."""
    wrong, said = (
        {"monitor": "val/accuracy", "epochs": 6},
        r"is not logged.*\n.*did you mean val/acc1\?",
    )
    with pytest.raises(UserError, match=said) as e:
        fit(tmp_path / "epochs", [0.1] * 6, check_val_every_n_epoch=2, **wrong)
    assert e.value.exit_code == 2 and "checkpoint.monitor=val/acc1" in str(e.value)
    newest = CheckpointStore(tmp_path / "epochs/checkpoints").newest()
    assert newest is not None and newest.name == "epoch_001.ckpt"
    # It goes on from there under the right name.
    done = fit(tmp_path / "epochs", [0.2], resume=newest, epochs=4, check_val_every_n_epoch=2)
    assert best(tmp_path / "epochs") == "epoch_003.ckpt" and done.best.score == pytest.approx(0.2)

    with pytest.raises(UserError, match="is not logged"):
        fit(tmp_path / "inside", [0.1] * 6, val_check_interval=2, **wrong)
    newest = CheckpointStore(tmp_path / "inside/checkpoints").newest()
    assert newest is not None and newest.name == "epoch_000_step_00000002.ckpt"
    with pytest.raises(UserError, match="is not logged"):
        fit(tmp_path / "last", [0.1], **{**wrong, "epochs": 1})


def test_the_default_metric_is_no_ones_wish(tmp_path: Path, caplog) -> None:
    fit(tmp_path / "default", [0.1, 0.2], name="val/loss")
    assert caplog.text.count("checkpoint.monitor: val/acc1 is not logged") == 1
    caplog.clear()
    wrong = {"monitor": "val/accuracy", "epochs": 1}
    fit(tmp_path / "sanity", [], num_sanity_val_steps=1, check_val_every_n_epoch=5, **wrong)
    assert "did you mean val/acc1?" in caplog.text, "told in the sanity check"
    assert "no validation has run in this attempt" in caplog.text


# ------------------------------------------------------------------------------ beside a user's own


def of_hydra_template(folder: Path, **more: Any) -> ModelCheckpoint:
    """As lightning-hydra-template writes it: with distdl's names, in distdl's folder."""
    name = {"filename": "epoch_{epoch:03d}", "auto_insert_metric_name": False}
    return ModelCheckpoint(**{"dirpath": folder / "checkpoints", "save_last": True, **name, **more})


class ChoosesLate(ModelCheckpoint):
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")


def test_a_users_own_checkpoints_are_apart(tmp_path: Path) -> None:
    """Also one in a folder of ours, one without a folder, and one that chooses it late."""
    best: dict[str, Any] = {"monitor": "val/acc1", "mode": "max"}
    inner = of_hydra_template(tmp_path, dirpath=tmp_path / "checkpoints/inner", **best)
    nowhere = ModelCheckpoint(filename="n", monitor="val/acc1", mode="min")
    own = [of_hydra_template(tmp_path), inner, nowhere, ChoosesLate(filename="late")]
    fit(tmp_path, [0.1, 0.2, 0.3], callbacks=own)
    store = CheckpointStore(tmp_path / "checkpoints")
    kept = ["epoch_000.ckpt", "epoch_001.ckpt", "epoch_002.ckpt"]
    assert sorted(path.name for path in store.all()) == kept
    assert all(damage_of(path) is None for path in [*store.all(), store.folder / "last.ckpt"])
    assert len(list(store.folder.iterdir())) == 2 * 5, "ours, last.ckpt, best.ckpt, manifests"
    theirs = tmp_path / "model_checkpoints"
    assert (theirs / "n.ckpt").exists() and (theirs / "late.ckpt").exists()
    for folder in (theirs, theirs / "inner"):
        assert (folder / "epoch_002.ckpt").exists() and (folder / "last.ckpt").exists()
        assert not (folder / "epoch_001.ckpt").exists(), "it keeps one"


def test_a_users_own_goes_on_after_a_resume(tmp_path: Path) -> None:
    """It knows what it has saved, keeps the best of both attempts and deletes the others."""
    top = {"monitor": "val/acc1", "mode": "max", "save_top_k": 2}
    fit(tmp_path, [0.5, 0.9, 0.1], callbacks=[of_hydra_template(tmp_path, **top)])
    newest = CheckpointStore(tmp_path / "checkpoints").newest()
    own = of_hydra_template(tmp_path, **top)
    fit(tmp_path, [0.7], resume=newest, epochs=4, callbacks=[own])
    found = sorted(path.name for path in (tmp_path / "model_checkpoints").iterdir())
    assert found == ["epoch_001.ckpt", "epoch_003.ckpt", "last.ckpt"]
    assert own.best_model_path.endswith("model_checkpoints/epoch_001.ckpt")


@pytest.mark.parametrize("way", ["callback", "filename"])
def test_nobody_else_writes_into_our_folder(tmp_path: Path, way: str) -> None:
    class Saves(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            trainer.save_checkpoint(tmp_path / "checkpoints/last.ckpt")

    leads_in = of_hydra_template(tmp_path, dirpath=tmp_path, filename="checkpoints/epoch_000")
    with pytest.raises(UserError, match=r"where distdl writes.*\n.*save into .*model_checkpoints"):
        fit(tmp_path, [0.1], callbacks=[Saves() if way == "callback" else leads_in])
