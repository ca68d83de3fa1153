"""What does not go together, and what is missing, is refused, by a class where it tells, else by
the real thing; and errors of Lightning during a training are explained."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule  # noqa: F401
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel  # noqa: F401
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD, Adam

from distdl import tasks
from distdl.callbacks import StepMetrics
from distdl.util.errors import UserError
from distdl.validation.misfits import explained, misfits, refuse
from distdl.worker import failing
from tests.prepared import quiet_trainer
from tests.unit.sample_config import check_parts, node, problems, rows


class ByHand(BoringModel):
    def __init__(self, width=3):
        super().__init__()
        self.automatic_optimization = False


class Again(ByHand):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = True


class Depends(BoringModel):
    def __init__(self, manual=True):
        super().__init__()
        if manual:
            self.automatic_optimization = False


class Several(BoringModel):
    def configure_optimizers(self):
        return [SGD(self.parameters(), 0.1), Adam(self.parameters())], []


class SeveralByHand(Several):
    automatic_optimization = False


class Perhaps(BoringModel):
    def configure_optimizers(self):
        optimizers, schedules = Several.configure_optimizers(self)
        if schedules:
            return [optimizers[0], optimizers[1]], schedules
        return optimizers, schedules  # may be two optimizers


class SetsIt(LightningModule):
    def __init__(self):
        super().__init__()
        self.test_step = self.training_step


class Brings(BoringModel):
    def configure_callbacks(self):
        return [BatchSizeFinder()]


class Own(BoringModel):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.log("train/loss", output["loss"], on_step=False, on_epoch=True)
        return output


class Broken(BoringModel):
    def training_step(self, batch, batch_idx):
        factor = 1 if batch_idx < 2 else float("nan")
        return factor * super().training_step(batch, batch_idx)["loss"]


BOTH = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 4}
# model, strategy, callbacks of Lightning with the argument of both | what is refused
TOGETHER = """
ByHand BatchSizeFinder GradientAccumulationScheduler | trainer.gradient_clip_val \
trainer.accumulate_grad_batches BatchSizeFinder GradientAccumulationScheduler | \
self.clip_gradients(optimizer, 0.5, 'norm')
BoringModel GradientAccumulationScheduler | GradientAccumulationScheduler | scheduling={0: 4}
Depends GradientAccumulationScheduler | GradientAccumulationScheduler
ByHand no distdl.strategies.PipelineStrategy | strategy
Again no distdl.strategies.PipelineStrategy | -
Several distdl.strategies.DDPStrategy | model
Perhaps distdl.strategies.DDPStrategy | -
SeveralByHand no distdl.strategies.DDPStrategy | -
SeveralByHand no distdl.strategies.DeepSpeedStrategy | strategy | strategy=fsdp
BoringModel alone BackboneFinetuning distdl.strategies.auto | -
BoringModel ModelPruning distdl.strategies.FSDPStrategy | ModelPruning
BoringModel BackboneFinetuning distdl.strategies.auto | BackboneFinetuning
BoringModel BackboneFinetuning lightning.pytorch.strategies.DDPStrategy | BackboneFinetuning
"""


@pytest.mark.parametrize(("chosen", "refused"), rows(TOGETHER))
def test_what_does_not_go_together(chosen, refused):
    model, *rest = chosen.split()
    strategy = next((name for name in rest if "." in name), "")
    classes = {name: getattr(pl_callbacks, name) for name in rest if hasattr(pl_callbacks, name)}
    trainer = {} if "no" in rest else BOTH
    ranks = 1 if "alone" in rest else 2
    found = [*misfits(trainer, classes, globals()[model], strategy, ranks)]
    assert [p.path for p in found] == [name for name in refused[0].split() if name != "-"]
    check_parts("".join(p.remedy for p in found), refused[1:])


def test_validation_finds_them_for_a_training():
    changes = {"trainer.gradient_clip_val": 1.0, "model._target_": f"{__name__}.ByHand"}
    for task, paths in {"train": ["trainer.gradient_clip_val"], "test": []}.items():
        changes |= {"project.allow": ["tests"], "task._target_": f"distdl.tasks.{task}"}
        assert [problem.path for problem in problems(changes)] == paths


# The task, the model (or a function), the data module; "bare" is without an optimizer, and "model"
# one that is refused already | each method that is missing, and of which section.
MISSING = """
train LightningModule BoringDataModule bare | training_step model | configure_optimizers model
train BoringModel BoringDataModule bare
validate LightningModule LightningDataModule | validation_step model | val_dataloader data
test SetsIt nothing | test_dataloader model
test train BoringDataModule
test LightningModule BoringDataModule model
test LightningModule BoringDataModule partial
"""


@pytest.mark.parametrize(("chosen", "missing"), rows(MISSING))
def test_missing_methods(chosen, missing):
    task, model, data, *special = chosen.split()
    config = {"optimizer": None if "bare" in special else node("torch.optim.SGD")}
    config["model"] = node(f"{__name__}.{model}", _partial_="partial" in special)
    config["data"] = node(f"{__name__}.{data}") if data != "nothing" else None
    found = getattr(tasks, task).check({}, {"refused": special, "config": config})
    wanted = [(name, config[of]["_target_"]) for name, of in map(str.split, missing)]
    assert [p.what for p in found] == [f"needs {n}, which {of} does not define" for n, of in wanted]


def test_what_only_the_real_things_show():
    trainer = quiet_trainer(None, gradient_clip_val=0.5)
    trainer.strategy.connect(Depends())
    with pytest.raises(UserError, match=r"self.clip_gradients\(optimizer, 0.5, 'norm'\)"):
        refuse(trainer)
    trainer = quiet_trainer(None)
    trainer.strategy.connect(Brings())
    trainer.strategy.lightning_module.trainer = trainer
    trainer._callback_connector._attach_model_callbacks()
    with pytest.raises(UserError, match="BatchSizeFinder: would change the batch size"):
        refuse(trainer)


# ------------------------------------------------------------------- what comes in the middle


def training_step():
    raise RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert")


RAISED = [
    (lambda: quiet_trainer(None, limit_train_batches=1.5), "", "invalid value 1.5"),
    (lambda: quiet_trainer(None, fast_dev_run=True).fit(Several()), "model", "parameter groups"),
    (lambda: training_step(), "strategy", r"(?s)weights .*test_misfits.py, line .*strategy=ddp"),
]


@pytest.mark.parametrize(("work", "path", "text"), RAISED)
def test_what_lightning_raises_is_for_the_user(work, path, text):
    with pytest.raises(UserError, match=text) as error, failing.lightnings_refusals():
        work()
    assert error.value.problems[0].path == path
    assert error.value.__cause__ is not None


def test_a_call_that_the_logger_does_not_have_and_errors_of_others(tmp_path):
    with pytest.raises(AttributeError) as error:
        CSVLogger(tmp_path).experiment.add_histogram("x", 1)
    problem = explained(error.value)
    assert problem.path == "tracking"
    assert "add_histogram" in problem.what
    assert "tracking=[tensorboard,mlflow]" in problem.remedy
    with pytest.raises(AttributeError) as error:
        tmp_path.add_histogram  # noqa: B018
    assert explained(error.value) is None
    with pytest.raises(ValueError, match="mine"), failing.lightnings_refusals():
        raise ValueError("mine")


# ------------------------------------------------------ a module's own metrics beside distdl's


class Memory(CSVLogger):
    """Keeps what is logged."""

    def log_metrics(self, metrics, step=None):
        self.__dict__.setdefault("logged", []).append({"step": step, **metrics})


def train(folder, model, *callbacks, **more):
    options = {
        "logger": Memory(folder),
        "callbacks": [StepMetrics(None), *callbacks],
        "limit_train_batches": 4,
        "limit_val_batches": 1,
        "log_every_n_steps": 1,
    }
    quiet_trainer(folder, **{"max_epochs": 1, **options, **more}).fit(model)
    return options["logger"].logged


class Counts(BoringModel):
    """Its losses are 1, 2, 3, ..., in one of the forms that Lightning takes; of "none" every second
    one is missing."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        self.batch = 0
        self.automatic_optimization = form not in ("by hand", "by hand, a loss per sample")

    def training_step(self, batch, batch_idx):
        self.batch += 1
        loss = self.layer(batch).sum() * 0 + self.batch
        if self.form == "dict":
            return {"loss": loss, "more": 1}
        if self.form == "one element":
            return loss[None]
        if self.form == "by hand, a loss per sample":
            return {"loss": loss + torch.tensor([-0.5, 0.5])}
        return None if self.form == "none" and self.batch % 2 else loss


TWICE = {"accumulate_grad_batches": 2}
PAIRS = [1.5, 3.5, 5.5, 7.5]  # the mean of each two batches


@pytest.mark.parametrize(
    "form, more, losses",
    [
        ("tensor", {}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("tensor", TWICE, PAIRS),
        ("tensor", {"accumulate_grad_batches": 3}, [2, 4, 6, 8]),  # an epoch of four: three and one
        ("dict", TWICE, PAIRS),
        ("one element", TWICE, PAIRS),
        ("none", TWICE, [2, 4, 6, 8]),
        ("tensor", {"scheduling": {0: 1, 1: 2}}, [1, 2, 3, 4, 5.5, 7.5]),
        ("by hand", {}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("by hand, a loss per sample", {}, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_the_loss_is_the_one_that_the_module_returns(tmp_path, form, more, losses):
    """However many batches make a step."""
    settings = dict(more)
    schedule = settings.pop("scheduling", None)
    callbacks = [pl_callbacks.GradientAccumulationScheduler(schedule)] if schedule else []
    logged = train(tmp_path, Counts(form), *callbacks, max_epochs=2, **settings)
    assert [e["train/loss"] for e in logged if "train/loss" in e] == pytest.approx(losses)


def test_no_value_of_ours_under_a_name_of_theirs(tmp_path):
    """The module logs train/loss once an epoch."""
    logged = train(tmp_path, Own())
    assert [entry["step"] for entry in logged if "train/loss" in entry] == [3]
    assert [entry["step"] for entry in logged if "perf/data_wait" in entry] == [1, 2, 3, 4]
    with pytest.raises(RuntimeError) as error:  # a metric that is misspelt
        train(tmp_path, Own(), EarlyStopping("val/los"))
    problem = explained(error.value)
    assert "val/los" in problem.what
    assert "monitor=" in problem.remedy


def test_a_loss_that_is_nan_is_logged_once_with_the_step(tmp_path, caplog):
    train(tmp_path, Broken())
    (text,) = [r.getMessage() for r in caplog.records if "the loss is" in r.getMessage()]
    assert text.startswith("the loss is nan since step 3 at the latest")
