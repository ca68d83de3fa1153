"""Builds a model on the `meta` device, without memory or weights. For functions that pass **kwargs
on, this alone shows which arguments are valid."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdl.util.errors import Problem, UserError
from distdl.util.suggest import closest

if TYPE_CHECKING:
    from torch import nn

# Arguments that are left out, because they download weights.
WEIGHTS = ("pretrained", "weights", "weights_backbone", "checkpoint_path", "pretrained_cfg")
# Keys of `model` that the builder takes, whatever the model is (`worker.build.make_module`).
MODEL_KEYS = ("recompute", "lora")
_UNEXPECTED = re.compile(r"([\w.<>]+)\(\) got an unexpected keyword argument '(\w+)'")

WITH_BACKBONE = ("torchvision.models.detection", "torchvision.models.segmentation")


def targets_own(node: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a model's node that its target gets."""
    return {str(key): value for key, value in node.items() if key not in MODEL_KEYS}


def without_weights(node: Mapping[str, Any]) -> dict[str, Any]:
    """A node without what downloads or reads weights, also in the nodes and lists inside it."""
    bare = {key: _bare(value) for key, value in node.items() if key not in WEIGHTS}
    if str(node.get("_target_", "")).startswith(WITH_BACKBONE):
        bare["weights"] = bare["weights_backbone"] = None  # the default downloads a backbone
    return bare


def _bare(value: object) -> object:
    if isinstance(value, Mapping):
        return without_weights(value)
    if isinstance(value, list):
        return [_bare(item) for item in value]
    return value


def build_on_meta(node: Mapping[str, Any]) -> nn.Module:
    """The module of a node on `meta`. Any class's __init__ runs, so anything may be raised."""
    import torch
    from hydra.utils import instantiate

    bare = without_weights(node)
    with torch.device("meta"):
        module: nn.Module = instantiate(bare, _convert_=node.get("_convert_", "all"))
    return module


def on_meta(node: Mapping[str, object]) -> nn.Module | None:
    """The module of a node on `meta`; None: it cannot be built there."""
    module: object = None
    with suppress(Exception):  # any class's __init__ runs
        module = build_on_meta(node)
    from torch import nn

    return module if isinstance(module, nn.Module) else None


def misfit(node: dict[str, Any]) -> Problem | None:
    """Builds a node on `meta`.

    Returns:
        None if it builds, or if it fails only because it is on `meta`; else a problem whose path is
        the argument's name ("" if unknown). In its remedy, `{}` stands for the node's path.
    """
    from hydra.errors import InstantiationException

    try:
        build_on_meta(node)
    except Exception as error:  # any class's __init__ runs
        if isinstance(error, InstantiationException) and error.__cause__:
            return _explain(error.__cause__)
        return _explain(error)
    return None


def _explain(error: BaseException) -> Problem | None:
    if isinstance(error, UserError):
        problem = error.problems[0]
        return replace(problem, path=problem.path.rpartition(".")[2])
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if unexpected := _UNEXPECTED.search(text):
        names = _parameters(error, unexpected[1])
        near = closest(unexpected[2], names)
        return Problem(
            unexpected[2],
            what=f"takes no argument {unexpected[2]!r}",
            remedy=f"did you mean {{}}.{near}?" if near else "",
            code="unknown-key",
        )
    if "meta" in text or isinstance(error, NotImplementedError):
        return None
    if model := re.match(r"Unknown model \(([^)]*)\)", text):
        import timm

        near = closest(model[1], timm.list_models())
        return Problem(
            "model_name",
            what=f"timm has no model {model[1]!r}",
            remedy=f"did you mean {{}}.model_name={near}?" if near else "",
            code="incomplete",
        )
    return Problem("", what=f"cannot be built: {type(error).__name__}: {text}", code="failed")


def _parameters(error: BaseException, name: str) -> list[str]:
    """The arguments of the callable `name` that refused one; its caller's frame shows it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    visible = {**frames[-1].f_globals, **frames[-1].f_locals} if frames else {}
    name = name.removesuffix(".__init__")
    for value in visible.values():
        if getattr(value, "__qualname__", None) == name and callable(value):
            return list(inspect.signature(value).parameters)
    return []
