"""When a checkpoint is written, and which of them is the best."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor

from distdl.callbacks import Checkpointer
from distdl.checkpoint.saving import Saver
from distdl.distributed import agreement, process_group
from distdl.runs.checkpoints import CheckpointStore, damage_of, manifest_at, manifest_of
from distdl.runs.records import journal_path, read
from distdl.tracking.journal import Journal
from distdl.util.errors import UserError
from tests.unit import checkpointing
from tests.unit.checkpointing import numbers

INF, NAN = math.inf, math.nan


NO = dict.fromkeys(
    ("_should_accumulate", "_num_ready_batches_reached", "_should_check_val_fx", "on_advance_end"),
    lambda *_: False,
)
Loop = type("Loop", (), {"_skip_next_val": False, **NO})  # Lightning's, inside an epoch


@pytest.mark.parametrize("every_n_steps", [None, 10, 11, 12])
def test_what_is_due_by_time_is_saved_once_on_both_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_n_steps: int | None
) -> None:
    """Of 30 steps, a second each. The ranks take turns in this thread: each waits for an all-reduce
    a step later, when the other has sent its flags too."""
    now, rank, sent = [0.0], [0], defaultdict[int, list[Tensor]](list)
    counts, saved = (itertools.count(), itertools.count()), ([], [])  # type: ignore[var-annotated]

    def all_reduce(flags: Tensor, **_: Any) -> Any:
        both = sent[number := next(counts[rank[0]])]
        both.append(flags.clone())

        def wait() -> None:
            assert number == 0 or len(both) == 2, "a rank waits for what the other has not sent"
            flags.copy_(torch.stack(both).amax(0))

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(process_group, "gather", lambda value: [value])
    monkeypatch.setattr("distdl.callbacks.checkpointer.time.monotonic", lambda: now[0])
    monkeypatch.setattr(Saver, "save", lambda *_, step, **__: saved[rank[0]].append(step))
    facts = {"world_size": 2, "current_epoch": 0, "num_training_batches": 30, "fast_dev_run": False}
    trainers: list[Any] = []
    for rank[0] in range(2):
        trainer = SimpleNamespace(
            **{"callback_metrics": {}, "loggers": [], "optimizers": [], **facts},
            global_rank=rank[0],
            global_step=0,
            lightning_module=SimpleNamespace(automatic_optimization=True),
            fit_loop=SimpleNamespace(epoch_loop=Loop()),
        )
        more: Any = {"every_n_steps": every_n_steps, "trust_pickle": True}
        ours = checkpointing.checkpointer(tmp_path, every_minutes=10 / 60, **more)
        ours.on_train_start(trainer, None)  # type: ignore[arg-type]
        trainers.append(trainer)
    for step in range(1, 31):
        now[0] = float(step)
        for rank[0], trainer in enumerate(trainers):
            trainer.global_step = step
            trainer.fit_loop.epoch_loop.on_advance_end(None)
    first, second = saved
    assert first == second and min(b - a for a, b in itertools.pairwise([0, *first])) > 1
    if every_n_steps is None:
        assert first == [11, 22], "requested at 10 and 21, agreed on a step later"


class Scripted(checkpointing.OneWeight):
    """Logs, in each validation, the next of some values."""

    drawn: ClassVar[list[float]] = []

    def __init__(self, name: str, values: list[float]) -> None:
        super().__init__()
        self.name, self.values = name, values

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drawn.append(float(torch.rand(())))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log(self.name, 0.0 if self.trainer.sanity_checking else self.values.pop(0))


def fit(folder: Path, values: list[float], *callbacks: Callback, **more: Any) -> Checkpointer:
    """Four batches an epoch; each validation logs the next value under `name`."""
    chosen = {key: more.pop(key) for key in ("monitor", "mode") if key in more}
    ours = checkpointing.checkpointer(folder / "checkpoints", **{"monitor": "val/acc1", **chosen})
    module = Scripted(more.pop("name", "val/acc1"), [*values])
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "default_root_dir": folder}
    options["enable_checkpointing"] = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    options["max_epochs"] = more.pop("epochs", len(values))
    checkpointing.fit(module, [*callbacks, ours], numbers(4), numbers(4), **{**options, **more})
    return ours


def after_batch(do: Callable[[Trainer], Any]) -> Callback:
    return LambdaCallback(on_train_batch_end=lambda trainer, *_: do(trainer))


def newest(folder: Path) -> Path:
    path = CheckpointStore(folder / "checkpoints").newest()
    assert path is not None
    return path


def best(folder: Path) -> str | None:
    manifest = manifest_of(folder / "checkpoints/best.ckpt")
    return json.loads(manifest.read_text())["alias_of"] if manifest.exists() else None


def test_a_resume_of_a_cut_epoch_draws_the_same_numbers(tmp_path: Path) -> None:
    """Lightning validates where a time limit ends it, and so advances the generators."""
    Scripted.drawn.clear()
    torch.manual_seed(0)
    fit(tmp_path / "uncut", [0.1])
    expected = Scripted.drawn.copy()
    Scripted.drawn.clear()
    torch.manual_seed(0)
    # As a Timer does, `trainer.max_time`'s too.
    fit(
        tmp_path / "cut",
        [0.1],
        after_batch(lambda t: setattr(t, "should_stop", t.global_step == 2)),
    )
    assert Scripted.drawn == expected[:2]
    fit(tmp_path / "cut", [0.1], resume=newest(tmp_path / "cut"))
    assert Scripted.drawn == expected and len(expected) == 4


class Seen(checkpointing.OneWeight):
    """Notes epoch and number of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batches.append((self.current_epoch, batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None: ...


@pytest.mark.parametrize("validates", [False, True])
def test_a_resume_with_max_steps_continues_from_any_step(tmp_path: Path, validates: bool) -> None:
    """Also from the end of an epoch (of 4 steps)."""
    data = [checkpointing.numbers(4)] * (1 + validates)
    limits: Any = {"max_steps": 11, "max_epochs": 9, "num_sanity_val_steps": 0}
    whole = Seen()
    saves = checkpointing.checkpointer(tmp_path, every_n_steps=1)
    checkpointing.fit(whole, [saves], *data, **limits)
    assert whole.batches == [divmod(step, 4) for step in range(11)]
    for path in CheckpointStore(tmp_path).all():
        step, resumed = manifest_at(path)["step"], Seen()
        callbacks = [checkpointing.checkpointer(tmp_path / f"from-{path.name}")]
        checkpointing.fit(resumed, callbacks, *data, resume=path, **limits)
        assert resumed.batches == whole.batches[step:], path.name


def test_the_journal_holds_what_a_checkpoint_covers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After kill -9 a run resumes behind the checkpoint, and logs no step before it again."""
    monkeypatch.setattr("distdl.tracking.journal.FLUSH_SECONDS", 3600)  # its thread writes nothing
    save, written = Saver.save, []

    def record(*args: Any, **more: Any) -> None:
        written.append([r.step for r in read(journal_path(tmp_path)) if "x" in r.metrics])
        save(*args, **more)

    monkeypatch.setattr(Saver, "save", record)
    logs = after_batch(
        lambda trainer: trainer.loggers[0].log_metrics({"x": 1.0}, trainer.global_step)
    )
    fit(tmp_path, [0.1, 0.2], logs, logger=Journal(journal_path(tmp_path), tmp_path))
    assert written == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("values", "mode", "chosen"),
    [
        ([NAN, 0.5, NAN, 0.7], "max", 3),
        ([NAN, 2.0, 1.0], "min", 2),
        ([-INF, 0.5], "max", 1),
        ([INF, 0.5], "min", 1),
        ([NAN], "max", None),
    ],
)
def test_nan_is_never_the_best(tmp_path, values, mode, chosen) -> None:
    fit(tmp_path, values, mode=mode)
    assert best(tmp_path) == (None if chosen is None else f"epoch_{chosen:03d}.ckpt")


def test_a_resume_ignores_a_best_of_nan_or_of_another_metric(tmp_path: Path) -> None:
    fit(tmp_path / "a", [0.9])
    file = newest(tmp_path / "a")
    fit(tmp_path / "b", [0.3], monitor="val/f1", name="val/f1", resume=file, epochs=2)
    assert best(tmp_path / "b") == "epoch_001.ckpt"
    state = torch.load(file, weights_only=True)
    state["distdl"]["best"] = NAN
    del state["distdl"]["monitor"]  # as distdl 0.1 wrote it
    torch.save(state, tmp_path / "old.ckpt")
    fit(tmp_path / "c", [0.4], resume=tmp_path / "old.ckpt", epochs=2)
    assert best(tmp_path / "c") == "epoch_001.ckpt"


@pytest.mark.parametrize(
    ("more", "saved"),
    [
        ({"check_val_every_n_epoch": 2}, "epoch_001.ckpt"),
        ({"val_check_interval": 2}, "epoch_000_step_00000002.ckpt"),
        ({"epochs": 1}, "epoch_000.ckpt"),
    ],
)
def test_a_metric_that_is_never_logged_ends_the_training(tmp_path, more, saved) -> None:
    """After the first validation, when all is saved."""
    with pytest.raises(UserError, match=r"did you mean val/acc1\?.*checkpoint\.monitor=") as error:
        fit(tmp_path, [0.1] * 6, **{"monitor": "val/accuracy", "epochs": 6, **more})
    assert error.value.exit_code == 2 and newest(tmp_path).name == saved
    if "check_val_every_n_epoch" in more:  # it resumes from there under the right name
        done = fit(tmp_path, [0.2], resume=newest(tmp_path), **{**more, "epochs": 4})
        assert best(tmp_path) == "epoch_003.ckpt" and done.best.score == pytest.approx(0.2)


def test_the_default_metric_only_warns(tmp_path: Path, caplog) -> None:
    fit(tmp_path / "default", [0.1, 0.2], name="val/loss")
    assert caplog.text.count("checkpoint.monitor: val/acc1 is not logged") == 1
    caplog.clear()
    wrong = {"monitor": "val/accuracy", "epochs": 1}
    fit(tmp_path / "sanity", [], num_sanity_val_steps=1, check_val_every_n_epoch=5, **wrong)
    assert "did you mean val/acc1?" in caplog.text, "reported in the sanity check"
    assert "as no validation has run" in caplog.text


def of_hydra_template(folder: Path, **more: Any) -> ModelCheckpoint:
    """As lightning-hydra-template writes it: with distdl's names, in distdl's folder."""
    name = {"filename": "epoch_{epoch:03d}", "auto_insert_metric_name": False}
    return ModelCheckpoint(**{"dirpath": folder / "checkpoints", "save_last": True, **name, **more})


class ChoosesLate(ModelCheckpoint):
    def setup(self, trainer: Trainer, *arguments: Any, **options: Any) -> None:
        super().setup(trainer, *arguments, **options)
        self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")


def test_a_users_own_checkpoints_are_apart_and_resume_their_state(tmp_path: Path) -> None:
    """Also one in a folder of ours, one without a folder, and one that chooses it late."""
    top = {"monitor": "val/acc1", "mode": "max", "save_top_k": 2}
    inner = of_hydra_template(tmp_path, dirpath=tmp_path / "checkpoints/inner")
    nowhere = ModelCheckpoint(filename="n", monitor="val/acc1", mode="min")
    others = [inner, nowhere, ChoosesLate(filename="late")]
    fit(tmp_path, [0.5, 0.9, 0.1], of_hydra_template(tmp_path, **top), *others)
    store = CheckpointStore(tmp_path / "checkpoints")
    assert sorted(path.name for path in store.all()) == [f"epoch_00{i}.ckpt" for i in range(3)]
    assert all(damage_of(path) is None for path in [*store.all(), store.folder / "last.ckpt"])
    assert len(list(store.folder.iterdir())) == 2 * 5, "ours, last.ckpt, best.ckpt, manifests"
    theirs = tmp_path / "model_checkpoints"
    kept = {str(path.relative_to(theirs)) for path in theirs.rglob("*.ckpt")}
    of_others = {"n.ckpt", "late.ckpt", "inner/epoch_002.ckpt", "inner/last.ckpt"}
    assert kept == {"epoch_000.ckpt", "epoch_001.ckpt", "last.ckpt"} | of_others
    # It knows what it has saved, keeps the best of both attempts and deletes the others.
    own = of_hydra_template(tmp_path, **top)
    fit(tmp_path, [0.7], own, resume=newest(tmp_path), epochs=4)
    kept = {str(path.relative_to(theirs)) for path in theirs.rglob("*.ckpt")}
    assert kept == {"epoch_001.ckpt", "epoch_003.ckpt", "last.ckpt"} | of_others
    assert own.best_model_path == str(theirs / "epoch_001.ckpt")


@pytest.mark.parametrize("way", ["callback", "filename"])
def test_nobody_else_writes_into_our_folder(tmp_path: Path, way: str) -> None:
    saves = after_batch(lambda trainer: trainer.save_checkpoint(tmp_path / "checkpoints/last.ckpt"))
    leads_in = of_hydra_template(tmp_path, dirpath=tmp_path, filename="checkpoints/epoch_000")
    with pytest.raises(
        UserError, match=r"where only distdl writes.*\n.*save into .*model_checkpoints"
    ):
        fit(tmp_path, [0.1], saves if way == "callback" else leads_in)


@pytest.mark.parametrize(
    "counts, least", [([5.0, 3.0], 3), ([5.0, INF], 0), ([INF, INF], 0), ([INF], INF)]
)
def test_ranks_of_unknown_length_exchange_in_no_validation_batch(monkeypatch, counts, least):
    monkeypatch.setattr(process_group, "gather", lambda value: counts)
    assert agreement.least_of_all(counts[0]) == least
