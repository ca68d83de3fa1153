"""What does not go together is refused, by a class where it tells, else by the real thing."""

from __future__ import annotations

import json
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
from sample_config import sample
from torch.optim import SGD, Adam

from distdl import validate, worker
from distdl.binding import Binding
from distdl.errors import UserError
from distdl.misfits import by_hand, explained, makes_several, misfits, refuse

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


def test_what_does_not_go_together() -> None:
    trainer = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 4}
    chosen = {
        "callbacks.stop": EarlyStopping,
        "callbacks.search": BatchSizeFinder,
        "callbacks.more": GradientAccumulationScheduler,
    }
    found = list(misfits(trainer, chosen, ByHand))
    assert [p.path.rpartition(".")[2] for p in found] == [
        "gradient_clip_val",
        "accumulate_grad_batches",
        "search",
        "more",
    ]
    assert "self.clip_gradients(optimizer, 0.5, 'norm')" in found[0].remedy
    for model in (BoringModel, Depends):  # which only an instance tells
        alone = list(misfits(trainer, chosen, model))
        assert [p.path for p in alone] == ["callbacks.search", "callbacks.more"]
        assert "scheduling={0: 4}" in alone[1].remedy
    assert list(misfits({}, {"callbacks.stop": EarlyStopping}, ByHand)) == []


@pytest.mark.parametrize(
    ("model", "strategy", "said"),
    [
        (Several, "distdl.strategies.DDPStrategy", "model: configure_optimizers returns several"),
        (BoringModel, "distdl.strategies.DDPStrategy", ""),
        (ByHand, "distdl.strategies.PipelineStrategy", "strategy: the model steps its optimizers"),
        (ByHand, "distdl.strategies.DeepSpeedStrategy", ""),
    ],
)
def test_optimizers_and_strategies(model: Any, strategy: str, said: str) -> None:
    found = [f"{p.path}: {p.what}" for p in misfits({}, {}, model, strategy)]
    assert len(found) == bool(said) and all(text.startswith(said) for text in found)
    several = Several()
    several.automatic_optimization = False
    assert list(misfits({}, {}, several, "distdl.strategies.DDPStrategy")) == []
    (problem,) = misfits({}, {}, several, "distdl.strategies.DeepSpeedStrategy")
    assert problem.path == "strategy" and "strategy=fsdp" in problem.remedy


def test_pruning_wants_whole_weights() -> None:
    callbacks = {"callbacks.x": ModelPruning}
    for strategy, refused in {"FSDPStrategy": 1, "DeepSpeedStrategy": 1, "DDPStrategy": 0}.items():
        found = [*misfits({}, callbacks, BoringModel, f"distdl.strategies.{strategy}", 2)]
        assert len(found) == refused


@pytest.mark.parametrize(
    ("strategy", "ranks", "refused"),
    [
        ("distdl.strategies.auto", 1, False),
        ("distdl.strategies.auto", 2, True),
        ("lightning.pytorch.strategies.DDPStrategy", 2, True),
        ("distdl.strategies.DDPStrategy", 2, False),
    ],
)
def test_what_is_unfrozen_later_wants_our_ddp(strategy: str, ranks: int, refused: bool) -> None:
    callbacks = {"callbacks.x": BackboneFinetuning}
    assert bool([*misfits({}, callbacks, BoringModel, strategy, ranks)]) is refused


def told_by_validation(monkeypatch: pytest.MonkeyPatch, model: type, **more: Any) -> list[Any]:
    boring = "lightning.pytorch.demos.boring_classes.BoringModel"
    monkeypatch.setattr(boring, model)
    config = sample({"trainer.gradient_clip_val": 1.0, "project.allow": [boring], **more})
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        validate,
        "_ask_child",
        lambda text: asked.append(json.loads(text)) or {"problems": [], "notes": [], "facts": {}},
    )
    validate.check_bindings(config, None, None, local=True)
    binding = Binding(asked[0])
    binding.run()
    return [path for path, _, _ in binding.problems]


def test_validation_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "trainer.gradient_clip_val" in told_by_validation(monkeypatch, ByHand)
    test = {"task._target_": "distdl.tasks.test"}
    assert "trainer.gradient_clip_val" not in told_by_validation(monkeypatch, ByHand, **test)


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
    with pytest.raises(kind, match=text) as caught, worker.lightnings_refusals():
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
