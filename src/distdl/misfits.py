"""What a module that steps its optimizers itself, or a callback, makes impossible: refused before
the start. Validation asks with classes, the worker again with the real thing."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler

from distdl.errors import Problem

_MANUAL = "the model steps its optimizers itself (automatic_optimization = False), and the Trainer"


def misfits(
    trainer: Mapping[str, Any], callbacks: Mapping[str, type], manual: bool
) -> Iterator[Problem]:
    """Problems, by the Trainer's arguments and the class of each callback in the config."""
    clip, accumulate = trainer.get("gradient_clip_val"), trainer.get("accumulate_grad_batches", 1)
    if manual and clip:
        kind = trainer.get("gradient_clip_algorithm") or "norm"
        call = f"self.clip_gradients(optimizer, {clip}, {kind!r})"
        remedy = f"trainer.gradient_clip_val=null, and before each step: {call}"
        yield Problem("trainer.gradient_clip_val", f"{_MANUAL} does not clip for it", remedy)
    if manual and accumulate != 1:
        remedy = f"trainer.accumulate_grad_batches=1, and step at each {accumulate}th batch_idx"
        what = f"{_MANUAL} does not accumulate for it"
        yield Problem("trainer.accumulate_grad_batches", what, remedy)
    for place, cls in ((f"callbacks.{name}", cls) for name, cls in callbacks.items()):
        if issubclass(cls, BatchSizeFinder):
            what = "would change the batch size at each start, and with it the run's global batch"
            yield Problem(place, what, f"~{place}, and data.batch_size=...")
        if issubclass(cls, GradientAccumulationScheduler) and (manual or accumulate != 1):
            what = f"and trainer.accumulate_grad_batches={accumulate} exclude each other"
            remedy = (
                f"trainer.accumulate_grad_batches=1, and {place}.scheduling={{0: {accumulate}}}"
            )
            if manual:
                what, remedy = f"{_MANUAL} does not accumulate for it", f"~{place}"
            yield Problem(place, what, remedy)


def is_manual(cls: type) -> bool:
    """Whether a module's class, or its `__init__` at its top level, says `automatic_optimization =
    False`. What depends on arguments only an instance shows."""
    for base in cls.__mro__:
        if base is LightningModule:
            break
        if isinstance(said := vars(base).get("automatic_optimization"), bool):
            return not said
        try:
            tree: Any = ast.parse(textwrap.dedent(inspect.getsource(vars(base)["__init__"])))
        except (KeyError, OSError, TypeError, SyntaxError):
            continue
        lines = [ast.unparse(statement) for statement in tree.body[0].body]
        for value in (True, False):
            if f"self.automatic_optimization = {value}" in lines:
                return not value
    return False
