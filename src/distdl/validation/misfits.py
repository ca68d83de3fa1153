"""Combinations that do not work: Trainer arguments, manual optimization, callbacks, strategies.

Validation checks classes before the start; the worker checks the real objects again.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from distdl.util.errors import Problem, UserError
from distdl.util.ordinals import ordinal

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_STEPS_ITSELF = "the model steps its optimizers itself (automatic_optimization = False)"
_NOT_ACCUMULATED = f"{_STEPS_ITSELF}, and the Trainer does not accumulate for it"
_SWITCH = "automatic_optimization"
_ONE_OR_BY_HAND = (
    "one optimizer with several parameter groups, or self.automatic_optimization = False and "
    "strategy=ddp or strategy=fsdp"
)
_ONE_OR_SEVERAL = (
    "one optimizer with several parameter groups, or strategy=ddp or strategy=fsdp, which take "
    "several"
)
_SEVERAL = "strategy=ddp or strategy=fsdp, which take several"
_METRIC = "its monitor= must be a metric that is logged; correct it, and repeat the same command"
_SPLIT = ("FSDPStrategy", "DeepSpeedStrategy")
# A part of an error of Lightning or torch -> the key, what is wrong (None: its own text), remedy.
_KNOWN: dict[str, tuple[str, str | None, str]] = {
    "multiple optimizers is only supported": ("model", None, _ONE_OR_BY_HAND),
    "only supports single optimizer": ("strategy", None, _ONE_OR_SEVERAL),
    "parameters that were not used in producing the loss": (
        "strategy",
        "a backward pass used a part of the model's parameters, and DDP waits for all of them",
        "strategy=ddp strategy.find_unused_parameters=true",
    ),
    "Early stopping conditioned on metric": ("callbacks", None, _METRIC),
    "ReduceLROnPlateau conditioned on metric": ("model", None, _METRIC),
    "got mixed torch.Tensor and DTensor": (
        "strategy",
        "weights are used outside of their module's forward, where a rank has only a slice of them",
        "call that module itself, or strategy=ddp",
    ),
}


def misfits(
    trainer: Mapping[str, Any],
    callbacks: Mapping[str, type],
    model: LightningModule | type | None = None,
    strategy: str = "",
    ranks: int = 1,
) -> Iterator[Problem]:
    """Yields a problem for each combination that does not work.

    Args:
        trainer: The Trainer's arguments.
        callbacks: Their classes, by config path (`callbacks.stop`) or by name.
        model: The LightningModule or its class.
        strategy: The dotted path of its class, `distdl.strategies.DDPStrategy`.
        ranks: The number of ranks.
    """
    accumulate = trainer.get("accumulate_grad_batches", 1)
    manual = by_hand(model)
    if manual:
        yield from _of_manual_optimization(trainer, accumulate, strategy)
    if makes_several(model):
        yield from _of_several_optimizers(manual, strategy)
    for path, cls in callbacks.items():
        yield from _of_callback(path, cls, bool(manual), accumulate, strategy, ranks)


def _of_manual_optimization(
    trainer: Mapping[str, Any], accumulate: int, strategy: str
) -> Iterator[Problem]:
    clip = trainer.get("gradient_clip_val")
    if clip:
        kind = trainer.get("gradient_clip_algorithm") or "norm"
        call = f"self.clip_gradients(optimizer, {clip}, {kind!r})"
        yield Problem(
            path="trainer.gradient_clip_val",
            what=f"{_STEPS_ITSELF}, and the Trainer does not clip for it",
            remedy=f"trainer.gradient_clip_val=null, and before each step: {call}",
            code="unsupported",
        )
    if accumulate != 1:
        step = f"step at each {ordinal(accumulate)} batch_idx"
        yield Problem(
            path="trainer.accumulate_grad_batches",
            what=_NOT_ACCUMULATED,
            remedy=f"trainer.accumulate_grad_batches=1, and {step}",
            code="unsupported",
        )
    if strategy.endswith("PipelineStrategy"):
        yield Problem(
            "strategy",
            what=f"{_STEPS_ITSELF}, and a pipeline steps them too",
            remedy="strategy=ddp",
            code="unsupported",
        )


def _of_several_optimizers(manual: bool | None, strategy: str) -> Iterator[Problem]:
    if manual is False:
        yield Problem(
            path="model",
            what=(
                "configure_optimizers returns several optimizers, and Lightning steps one by itself"
            ),
            remedy=_ONE_OR_BY_HAND,
            code="unsupported",
        )
    elif strategy.endswith("DeepSpeedStrategy"):
        yield Problem(
            path="strategy",
            what="configure_optimizers returns several optimizers, and DeepSpeed takes one",
            remedy=_SEVERAL,
            code="unsupported",
        )


def _of_callback(
    path: str, cls: type, manual: bool, accumulate: int, strategy: str, ranks: int
) -> Iterator[Problem]:
    from lightning.pytorch import callbacks as lightnings

    if issubclass(cls, lightnings.BatchSizeFinder):
        yield Problem(
            path=path,
            what="would change the batch size at each start, and with it the run's global batch",
            remedy="remove it, and write data.batch_size=...",
            code="unsupported",
        )
    if issubclass(cls, lightnings.GradientAccumulationScheduler):
        if manual:
            yield Problem(path, what=_NOT_ACCUMULATED, remedy="remove it", code="unsupported")
        elif accumulate != 1:
            schedule = f"scheduling={{0: {accumulate}}}"
            yield Problem(
                path=path,
                what=f"cannot be combined with trainer.accumulate_grad_batches={accumulate}",
                remedy=f"trainer.accumulate_grad_batches=1, and {schedule} in it",
                code="unsupported",
            )
    lightnings_ddp = re.fullmatch(r"distdl\.strategies\.auto|lightning\..*\.DDPStrategy", strategy)
    if issubclass(cls, lightnings.BaseFinetuning) and ranks > 1 and lightnings_ddp:
        yield Problem(
            path=path,
            what="unfreezes layers that Lightning's DDP does not average: the ranks would diverge",
            remedy="strategy=ddp",
            code="unsupported",
        )
    if issubclass(cls, lightnings.ModelPruning) and strategy.endswith(_SPLIT):
        yield Problem(
            path,
            what="prunes complete weights, not a rank's slices",
            remedy="strategy=ddp",
            code="unsupported",
        )


def refuse(trainer: Trainer) -> None:
    """Checks the real objects, including callbacks from the module's `configure_callbacks`; raises
    a UserError with all combinations that do not work."""
    algorithm = trainer.gradient_clip_algorithm
    arguments = {
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": getattr(algorithm, "value", algorithm),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
    }
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    kinds = {type(callback).__name__: type(callback) for callback in callbacks}
    strategy = f"{type(trainer.strategy).__module__}.{type(trainer.strategy).__name__}"
    module, ranks = trainer.lightning_module, trainer.world_size
    if wrong := [*misfits(arguments, kinds, module, strategy, ranks)]:
        raise UserError(*wrong)


def explained(error: BaseException) -> Problem | None:
    """An error of Lightning or torch during training as a Problem with a remedy; None if the error
    is unknown."""
    called, owner = (getattr(error, key, None) for key in ("name", "obj"))
    logs = type(owner).__module__.startswith(("distdl.tracking.", "mlflow.", "lightning."))
    if logs and str(called).startswith("add_"):
        return Problem(
            "tracking",
            what=f"the model calls {called} of TensorBoard's writer, and self.logger has none",
            remedy="tracking=[tensorboard,mlflow]: the first is self.logger",
            code="incomplete",
        )
    for text, (path, what, remedy) in _KNOWN.items():
        if text in str(error):
            frames = traceback.extract_tb(error.__traceback__)
            outside = [f for f in frames if "site-packages" not in f.filename]
            steps = [f"({f.filename}, line {f.lineno})" for f in outside if f.name[-5:] == "_step"]
            line = f" {steps[-1]}" if steps and what else ""
            return Problem(
                path,
                what=f"{what or f'Lightning refuses it: {error}'}{line}",
                remedy=remedy,
                code="failed",
            )
    return None


# ------------------------------------------------------------ what the source of a class shows


def by_hand(model: object) -> bool | None:
    """Whether a module steps its optimizers itself (`automatic_optimization = False`).

    None if its source does not show it: the switch depends on arguments, is a property, or is set
    elsewhere than in the class body or at the top level of `__init__`.
    """
    from lightning.pytorch import LightningModule

    if isinstance(model, LightningModule):
        return not model.automatic_optimization
    if not inspect.isclass(model) or not issubclass(model, LightningModule):
        return None
    order = [base for base in model.__mro__ if base not in LightningModule.__mro__[1:]]
    for position, base in enumerate(order):
        if base is LightningModule:
            continue
        tree = _parsed(base)
        if not isinstance(tree, ast.ClassDef):
            return None
        nodes = [n for n in ast.walk(tree) if not isinstance(getattr(n, "ctx", None), ast.Load)]
        names = [getattr(n, key, None) for n in nodes for key in ("attr", "id", "name", "value")]
        inits = [s for s in tree.body if isinstance(s, ast.FunctionDef) and s.name == "__init__"]
        lines = map(ast.unparse, [*tree.body, *(line for init in inits for line in init.body)])
        sets = [line for line in lines if re.fullmatch(rf"(self\.)?{_SWITCH} = (True|False)", line)]
        # An `__init__` after Lightning's class in the MRO may not be called.
        if len(sets) == names.count(_SWITCH) == 1 and position < order.index(LightningModule):
            return sets[0].endswith("False")
        if _SWITCH in names:
            return None
    return False


def makes_several(model: object) -> bool:
    """Whether each `return` of a module's `configure_optimizers` shows several optimizers.

    Two plain names do not count: they may be the optimizers and their schedules.
    """
    tree = _parsed(getattr(model, "configure_optimizers", None)) or ast.Pass()
    returned = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Return):
            items = getattr(node.value, "elts", [])
            if len(items) == 2 and isinstance(items[0], ast.List):
                items = [*items[0].elts, None] if len(items[0].elts) > 1 else []
            sure = len(items) > 2 or (len(items) == 2 and isinstance(items[0], ast.Dict))
            returned.append(sure and not any(isinstance(item, ast.Starred) for item in items))
        elif isinstance(node, ast.FunctionDef) and node is not tree:
            return False
    return bool(returned) and all(returned)


def _parsed(thing: Callable[..., Any] | None) -> ast.stmt | None:
    """The syntax tree of a class or function; None if its source is not available."""
    if thing is None:
        return None
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
