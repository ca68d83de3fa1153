"""The methods that a task requires of the user's classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from distdl.util.errors import Problem
from distdl.validation import kinds


def missing_methods(methods: Sequence[str], context: Mapping[str, Any]) -> Iterator[Problem]:
    """The methods (`training_step`, `train_dataloader`) that the config's model and data do not
    define. Objects that functions return are checked later, by Lightning.

    Args:
        context: Of a task's `check`.
    """
    config = context["config"]
    wanted = list(methods)
    if "training_step" in methods and not config.get("optimizer"):
        wanted.append("configure_optimizers")
    for name in wanted:
        # As in Lightning: if there is a data module, only it provides loaders.
        loads = name.endswith("_dataloader")
        section = "data" if loads and config.get("data") else "model"
        part = config.get(section)
        if not part or section in context["refused"] or part.get("_partial_"):
            continue
        if not has(kinds.locate(part["_target_"]), name):
            remedy = "define it"
            if name == "configure_optimizers":
                remedy = "define it, or choose one: optimizer=sgd"
            if section == "data" and part["_target_"].startswith("distdl."):
                remedy = "data=imagenet"
            yield Problem(
                "",
                what=f"needs {name}, which {part['_target_']} does not define",
                remedy=remedy,
                code="incomplete",
            )


def has(target: object, name: str) -> bool:
    """Whether what `target` builds has its own method: from its class, or set by `__init__`."""
    if not inspect.isclass(target):
        return True
    bases = (LightningModule, LightningDataModule)
    base = next((each for each in bases if issubclass(target, each)), None)
    if base is None or getattr(target, name, None) is not getattr(base, name, None):
        return True
    return name in getattr(target.__init__, "__code__", has.__code__).co_names
