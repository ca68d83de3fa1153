"""Converts the hyperparameters of `save_hyperparameters()`, of any type, to plain data.

A resume does not read them; only Lightning's `load_from_checkpoint` passes them to the module.
Mappings, lists, numbers and text are therefore enough. A `functools.partial` becomes a Hydra node
(`_target_`); a class, function or network becomes its name.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from torch import nn

from distdl.checkpoint.plain_state import MAPPINGS, is_leaf, loads, name_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

LONGEST = 200  # characters of a text that replaces an object


def described(value: object) -> object:
    """A value as plain data; an object without such a form becomes text."""
    if is_leaf(value):
        return value
    for is_of_kind, form in FORMS:
        if is_of_kind(value):
            return form(value)
    return value if loads(value) else _text(value)


def _config(value: Container) -> object:
    try:
        return OmegaConf.to_container(value, resolve=True)
    except Exception:  # if a resolver fails: keep the interpolation as written
        return OmegaConf.to_container(value, resolve=False)


def _mapping(value: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The same object if nothing in it changes, and torch reads it."""
    new = {k if is_leaf(k) else str(k): described(v) for k, v in value.items()}
    unchanged = all(key in value and new[key] is value[key] for key in new)
    return value if unchanged and type(value) in MAPPINGS else new


def _sequence(value: Collection[Any]) -> Collection[Any]:
    """The same object if nothing in it changes, and torch reads it; else a tuple or a list."""
    if type(value) in (list, tuple, set) and all(map(is_leaf, value)):
        return value
    each = [described(one) for one in value]
    return tuple(each) if isinstance(value, tuple) else each


def _member(value: enum.Enum) -> object:
    return value.value if is_leaf(value.value) else value.name


def _array(value: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))


def _fields(value: DataclassInstance) -> dict[str, Any]:
    return {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}


def _partial(value: functools.partial[Any]) -> dict[str, Any]:
    """As a node of Hydra's."""
    node: dict[str, Any] = {"_target_": name_of(value.func), "_partial_": True}
    if value.args:
        node["_args_"] = described(list(value.args))
    return {**node, **_mapping(value.keywords)}


def _name(value: object) -> str:
    return name_of(type(value) if isinstance(value, nn.Module) else value)


def _text(value: object) -> str:
    try:
        return repr(value)[:LONGEST]
    except Exception:  # a `__repr__` of the user's code
        return name_of(type(value))


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_number(value: object) -> bool:
    return isinstance(value, np.generic) and is_leaf(value.item())


def _is_array_of_numbers(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


# What a value is -> its form; the first that fits.
FORMS: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (_of(Container), _config),
    (_of(Mapping), _mapping),
    (_of(list, tuple, set, frozenset, deque), _sequence),
    (_of(Namespace), lambda value: described(vars(value))),
    (_of(enum.Enum), _member),
    (_of(PurePath), str),
    (_is_number, lambda value: value.item()),
    (_is_array_of_numbers, _array),
    (_is_dataclass, _fields),
    (_of(functools.partial), _partial),
    (inspect.ismodule, lambda value: value.__name__),
    (callable, _name),
)
