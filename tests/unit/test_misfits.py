"""What does not go together is refused, by a class where it tells, else by the real thing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelPruning,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from sample_config import in_process, refusals, sample
from torch.optim import SGD, Adam

from distdl.util.errors import UserError
from distdl.validation.misfits import by_hand, explained, makes_several, misfits, refuse
from distdl.worker import main

OFF = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)


class ByHand(BoringModel):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.automatic_optimization = False


class Inherits(ByHand):
    def __init__(self) -> None:
        super().__init__(2)


class Again(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True


class Mixin:
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Mixed(Mixin, BoringModel):
    pass


class After(BoringModel, Mixin):
    """Nobody calls the `__init__` of the second, and so it does."""

    def __init__(self) -> None:
        super().__init__()
        self._automatic_optimization = False


class OfClass(BoringModel):
    automatic_optimization = False


class Depends(BoringModel):
    def __init__(self, manual: bool = True) -> None:
        super().__init__()
        if manual:
            self.automatic_optimization = False


class Later(ByHand):
    """Its base says what it then takes back."""

    def __init__(self) -> None:
        super().__init__()
        self.configure(True)

    def configure(self, automatic: bool) -> None:
        self.automatic_optimization = automatic


class Both(BoringModel):
    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        if automatic:
            self.automatic_optimization = True


class Property(BoringModel):
    @property
    def automatic_optimization(self) -> bool:  # type: ignore[override]
        return False


class ByName(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        setattr(self, "automatic_optimization", False)  # noqa: B010


class Reads(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.automatic_optimization
        return super().training_step(batch, batch_idx)


class Several(BoringModel):
    def configure_optimizers(self) -> Any:
        return [SGD(self.parameters(), 0.1), Adam(self.parameters())], []


CLASSES = {
    False: (BoringModel, Reads, Again, Several),
    True: (ByHand, Inherits, Mixed, OfClass),
    None: (After, Depends, Later, Both, Property, ByName, dict),
}


@pytest.mark.parametrize(("cls", "manual"), [(c, m) for m, some in CLASSES.items() for c in some])
def test_a_class_that_steps_by_hand_is_known_by_its_source(cls: Any, manual: bool | None) -> None:
    assert by_hand(cls) is manual
    if issubclass(cls, BoringModel):
        instance = by_hand(cls())
        assert isinstance(instance, bool) and manual in (None, instance)


def returns(text: str) -> type:
    """A module whose `configure_optimizers` has these lines."""
    import linecache

    name = f"<{text}>"
    lines = ["class Model(BoringModel):", "    def configure_optimizers(self):"]
    source = "\n".join([*lines, *(f"        {line}" for line in text.split("; "))]) + "\n"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space = {"BoringModel": BoringModel, "torch": torch, "Adam": Adam, "__name__": "builtins"}
    exec(compile(source, name, "exec"), space)
    return space["Model"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "several"),
    [
        ("return [self.g, self.d], []", True),
        ("return [self.one()], [self.schedule()]", False),
        ("return [*self.all()], []", False),
        ("return self.g, self.d", False),  # may be optimizers, schedules
        ("return [self.a, self.b, self.c]", True),
        ("return {'optimizer': self.g}, {'optimizer': self.d}", True),
        ("return {'optimizer': self.g, 'lr_scheduler': self.s}", False),
        ("return [self.g]", False),
        ("if self.x: return self.g; return [self.g, self.d], []", False),
        ("return [self.g, self.d], [lambda: 0]", True),
        ("def f(): return [1, 2, 3]; return f()", False),
    ],
)
def test_several_optimizers_are_known_by_their_source(text: str, several: bool) -> None:
    assert makes_several(returns(text)) is several
    assert makes_several(BoringModel) is makes_several(pl.LightningModule) is False


OURS = "distdl.strategies"
BOTH = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 4}
TRAINER = ["trainer.gradient_clip_val", "trainer.accumulate_grad_batches"]


@pytest.mark.parametrize(
    ("model", "trainer", "callbacks", "strategy", "refused"),
    [
        (ByHand, BOTH, [BatchSizeFinder, GradientAccumulationScheduler], "", [*TRAINER, 0, 1]),
        (BoringModel, BOTH, [BatchSizeFinder, GradientAccumulationScheduler], "", [0, 1]),
        # Only an instance shows whether that one steps by hand.
        (Depends, BOTH, [BatchSizeFinder, GradientAccumulationScheduler], "", [0, 1]),
        (ByHand, {}, [EarlyStopping], "", []),
        (ByHand, {}, [], f"{OURS}.PipelineStrategy", ["strategy"]),
        (ByHand, {}, [], f"{OURS}.DeepSpeedStrategy", []),
        (Several, {}, [], f"{OURS}.DDPStrategy", ["model"]),
        (BoringModel, {}, [], f"{OURS}.DDPStrategy", []),
        # Pruning wants intact weights, and what is unfrozen later a DDP that averages it.
        (BoringModel, {}, [ModelPruning], f"{OURS}.FSDPStrategy", [0]),
        (BoringModel, {}, [ModelPruning], f"{OURS}.DeepSpeedStrategy", [0]),
        (BoringModel, {}, [ModelPruning], f"{OURS}.DDPStrategy", []),
        (BoringModel, {}, [BackboneFinetuning], f"{OURS}.auto", [0]),
        (BoringModel, {}, [BackboneFinetuning], "lightning.pytorch.strategies.DDPStrategy", [0]),
        (BoringModel, {}, [BackboneFinetuning], f"{OURS}.DDPStrategy", []),
    ],
)
def test_what_does_not_go_together(
    model: Any, trainer: Any, callbacks: list[Any], strategy: str, refused: list[Any]
) -> None:
    """A number among the refused is that of a callback."""
    chosen = {f"callbacks.{number}": cls for number, cls in enumerate(callbacks)}
    problems = [*misfits(trainer, chosen, model, strategy, 2)]
    paths = [f"callbacks.{each}" if isinstance(each, int) else each for each in refused]
    assert [problem.path for problem in problems] == paths


def test_what_to_write_instead() -> None:
    clip, _ = misfits(BOTH, {}, ByHand)
    assert "self.clip_gradients(optimizer, 0.5, 'norm')" in clip.remedy
    (schedule,) = misfits(BOTH, {"callbacks.x": GradientAccumulationScheduler}, BoringModel)
    assert "scheduling={0: 4}" in schedule.remedy
    assert not [*misfits({}, {"x": BackboneFinetuning}, BoringModel, f"{OURS}.auto", 1)]
    several = Several()
    several.automatic_optimization = False
    assert not [*misfits({}, {}, several, f"{OURS}.DDPStrategy")]
    (problem,) = misfits({}, {}, several, f"{OURS}.DeepSpeedStrategy")
    assert problem.path == "strategy" and "strategy=fsdp" in problem.remedy


@pytest.mark.parametrize(("task", "asked"), [("train", True), ("test", False)])
def test_validation_finds_them(monkeypatch: pytest.MonkeyPatch, task: str, asked: bool) -> None:
    boring = "lightning.pytorch.demos.boring_classes.BoringModel"
    monkeypatch.setattr(boring, ByHand)
    in_process(monkeypatch)
    changes = {"trainer.gradient_clip_val": 1.0, "task._target_": f"distdl.tasks.{task}"}
    refused = refusals(sample({**changes, "project.allow": [boring]}))
    assert any(each.startswith("trainer.gradient_clip_val: ") for each in refused) is asked


class Brings(BoringModel):
    def configure_callbacks(self) -> Any:
        return [BatchSizeFinder()]


def test_what_only_the_real_things_show() -> None:
    trainer = pl.Trainer(accelerator="cpu", gradient_clip_val=0.5, **OFF)
    trainer.strategy.connect(Depends())
    with pytest.raises(UserError, match=r"self.clip_gradients\(optimizer, 0.5, 'norm'\)"):
        refuse(trainer)
    trainer = pl.Trainer(accelerator="cpu", **OFF)
    trainer.strategy.connect(Brings())
    trainer.strategy.lightning_module.trainer = trainer
    refuse(trainer)
    trainer._callback_connector._attach_model_callbacks()
    with pytest.raises(UserError, match="BatchSizeFinder: would change the batch size"):
        refuse(trainer)


# ------------------------------------------------------------------- what comes in the middle


def _refused_by_lightning() -> None:
    pl.Trainer(accelerator="cpu", logger=False, limit_train_batches=1.5)


def _checked_by_lightning() -> None:
    class Two(BoringModel):
        def configure_optimizers(self) -> Any:
            return [SGD(self.parameters(), 0.1), SGD(self.parameters(), 0.1)]

    pl.Trainer(accelerator="cpu", fast_dev_run=True, **OFF).fit(Two())


def _wrong_by_itself() -> None:
    raise ValueError("mine")


def _mixed() -> None:
    def training_step() -> None:
        raise RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert")

    training_step()


@pytest.mark.parametrize(
    ("work", "kind", "text"),
    [
        (_refused_by_lightning, UserError, "invalid value 1.5"),
        (_checked_by_lightning, UserError, "(?s)model: Lightning refuses .* parameter groups"),
        (_mixed, UserError, r"(?s)strategy: weights .*test_misfits.py, line .*strategy=ddp"),
        (_wrong_by_itself, ValueError, "mine"),
    ],
)
def test_what_lightning_raises_is_for_the_user(
    work: Callable[[], None], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text) as caught, main.lightnings_refusals():
        work()
    assert type(caught.value) is kind
    assert kind is ValueError or isinstance(
        caught.value.__cause__, MisconfigurationException | RuntimeError
    )


def test_what_is_not_the_loggers(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    with pytest.raises(AttributeError) as raised:
        CSVLogger(tmp_path).experiment.add_histogram("x", 1)  # type: ignore[attr-defined]
    problem = explained(raised.value)
    assert problem is not None and problem.path == "tracking"
    assert "add_histogram" in problem.what and "tracking=[tensorboard,mlflow]" in problem.remedy
    with pytest.raises(AttributeError) as raised:
        tmp_path.add_histogram  # type: ignore[attr-defined] # noqa: B018
    assert explained(raised.value) is None
