"""When a checkpoint is written, which is the best, and that each is of one step."""

from __future__ import annotations

import itertools
import math
import resource
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from distdl.checkpoint.saving import Saver
from distdl.distributed import agreement
from distdl.runs.checkpoints import CheckpointStore, damage_of, manifest_at
from distdl.runs.records import journal_path, read
from distdl.tracking.journal import Journal
from distdl.util.errors import SaveError, UserError
from tests.unit import checkpointing
from tests.unit.checkpointing import numbers

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("every_n_steps", [None, 10, 11, 12])
def test_what_is_due_by_time_is_saved_once(tmp_path, monkeypatch, every_n_steps):
    """Of 30 steps, a second each. Two ranks agree a step later; the other one never asks."""
    ranks = SimpleNamespace(world_size=lambda: 2, gather=lambda value: [value])
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    sent = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(agreement, "process_group", ranks)
    monkeypatch.setattr(agreement.dist, "all_reduce", lambda *_, **__: sent)
    monkeypatch.setattr("distdl.callbacks.save_times.time", clock)
    tick = after_batch(lambda trainer: setattr(clock, "now", float(trainer.global_step)))
    often = {"every_minutes": 10 / 60, "every_n_steps": every_n_steps}
    ours = checkpointing.checkpointer(tmp_path, **often)
    checkpointing.fit(checkpointing.OneWeight(), [tick, ours], numbers(40), max_steps=30)
    found = [manifest_at(path) for path in reversed(CheckpointStore(tmp_path).all())]
    steps = [each["step"] for each in found if each["reason"] != "cut"]
    assert min(b - a for a, b in itertools.pairwise([0, *steps])) > 1
    if every_n_steps is None:
        assert steps == [11, 22], "requested at 10 and 21, agreed on a step later"


@pytest.mark.parametrize("counts, least", [([5.0, INF], 0), ([INF, INF], 0), ([INF], INF)])
def test_ranks_of_unknown_length_exchange_in_no_validation_batch(monkeypatch, counts, least):
    monkeypatch.setattr(agreement.process_group, "gather", lambda value: counts)
    assert agreement.least_of_all(counts[0]) == least


class Scripted(checkpointing.OneWeight):
    """Logs, in each validation, the next of some values; notes epoch, number and a random number of
    each batch."""

    seen: ClassVar[list[tuple[int, int, float]]] = []

    def __init__(self, name: str = "x", values: Iterable[float] = ()) -> None:
        super().__init__()
        self.name = name
        self.values = itertools.chain(values, itertools.repeat(0.0))

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, float(torch.rand(()))))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log(self.name, 0.0 if self.trainer.sanity_checking else next(self.values))


def fit(folder: Path, values: list[float], *callbacks, name="val/acc1", epochs=0, **more: Any):
    """Four batches an epoch; each validation logs the next value under `name`."""
    chosen = {key: more.pop(key) for key in ("monitor", "mode", "monitor_typed") if key in more}
    ours = checkpointing.checkpointer(folder / "checkpoints", **{"monitor": "val/acc1", **chosen})
    options = {"limit_val_batches": 1, "num_sanity_val_steps": 0, "default_root_dir": folder}
    options["enable_checkpointing"] = any(isinstance(c, ModelCheckpoint) for c in callbacks)
    options |= {"max_epochs": epochs or len(values), **more}
    module = Scripted(name, values)
    checkpointing.fit(module, [*callbacks, ours], numbers(4), numbers(4), **options)
    return ours


def after_batch(do) -> LambdaCallback:
    return LambdaCallback(on_train_batch_end=lambda trainer, *_: do(trainer))


def newest(folder: Path) -> Path:
    path = CheckpointStore(folder / "checkpoints").newest()
    assert path is not None
    return path


def best(folder: Path) -> str | None:
    return manifest_at(folder / "checkpoints/best.ckpt").get("alias_of")


def test_a_resume_of_a_cut_epoch_draws_the_same_numbers(tmp_path):
    """Lightning validates where a time limit ends it, and so advances the generators."""
    # As a Timer does, `trainer.max_time`'s too.
    ends = after_batch(lambda trainer: setattr(trainer, "should_stop", trainer.global_step == 2))
    seen = []
    for folder, callbacks in (("uncut", []), ("cut", [ends])):
        Scripted.seen.clear()
        torch.manual_seed(0)
        fit(tmp_path / folder, [0.1], *callbacks)
        seen.append(Scripted.seen.copy())
    assert seen[1] == seen[0][:2]
    fit(tmp_path / "cut", [0.1], resume=newest(tmp_path / "cut"))
    assert Scripted.seen == seen[0]
    assert len(seen[0]) == 4


# Of an epoch's four batches; Lightning steps after the last one, too.
ACCUMULATED = {"accumulate_grad_batches": 3, "num_sanity_val_steps": 0}


def weight_at(path: Path) -> float:
    return float(torch.load(path, weights_only=True)["state_dict"]["weight"])


def test_what_is_best_between_accumulated_batches_is_no_start_of_a_resume(tmp_path, caplog):
    """Its gradients are not in a file that is for looking."""

    def run(folder: Path, *callbacks: Any, **more: Any) -> None:
        options = {"val_check_interval": 2, "epochs": 2, **ACCUMULATED, **more}
        fit(folder, [0.1, 0.2, 0.3, 0.4], *callbacks, **options)

    class Killed(Exception):
        pass

    def kill(trainer: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == 7:
            raise Killed

    run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", after_batch(kill))
    store = CheckpointStore(tmp_path / "killed/checkpoints")
    best_file = store.folder / "best.ckpt"
    manifest = manifest_at(best_file)
    assert manifest["metrics"] == {"val/acc1": pytest.approx(0.3)}
    assert (manifest["monitor"], manifest["mode"]) == ("val/acc1", "max")
    assert damage_of(best_file) is None
    assert best(tmp_path / "killed") is None
    kept = shutil.copy(best_file, tmp_path / "kept.ckpt")
    assert [store.newest(), *store.all()] == [store.folder / "epoch_000.ckpt"] * 2
    assert manifest_at(store.folder / "last.ckpt")["alias_of"] == "epoch_000.ckpt"
    run(tmp_path / "killed", resume=store.newest())
    expected = weight_at(newest(tmp_path / "whole"))
    assert weight_at(newest(tmp_path / "killed")) == expected
    assert "has none of them" not in caplog.text
    run(tmp_path / "other", resume=kept)
    assert caplog.text.count("has none of them") == 1


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_time_limit_between_accumulated_batches_loses_no_gradient(tmp_path, at):
    def end(trainer: Any) -> None:
        trainer.should_stop = trainer.fit_loop.epoch_loop.batch_progress.total.ready == at

    fit(tmp_path / "whole", [0.1], **ACCUMULATED)
    fit(tmp_path / "cut", [0.1], after_batch(end), **ACCUMULATED)
    fit(tmp_path / "cut", [0.1], resume=newest(tmp_path / "cut"), **ACCUMULATED)
    assert weight_at(newest(tmp_path / "cut")) == weight_at(newest(tmp_path / "whole"))


class TwoByHand(checkpointing.OneWeight):
    """Each optimizer steps after its own number of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, batch_idx):
        self.manual_backward((self.weight.sum() + self.other.sum()) * (batch_idx + 1))
        for every, optimizer in zip((2, 3), self.optimizers(), strict=True):  # type: ignore[arg-type]
            if (batch_idx + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD([p], 0.1) for p in (self.weight, self.other)]


def test_gradients_wait_for_the_optimizer_that_has_not_stepped(tmp_path):
    def run(folder: Path, **more: Any) -> dict[str, torch.Tensor]:
        module = TwoByHand()
        ours = checkpointing.checkpointer(folder, every_n_steps=1)
        checkpointing.fit(module, [ours], numbers(7), max_epochs=1, **more)
        return module.state_dict()

    whole = run(tmp_path / "whole")
    files = CheckpointStore(tmp_path / "whole").all()
    assert len(files) == 7
    for path in files[1:]:
        assert run(tmp_path / path.name, resume=path) == whole, path.name
        saved = torch.load(path, weights_only=True)["distdl"]["gradients"]
        step = manifest_at(path)["step"]
        assert [n for n, every in (("weight", 2), ("other", 3)) if step % every] == [*saved]


@pytest.mark.parametrize("validates", [False, True])
def test_a_resume_with_max_steps_continues_from_any_step(tmp_path, validates):
    """Also from the end of an epoch (of 4 steps)."""

    def batches(folder: Path, **more: Any) -> list[tuple[int, int]]:
        Scripted.seen.clear()
        data = [numbers(4)] * (1 + validates)
        limits = {"max_steps": 11, "max_epochs": 9, "num_sanity_val_steps": 0}
        ours = checkpointing.checkpointer(folder, every_n_steps=1)
        checkpointing.fit(Scripted(), [ours], *data, **limits, **more)
        return [(epoch, batch) for epoch, batch, _ in Scripted.seen]

    whole = batches(tmp_path)
    assert whole == [divmod(step, 4) for step in range(11)]
    for path in CheckpointStore(tmp_path).all():
        resumed = batches(tmp_path / f"from-{path.name}", resume=path)
        assert resumed == whole[manifest_at(path)["step"] :], path.name


def test_the_journal_holds_what_a_checkpoint_covers(tmp_path, monkeypatch):
    """After kill -9 a run resumes behind the checkpoint, and logs no step before it again."""
    monkeypatch.setattr("distdl.tracking.journal.FLUSH_SECONDS", 3600)  # its thread writes nothing
    save = Saver.save
    written = []

    def record(*args: Any, **more: Any) -> None:
        written.append([r.step for r in read(journal_path(tmp_path)) if "x" in r.metrics])
        save(*args, **more)

    monkeypatch.setattr(Saver, "save", record)
    logs = after_batch(lambda t: t.loggers[0].log_metrics({"x": 1.0}, t.global_step))
    fit(tmp_path, [0.1, 0.2], logs, logger=Journal(journal_path(tmp_path), tmp_path))
    assert written == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]]


@pytest.mark.parametrize(
    ("values", "mode", "chosen"),
    [([NAN, 0.5, NAN, 0.7], "max", 3), ([NAN, 2.0, 1.0], "min", 2), ([NAN], "max", None)],
)
def test_nan_is_never_the_best(tmp_path, values, mode, chosen):
    fit(tmp_path, values, mode=mode)
    assert best(tmp_path) == (None if chosen is None else f"epoch_{chosen:03d}.ckpt")


def test_a_resume_ignores_a_best_of_nan_or_of_another_metric(tmp_path):
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
def test_a_metric_that_is_never_logged_ends_the_training(tmp_path, more, saved):
    """After the first validation, when all is saved."""
    with pytest.raises(UserError, match=r"did you mean val/acc1\?.*checkpoint\.monitor=") as error:
        fit(tmp_path, [0.1] * 6, **{"monitor": "val/accuracy", "epochs": 6, **more})
    assert error.value.exit_code == 2
    assert newest(tmp_path).name == saved
    if "check_val_every_n_epoch" in more:  # it resumes from there under the right name
        done = fit(tmp_path, [0.2], resume=newest(tmp_path), **{**more, "epochs": 4})
        assert best(tmp_path) == "epoch_003.ckpt"
        assert done.best.score == pytest.approx(0.2)


def test_the_default_metric_only_warns(tmp_path, caplog):
    fit(tmp_path / "default", [0.1, 0.2], name="val/loss")
    assert caplog.text.count("checkpoint.monitor: val/acc1 is not logged") == 1
    with pytest.raises(UserError, match="val/acc1 is not logged"):
        fit(tmp_path / "typed", [0.1, 0.2], name="val/loss", monitor_typed=True)
    caplog.clear()
    wrong = {"monitor": "val/accuracy", "epochs": 1}
    fit(tmp_path / "sanity", [], num_sanity_val_steps=1, check_val_every_n_epoch=5, **wrong)
    assert "did you mean val/acc1?" in caplog.text, "reported in the sanity check"
    assert "as no validation has run" in caplog.text


def of_hydra_template(folder: Path, **more: Any) -> ModelCheckpoint:
    """As lightning-hydra-template writes it: with distdl's names, in distdl's folder."""
    name = {"filename": "epoch_{epoch:03d}", "auto_insert_metric_name": False}
    return ModelCheckpoint(**{"dirpath": folder / "checkpoints", "save_last": True, **name, **more})


def test_a_users_own_checkpoints_are_apart_and_resume_their_state(tmp_path):
    """Also one in a folder of ours, and one without a folder."""
    top = {"monitor": "val/acc1", "mode": "max", "save_top_k": 2}
    inner = of_hydra_template(tmp_path, dirpath=tmp_path / "checkpoints/inner")
    nowhere = ModelCheckpoint(filename="n", monitor="val/acc1", mode="min")
    fit(tmp_path, [0.5, 0.9, 0.1], of_hydra_template(tmp_path, **top), inner, nowhere)
    store = CheckpointStore(tmp_path / "checkpoints")
    theirs = tmp_path / "model_checkpoints"
    assert sorted(path.name for path in store.all()) == [f"epoch_00{i}.ckpt" for i in range(3)]
    assert all(damage_of(path) is None for path in [*store.all(), store.folder / "last.ckpt"])
    assert len(list(store.folder.iterdir())) == 2 * 5, "ours, last.ckpt, best.ckpt, manifests"

    def kept() -> set[str]:
        return {str(path.relative_to(theirs)) for path in theirs.rglob("*.ckpt")}

    of_others = {"n.ckpt", "inner/epoch_002.ckpt", "inner/last.ckpt"}
    assert kept() == {"epoch_000.ckpt", "epoch_001.ckpt", "last.ckpt"} | of_others
    # It knows what it has saved, keeps the best of both attempts and deletes the others.
    fit(tmp_path, [0.7], of_hydra_template(tmp_path, **top), resume=newest(tmp_path), epochs=4)
    assert kept() == {"epoch_001.ckpt", "epoch_003.ckpt", "last.ckpt"} | of_others


@pytest.mark.parametrize("way", ["callback", "filename"])
def test_nobody_else_writes_into_our_folder(tmp_path, way):
    saves = after_batch(lambda trainer: trainer.save_checkpoint(tmp_path / "checkpoints/last.ckpt"))
    leads_in = of_hydra_template(tmp_path, dirpath=tmp_path, filename="checkpoints/epoch_000")
    refusal = r"where only distdl writes.*\n.*save into .*model_checkpoints"
    with pytest.raises(UserError, match=refusal):
        fit(tmp_path, [0.1], saves if way == "callback" else leads_in)


LARGE = 3_000_000  # weights of 12 MB: written in more time than a step takes


@pytest.fixture
def train(tmp_path):
    """Trains for some steps and saves after each `every`; whatever happens, no thread is left, nor
    half of a file. Before each step it calls `do` with the trainer."""

    def run(steps, do, *callbacks: Callback, every=1, **more):
        often = {"every_n_steps": every, "every_n_epochs": 1000, **more}
        ours = checkpointing.checkpointer(tmp_path / "checkpoints", **often)
        before = LambdaCallback(on_train_batch_start=lambda trainer, *_: do(trainer))
        data = checkpointing.numbers(1000)
        module = checkpointing.OneWeight(LARGE)
        checkpointing.fit(module, [before, *callbacks, ours], data, max_steps=steps)

    before = threading.active_count()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield run
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert threading.active_count() == before
    assert not list((tmp_path / "checkpoints").glob(".*"))


def writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(".ckpt")]


def saved(folder: Path) -> dict[int, Path]:
    """step -> the checkpoint of that step; all are intact, last.ckpt too."""
    paths = CheckpointStore(folder / "checkpoints").all()
    assert all(damage_of(path) is None for path in [*paths, paths[0].with_name("last.ckpt")])
    return {manifest_at(path)["step"]: path for path in reversed(paths)}


@pytest.mark.parametrize("background", [True, False])
def test_no_checkpoint_mixes_two_steps(train, tmp_path, monkeypatch, caplog, background):
    """In the background it is written while the training continues; a wait is reported once. A
    user's own is there at once."""
    monkeypatch.setattr("distdl.checkpoint.saving.PATIENCE", 0.0)
    writing: list[bool] = []

    def look(trainer) -> None:
        writing.append(bool(writers()))
        trainer.save_checkpoint(tmp_path / "own.ckpt")
        step = torch.load(tmp_path / "own.ckpt", weights_only=False)["global_step"]
        assert step == trainer.global_step

    train(3, look, background=background)
    assert writing == [False, background, background]
    assert caplog.text.count("save less often (checkpoint.every_n_steps") == background
    files = saved(tmp_path)
    assert list(files) == [1, 2, 3]
    for step, path in files.items():
        checkpoint = torch.load(path, weights_only=True)
        assert checkpoint["global_step"] == step
        assert torch.allclose(checkpoint["state_dict"]["weight"], torch.tensor(-step / 10))


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_was_begun_is_published_whatever_ends_the_training(train, tmp_path, kind):
    def end(trainer) -> None:
        if trainer.global_step == 3:
            raise kind("in the middle")

    with pytest.raises((kind, SystemExit)):
        train(6, end, every=3)
    assert list(saved(tmp_path)) == [3]


@pytest.mark.parametrize("steps", [1000, 40])
def test_a_failed_write_ends_the_training(train, tmp_path, caplog, steps):
    """At the latest when the next one is due (step 60), or the training ends. From step 35 on no
    file may be larger than 1 MB, as on a full disk."""
    reached = [0]

    def fill(trainer) -> None:
        reached.append(trainer.global_step)
        if trainer.global_step == 35:
            for thread in writers():
                thread.join()
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))

    with pytest.raises(SaveError, match=r"step_00000040.ckpt could not be saved: OSError: .*large"):
        train(steps, fill, every=20)
    assert 39 <= reached[-1] <= 60
    assert "earlier checkpoints are unchanged" in caplog.text
    assert list(saved(tmp_path)) == [20]


class Stubborn:
    def __deepcopy__(self, memo):
        raise TypeError("only by pickle")


def test_what_cannot_be_copied_is_written_at_once(train, tmp_path, caplog):
    keeps = LambdaCallback()
    keeps.state_dict = lambda: {"seen": Stubborn()}
    with torch.serialization.safe_globals([Stubborn]):
        train(2, lambda trainer: None, keeps)
    assert list(saved(tmp_path)) == [1, 2]
    assert caplog.text.count("no copy could be made: TypeError: only by pickle") == 1
