"""The methods that a task requires of the user's classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from distdl.util.errors import Problem
from distdl.validation import kinds


def needs(step: str, loader: str) -> Callable[..., Iterator[Problem]]:
    """Makes a task's `check` (`Binding.hook`): the step and its loader must be defined by the
    classes. Objects that functions return are checked later, by Lightning."""

    def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
        config = context["config"]
        # As in Lightning: if there is a data module, only it provides loaders.
        wanted = {step: "model", loader: "data" if config.get("data") else "model"}
        if step == "training_step" and not config.get("optimizer"):
            wanted["configure_optimizers"] = "model"
        for name, section in wanted.items():
            part = config.get(section)
            if not part or section in context["refused"] or part.get("_partial_"):
                continue
            if not has(kinds.locate(part["_target_"]), name):
                what = f"needs {name}, which {part['_target_']} does not define"
                other = ", or choose one: optimizer=sgd" if name == "configure_optimizers" else ""
                ours = part["_target_"].startswith("distdl.") and section == "data"
                yield Problem("", what, "data=imagenet" if ours else f"define it{other}")

    return check


def has(target: Any, name: str) -> bool:
    """Whether what `target` builds has its own method: from its class, or set by `__init__`."""
    bases = (LightningModule, LightningDataModule)
    base = next((b for b in bases if inspect.isclass(target) and issubclass(target, b)), None)
    if base is None or getattr(target, name) is not getattr(base, name):
        return True
    return name in getattr(target.__init__, "__code__", has.__code__).co_names
