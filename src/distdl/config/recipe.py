"""The parts of a composed config: a run's recipe, where it runs, and what may change.

The frozen `config.yaml` holds the recipe and is byte for byte the same under every launcher. The
keys of `WHERE` say where it runs; they go to the attempt's `launch.yaml`, and the worker merges the
two again.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import OmegaConfDumper

from distdl.config import task_facts

# Groups that are layered over everything else, in this order. The config has no key for them.
LAYERS = ("experiment", "debug")
# Keys that say where a run runs, not what it is.
WHERE = (
    "task",
    "launcher",
    "output_dir",
    "dry_run",
    "follow",
    "watchdog",
    "preflight",
    "project.root",
    "project.allow",
    "project.max_snapshot_mb",
    "checkpoint.trust_pickle",
    "trainer.devices",
    "trainer.num_nodes",
    "program.checkpoints",
    "program.sync",
)
_BREAKS = re.compile("[\x85\u2028\u2029]")  # line breaks to YAML, and text to everybody else
_CLOCK = re.compile(r"\$\{(hydra|now):[^{}]*\}")
UNITS_OF_TIME = ("days", "hours", "minutes", "seconds")  # of trainer.max_time, as text
# Keys of the recipe that an attempt may change, besides those of WHERE.
CHANGEABLE = (
    "model.recompute",  # changes no value, and a run that does not fit needs it
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
# Keys that an attempt of a task that evaluates may change as well, for itself alone.
CHANGEABLE_TO_EVALUATE = (
    "trainer.accelerator",
    "trainer.precision",
    "model.compile",
    "data.root",
    "data.decoder",
    "data.num_workers",
    "data.worker_kind",
    "data.cache_dir",
    "data.max_pixels",
    "data.predict_split",
)


@dataclass(frozen=True)
class Exportable:
    """Runs that `distdl export` takes, by their model.

    Args:
        data: The `_target_` of their data.
        option: The words that choose such data.
        formats: The first one is that of `serve` and `deploy`.
        refused: Other formats, and why models of this kind have none of them.
    """

    data: str
    option: str
    formats: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)


# By the `_target_` of the model. What each format holds is its domain's (`Domain.exports`).
EXPORTABLE = {
    "distdl.models.ImageClassifier": Exportable(
        "distdl.data.StoredImages",
        "data=imagenet data.root=FOLDER",
        ("pt2", "onnx", "mlflow", "weights"),
        {"package": "a classifier is a graph that needs no code: --to pt2"},
    ),
    "distdl.models.Detector": Exportable(
        "distdl.data.StoredObjects",
        "data=coco data.root=FOLDER",
        ("package", "onnx", "mlflow", "weights"),
        {
            "pt2": "torch.export cannot write a detector, whose number of boxes depends on the "
            "image (pytorch/vision#9306): --to package, or for one size --to onnx"
        },
    ),
}


def evaluates(config: DictConfig) -> bool:
    """Whether the config's task leaves the training as it is."""
    return task_facts.of(config).evaluates


def _input(name: str, *, _root_: DictConfig) -> str:
    """Resolves `${input:imagenet}`: the path of a data set that the recipe only names.

    If the platform chooses the path (a mount), its launcher sets DISTDL_INPUT_IMAGENET for each
    rank. Otherwise `launcher.inputs.imagenet` is the path, or a mapping with the key `path`.
    """
    if path := os.environ.get(f"DISTDL_INPUT_{name.upper()}"):
        return path
    node = OmegaConf.select(_root_, f"launcher.inputs.{name}")
    if node is None:
        raise KeyError(f"launcher.inputs.{name}")
    return str(node if isinstance(node, str) else node["path"])


OmegaConf.register_new_resolver("input", _input, replace=True)


def recipe_of(config: DictConfig) -> DictConfig:
    """The recipe: the config without the keys of WHERE, with `${hydra:}` and `${now:}` resolved.

    `${oc.env:X}` stays: the worker resolves host paths and secrets, and they are never sent.
    """
    recipe = _written(config)
    recipe.pop("hydra", None)
    for path in WHERE:
        _pop(recipe, path)
    return OmegaConf.create(recipe)


def same_recipe(one: DictConfig, other: DictConfig) -> bool:
    """Whether two configs have the same recipe. An older recipe may hold keys of WHERE."""
    return recipe_of(one) == recipe_of(other)


def longer(config: DictConfig) -> str:
    """The overrides that let a resume train twice as long as the config does; empty if it has no
    limit, so that the training ended by itself."""
    limits = {
        "trainer.max_epochs": _twice_count,
        "trainer.max_steps": _twice_count,
        "trainer.max_time": twice_time,
    }
    twice_each = {key: twice(OmegaConf.select(config, key)) for key, twice in limits.items()}
    return " ".join(f"{key}={value}" for key, value in twice_each.items() if value)


def _twice_count(value: object) -> str:
    return str(2 * value) if isinstance(value, int) and value > 0 else ""


def twice_time(value: object, least: float = 0.0) -> str:
    """Twice a `trainer.max_time`, as `dd:hh:mm:ss`; empty if it is none.

    Args:
        least: Seconds that are used already. If twice as much is not more than them, the time
            itself is added to them.
    """
    try:
        seconds = seconds_of(value)
        return time_text(round(2 * seconds if 2 * seconds > least else least + seconds))
    except (TypeError, ValueError):
        return ""


def seconds_of(value: object) -> float:
    """The seconds of a `trainer.max_time`: `dd:hh:mm:ss`, or the arguments of a timedelta.

    Raises:
        TypeError, ValueError: It is none.
    """
    if isinstance(value, Mapping):
        parts = {str(key): float(part) for key, part in value.items() if key != "_target_"}
    else:
        words = str(value).split(":")
        parts = dict(zip(UNITS_OF_TIME, map(float, words), strict=True))
    return timedelta(**parts).total_seconds()


def time_text(seconds: int) -> str:
    """A time as Lightning reads it for `trainer.max_time`: `dd:hh:mm:ss`."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days:02}:{hours:02}:{minutes:02}:{rest:02}"


def max_time_text(value: object) -> str:
    """A `trainer.max_time` as it is typed: `dd:hh:mm:ss`, or with parts of a second
    `{seconds:0.5}`.

    Raises:
        TypeError, ValueError: It is no time.
    """
    if not isinstance(value, Mapping):
        return str(value)
    seconds = seconds_of(value)
    return time_text(int(seconds)) if seconds.is_integer() else f"{{seconds:{seconds:g}}}"


def unit_of(data: object) -> str:
    """The unit of throughput: distdl's own data sets (by `_target_` or module) are images."""
    return "img/s" if is_own(data) else "samples/s"


def is_own(target: object) -> bool:
    """Whether a `_target_` is distdl's own, so that its use of its arguments is known."""
    return str(target).startswith("distdl.")


def where_of(config: DictConfig) -> DictConfig:
    """The keys of WHERE alone, as a nested config."""
    written = _written(config)
    where = OmegaConf.create({})
    absent = object()
    for path in WHERE:
        value = _pop(written, path, absent)
        if value is not absent:
            OmegaConf.update(where, path, value, force_add=True)
    return where


def merge(
    recipe: DictConfig, where: DictConfig, changes: dict[str, Any] | None = None
) -> DictConfig:
    """Merges recipe and where into one config again, with an attempt's changes on top."""
    config = OmegaConf.merge(recipe, where)
    assert isinstance(config, DictConfig)
    for path, value in (changes or {}).items():  # not merged: another strategy has other keys
        OmegaConf.update(config, path, value, force_add=True, merge=False)
    return config


def not_exportable(config: Mapping[Any, Any]) -> str | None:
    """Why `distdl export` refuses a run with this config; None: it does not."""
    model = (config.get("model") or {}).get("_target_")
    known = EXPORTABLE.get(str(model))
    if known is None:
        return f"the model is {model}, and only {' and '.join(EXPORTABLE)} can be exported"
    data = (config.get("data") or {}).get("_target_")
    if data != known.data:
        return f"the data is {data}, and only models on {known.data} can be exported"
    return None


def export_formats(config: Mapping[Any, Any]) -> Exportable:
    """The formats of a run that `not_exportable` does not refuse."""
    return EXPORTABLE[config["model"]["_target_"]]


def exportable_instead(config: Mapping[Any, Any], run: str) -> str:
    """What to type instead of an export that `not_exportable` refuses. `run` is its folder, as it
    is written in a shell."""
    weights = f"its weights alone: python -m distdl convert {run} --to weights"
    known = EXPORTABLE.get(str((config.get("model") or {}).get("_target_")))
    if known is None:
        return weights
    train = f"python -m distdl {known.option}"
    return f"train on images, as {train} does, and export that run; or {weights}"


def plain(node: Mapping[Any, Any] | None) -> dict[str, Any]:
    """A mapping node as plain Python, resolved; empty for None."""
    values = OmegaConf.to_container(node, resolve=True) if node else {}
    assert isinstance(values, dict)
    return values  # type: ignore[return-value]


def to_yaml(config: DictConfig) -> str:
    """As OmegaConf writes it, but so that every text is read as it was: PyYAML writes U+0085 as it
    is, and reads a blank."""
    container = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    return str(
        yaml.dump(
            container,
            default_flow_style=False,
            allow_unicode=True,
            sort_keys=False,
            Dumper=_Dumper,
        )
    )


class _Dumper(yaml.Dumper):
    pass


def _text(dumper: yaml.Dumper, value: str) -> yaml.ScalarNode:
    if _BREAKS.search(value):
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"')
    return OmegaConfDumper.str_representer(dumper, value)


_Dumper.add_representer(str, _text)


def hash_of(text: str, length: int = 8) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def difference(old: DictConfig, new: DictConfig) -> str:
    """A unified diff of two configs as YAML."""
    lines = difflib.unified_diff(
        to_yaml(old).splitlines(), to_yaml(new).splitlines(), "stored", "given", lineterm="", n=2
    )
    return "\n".join(lines)


def flat_paths(config: Mapping[Any, Any], *, leaves: bool = True) -> list[str]:
    """Every path of a config in dotted form; with `leaves=False` inner nodes as well."""
    plain = OmegaConf.to_container(config, resolve=False) if OmegaConf.is_config(config) else config
    return [*_paths_below(plain, "", leaves)]


def _paths_below(node: object, prefix: str, leaves: bool) -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        path = f"{prefix}{key!s}"
        if not leaves or not isinstance(value, dict):
            yield path
        yield from _paths_below(value, f"{path}.", leaves)


def values_at(node: object, path: str) -> Iterator[Any]:
    """The values at a dotted path, where keys may be dotted themselves: `launcher.env: {A: 1}`."""
    if not path:
        yield node
    elif isinstance(node, dict):
        for key, inner in node.items():
            if path == key or path.startswith(f"{key}."):
                yield from values_at(inner, path[len(str(key)) + 1 :])


def _written(config: DictConfig) -> dict[str, Any]:
    """As plain containers, with `${hydra:}` and `${now:}` resolved: no other process can."""
    written = _without_clock(OmegaConf.to_container(config, resolve=False))
    assert isinstance(written, dict)
    return written


def _without_clock(node: object) -> object:
    if isinstance(node, dict):
        return {key: _without_clock(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_without_clock(value) for value in node]
    if isinstance(node, str) and _CLOCK.fullmatch(node):
        return OmegaConf.create({"value": node}).value
    if isinstance(node, str):
        return _CLOCK.sub(lambda match: str(_without_clock(match[0])), node)
    return node


def _pop(node: object, path: str, default: object = None) -> object:
    """Removes the value at a path from nested mappings, and returns it."""
    *parents, key = path.split(".")
    for part in parents:
        node = node.get(part) if isinstance(node, dict) else None
    return node.pop(key, default) if isinstance(node, dict) else default
