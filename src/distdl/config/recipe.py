"""A composed config as values: what is a run's recipe, where does it run, and what may change.

The frozen `config.yaml` holds the recipe and is byte for byte the same under every launcher. The
keys of `WHERE` say where it runs; they go to the attempt's `launch.yaml`, and the worker merges the
two again.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Keys that say where a run runs, and not what it is.
WHERE = (
    "task",
    "launcher",
    "output_dir",
    "dry_run",
    "follow",
    "project.root",
    "project.allow",
    "project.max_snapshot_mb",
    "checkpoint.trust_pickle",
    "trainer.devices",
    "trainer.num_nodes",
)
_CLOCK = re.compile(r"\$\{(hydra|now):[^{}]*\}")
# `task._target_` of what trains.
TRAIN, BENCHMARK = "distdl.tasks.train", "distdl.tasks.benchmark"
EVALUATE = ("distdl.tasks.validate", "distdl.tasks.test")
# Keys of the recipe that an attempt may change, besides those of WHERE.
CHANGEABLE = (
    "data.batch_size",
    "data.on_damaged",
    "trainer.accumulate_grad_batches",
    "trainer.max_epochs",
    "trainer.max_steps",
    "trainer.max_time",
    "checkpoint.sharded",
    "checkpoint.monitor",
    "checkpoint.mode",
)


def _input(name: str, *, _root_: DictConfig) -> str:
    """`${input:imagenet}`: where this place keeps a data set that the recipe only names.

    A launcher whose place decides that itself (a mount) sets DISTDL_INPUT_IMAGENET for each rank;
    elsewhere `launcher.inputs.imagenet` is a path, or has one.
    """
    if path := os.environ.get(f"DISTDL_INPUT_{name.upper()}"):
        return path
    node = OmegaConf.select(_root_, f"launcher.inputs.{name}")
    if node is None:
        raise KeyError(f"launcher.inputs.{name}")
    return str(node if isinstance(node, str) else node["path"])


OmegaConf.register_new_resolver("input", _input, replace=True)


def recipe_of(config: DictConfig) -> DictConfig:
    """What the run is: the config without where it runs, `${hydra:}` and `${now:}` resolved.

    `${oc.env:X}` stays as it is, so that host paths and secrets resolve on the worker and never
    travel.
    """
    recipe = _written(config)
    recipe.pop("hydra", None)
    for path in WHERE:
        _pop(recipe, path)
    return OmegaConf.create(recipe)


def same_recipe(one: DictConfig, other: DictConfig) -> bool:
    """Whether two configs are of one run. An older recipe may hold what is of WHERE by now."""
    return recipe_of(one) == recipe_of(other)


def longer(config: DictConfig) -> str:
    """The overrides with which a resume trains longer than a config says."""
    limits = ("trainer.max_epochs", "trainer.max_steps", "trainer.max_time")
    given = [key for key in limits if OmegaConf.select(config, key) not in (None, -1)]
    return " ".join(f"{key}=<more>" for key in given or limits[:2])


def unit_of(data: Any) -> str:
    """What a second is counted in: the data that come with distdl are images, others may be
    anything.

    Args:
        data: What `data._target_` names, or the module of its class.
    """
    return "img/s" if is_own(data) else "samples/s"


def is_own(target: Any) -> bool:
    """Whether a `_target_` is distdl's own: what it does with its arguments is known."""
    return str(target).startswith("distdl.")


def where_of(config: DictConfig) -> DictConfig:
    """Where it runs: the keys of WHERE alone, as a nested config."""
    written, where = _written(config), OmegaConf.create({})
    for path in WHERE:
        if path in flat_paths(written, leaves=False):
            OmegaConf.update(where, path, _pop(written, path), force_add=True)
    return where


def merge(
    recipe: DictConfig, where: DictConfig, changes: dict[str, Any] | None = None
) -> DictConfig:
    """Recipe and where, one config again, with an attempt's changes on top."""
    config = OmegaConf.merge(recipe, where)
    assert isinstance(config, DictConfig)
    for path, value in (changes or {}).items():  # another strategy has other keys: no merging
        OmegaConf.update(config, path, value, force_add=True, merge=False)
    return config


def plain(node: Any) -> dict[str, Any]:
    """A mapping node as plain Python, resolved; empty for none."""
    if not node:
        return {}
    values = OmegaConf.to_container(node, resolve=True)
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def to_yaml(config: DictConfig) -> str:
    return OmegaConf.to_yaml(config, resolve=False)


def hash_of(text: str, length: int = 8) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def difference(old: DictConfig, new: DictConfig) -> str:
    """A unified diff of two configs, as people read it."""
    lines = difflib.unified_diff(
        to_yaml(old).splitlines(), to_yaml(new).splitlines(), "stored", "given", lineterm="", n=2
    )
    return "\n".join(lines)


def flat_paths(config: Any, prefix: str = "", *, leaves: bool = True) -> list[str]:
    """Every path of a config in dotted form; with `leaves=False` inner nodes as well."""
    plain = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
    paths: list[str] = []
    for key, value in plain.items() if isinstance(plain, dict) else ():
        path = f"{prefix}{key!s}"
        if not leaves or not isinstance(value, dict):
            paths.append(path)
        paths += flat_paths(value, f"{path}.", leaves=leaves)
    return paths


def _written(config: DictConfig) -> dict[str, Any]:
    """As plain containers, not resolved but for what only Hydra, here and now, can resolve."""
    written = _without_clock(OmegaConf.to_container(config, resolve=False))
    assert isinstance(written, dict)
    return written


def _without_clock(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_clock(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_clock(value) for value in node]
    if isinstance(node, str) and _CLOCK.fullmatch(node):
        return OmegaConf.create({"value": node}).value
    if isinstance(node, str):
        return _CLOCK.sub(lambda match: str(_without_clock(match[0])), node)
    return node


def _pop(node: Any, path: str) -> Any:
    """Takes the value at a path out of nested mappings."""
    *parents, key = path.split(".")
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    return node.pop(key, None) if isinstance(node, dict) else None
