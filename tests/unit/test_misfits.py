"""What does not go together is refused, by a class where it tells, else by the real thing; and
errors of Lightning during a training are explained."""

from __future__ import annotations

import importlib
import linecache
import re

import lightning.pytorch as pl
import pytest
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from sample_config import check_parts, problems, rows

from distdl.callbacks import StepMetrics
from distdl.util.errors import UserError
from distdl.validation.misfits import by_hand, explained, makes_several, misfits, refuse
from distdl.worker import main

# After each class: whether it steps by hand, None where its source does not show it.
MODELS = """
from math import nan
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim import SGD, Adam
class ByHand(BoringModel):  # True
    def __init__(self, width=3):
        super().__init__()
        self.automatic_optimization = False
class Again(ByHand):  # False
    def __init__(self):
        super().__init__()
        self.automatic_optimization = True
class Mixin:  # None
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
class Mixed(Mixin, BoringModel):  # True
    pass
class After(BoringModel, Mixin):  # None
    def __init__(self):
        super().__init__()
        self._automatic_optimization = False
class OfClass(BoringModel):  # True
    automatic_optimization = False
class Depends(BoringModel):  # None
    def __init__(self, manual=True):
        super().__init__()
        if manual:
            self.automatic_optimization = False
class Both(BoringModel):  # None
    def __init__(self, automatic=True):
        super().__init__()
        self.automatic_optimization = False
        if automatic:
            self.automatic_optimization = True
class Property(BoringModel):  # None
    @property
    def automatic_optimization(self):
        return False
class ByName(BoringModel):  # None
    def __init__(self):
        super().__init__()
        setattr(self, "automatic_optimization", False)
class Several(BoringModel):  # False
    def configure_optimizers(self):
        return [SGD(self.parameters(), 0.1), Adam(self.parameters())], []
class SeveralByHand(Several):  # True
    automatic_optimization = False
class Two(BoringModel):  # False
    def configure_optimizers(self):
        return [SGD(self.parameters(), 0.1), SGD(self.parameters(), 0.1)]
class Brings(BoringModel):  # False
    def configure_callbacks(self):
        return [BatchSizeFinder()]
class Own(BoringModel):  # False
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        self.log("train/loss", output["loss"], on_step=False, on_epoch=True)
        return output
class Broken(BoringModel):  # False
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * (1 if batch_idx < 2 else nan)
"""
EXPECTED = re.findall(r"^class (\w+).*  # (\w+)$", f"{MODELS}class BoringModel:  # False", re.M)
OFF = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "sample_models.py").write_text(MODELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield importlib.import_module("sample_models")


@pytest.mark.parametrize(("name", "manual"), EXPECTED)
def test_a_class_that_steps_by_hand_is_known_by_its_source(name, manual, models) -> None:
    cls = getattr(models, name)
    assert str(by_hand(cls)) == manual
    if issubclass(cls, BoringModel):
        assert str(by_hand(cls())) in (("True", "False") if manual == "None" else manual)


SEVERAL = """
return [self.g, self.d], [] | True
return [*self.all()], [] | False
return self.g, self.d | may be optimizers and schedules: False
return [self.a, self.b, self.c] | True
return {'optimizer': self.g}, {'optimizer': self.d} | True
return {'optimizer': self.g, 'lr_scheduler': self.s} | False
if self.x: return self.g; return [self.g, self.d], [] | False
return [self.g, self.d], [lambda: 0] | True
def f(): return [1, 2, 3]; return f() | False
"""


@pytest.mark.parametrize(("text", "several"), rows(SEVERAL))
def test_several_optimizers_are_known_by_their_source(text, several) -> None:
    lines = ["def configure_optimizers(self):", *(f"    {line}" for line in text.split("; "))]
    source, space = "\n".join(lines) + "\n", {}
    linecache.cache[f"<{text}>"] = (len(source), None, source.splitlines(True), f"<{text}>")
    exec(compile(source, f"<{text}>", "exec"), space)
    assert makes_several(type("Model", (BoringModel,), space)) is several[0].endswith("True")
    assert makes_several(BoringModel) is makes_several(pl.LightningModule) is False


BOTH = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 4}
# model, strategy, callbacks of Lightning with the argument of both | what is refused
TOGETHER = """
ByHand BatchSizeFinder GradientAccumulationScheduler | trainer.gradient_clip_val \
trainer.accumulate_grad_batches BatchSizeFinder GradientAccumulationScheduler | \
self.clip_gradients(optimizer, 0.5, 'norm')
BoringModel BatchSizeFinder GradientAccumulationScheduler | BatchSizeFinder \
GradientAccumulationScheduler | scheduling={0: 4}
Depends BatchSizeFinder GradientAccumulationScheduler | BatchSizeFinder GradientAccumulationScheduler
ByHand no distdl.strategies.PipelineStrategy | strategy
ByHand no distdl.strategies.DeepSpeedStrategy | -
Several distdl.strategies.DDPStrategy | model
SeveralByHand no distdl.strategies.DDPStrategy | -
SeveralByHand no distdl.strategies.DeepSpeedStrategy | strategy | strategy=fsdp
BoringModel alone BackboneFinetuning distdl.strategies.auto | -
BoringModel ModelPruning distdl.strategies.FSDPStrategy | ModelPruning
BoringModel ModelPruning distdl.strategies.DDPStrategy | -
BoringModel BackboneFinetuning distdl.strategies.auto | BackboneFinetuning
BoringModel BackboneFinetuning lightning.pytorch.strategies.DDPStrategy | BackboneFinetuning
"""  # noqa: E501


@pytest.mark.parametrize(("chosen", "refused"), rows(TOGETHER))
def test_what_does_not_go_together(chosen, refused, models) -> None:
    model, *rest = chosen.split()
    strategy = next((name for name in rest if "." in name), "")
    classes = {name: getattr(pl_callbacks, name) for name in rest if hasattr(pl_callbacks, name)}
    trainer, ranks = {} if "no" in rest else BOTH, 1 if "alone" in rest else 2
    found = [*misfits(trainer, classes, getattr(models, model), strategy, ranks)]
    assert [p.path for p in found] == [name for name in refused[0].split() if name != "-"]
    check_parts("".join(p.remedy for p in found), refused[1:])


@pytest.mark.parametrize(
    ("task", "paths"), [("train", ["trainer.gradient_clip_val"]), ("test", [])]
)
def test_validation_finds_them(task, paths, models) -> None:
    changes = {"trainer.gradient_clip_val": 1.0, "task._target_": f"distdl.tasks.{task}"}
    changes |= {"project.allow": ["sample_models"], "model._target_": "sample_models.ByHand"}
    assert [problem.path for problem in problems(changes)] == paths


def test_what_only_the_real_things_show(models) -> None:
    trainer = pl.Trainer(accelerator="cpu", gradient_clip_val=0.5, **OFF)
    trainer.strategy.connect(models.Depends())
    with pytest.raises(UserError, match=r"self.clip_gradients\(optimizer, 0.5, 'norm'\)"):
        refuse(trainer)
    trainer = pl.Trainer(accelerator="cpu", **OFF)
    trainer.strategy.connect(models.Brings())
    trainer.strategy.lightning_module.trainer = trainer
    refuse(trainer)
    trainer._callback_connector._attach_model_callbacks()
    with pytest.raises(UserError, match="BatchSizeFinder: would change the batch size"):
        refuse(trainer)


# ------------------------------------------------------------------- what comes in the middle


def training_step() -> None:
    raise RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert")


CPU = {"accelerator": "cpu", **OFF}
RAISED = [
    (lambda _: pl.Trainer(**CPU, limit_train_batches=1.5), "", "invalid value 1.5"),
    (
        lambda models: pl.Trainer(**CPU, fast_dev_run=True).fit(models.Two()),
        *("model", "(?s)Lightning refuses .* parameter groups"),
    ),
    (lambda _: training_step(), "strategy", r"(?s)weights .*test_misfits.py, line .*strategy=ddp"),
]


@pytest.mark.parametrize(("work", "path", "text"), RAISED)
def test_what_lightning_raises_is_for_the_user(work, path, text, models) -> None:
    with pytest.raises(UserError, match=text) as error, main.lightnings_refusals():
        work(models)
    assert error.value.problems[0].path == path and error.value.__cause__ is not None


def test_a_call_that_the_logger_does_not_have_and_errors_of_others(tmp_path) -> None:
    with pytest.raises(AttributeError) as error:
        CSVLogger(tmp_path).experiment.add_histogram("x", 1)
    problem = explained(error.value)
    assert problem.path == "tracking" and "add_histogram" in problem.what
    assert "tracking=[tensorboard,mlflow]" in problem.remedy
    with pytest.raises(AttributeError) as error:
        tmp_path.add_histogram  # noqa: B018
    assert explained(error.value) is None
    with pytest.raises(ValueError, match="mine"), main.lightnings_refusals():
        raise ValueError("mine")


# ------------------------------------------------------ a module's own metrics beside distdl's


class Memory(CSVLogger):
    """Keeps what is logged."""

    def log_metrics(self, metrics, step=None) -> None:
        self.__dict__.setdefault("logged", []).append({"step": step, **metrics})


def train(folder, model, *callbacks):
    logger, off = Memory(folder), {**OFF, "enable_model_summary": False}
    off |= {"logger": logger, "callbacks": [StepMetrics(None), *callbacks]}
    limits = {"limit_train_batches": 4, "limit_val_batches": 1, "log_every_n_steps": 1}
    pl.Trainer(accelerator="cpu", max_epochs=1, **limits, **off).fit(model)
    return logger.logged


def test_no_value_of_ours_under_a_name_of_theirs(tmp_path, models) -> None:
    """The module logs train/loss once an epoch."""
    logged = train(tmp_path, models.Own())
    assert [entry["step"] for entry in logged if "train/loss" in entry] == [3]
    assert [entry["step"] for entry in logged if "perf/data_wait" in entry] == [1, 2, 3, 4]


def test_a_metric_that_is_misspelt(tmp_path, models) -> None:
    with pytest.raises(RuntimeError) as error:
        train(tmp_path, models.Own(), EarlyStopping("val/los"))
    problem = explained(error.value)
    assert "val/los" in problem.what and "monitor=" in problem.remedy


def test_a_loss_that_is_nan_is_logged_once_with_the_step(tmp_path, models, caplog) -> None:
    train(tmp_path, models.Broken())
    (text,) = [r.getMessage() for r in caplog.records if "the loss is" in r.getMessage()]
    assert text.startswith("the loss is nan since step 3 at the latest")
