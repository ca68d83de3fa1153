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
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from omegaconf import Container, OmegaConf
from torch import nn

from distdl.checkpoint.plain_state import MAPPINGS, is_leaf, loads, name_of

LONGEST = 200  # characters of a text that replaces an object


def described(value: Any) -> Any:
    """A value as plain data; an object without such a form becomes text."""
    if is_leaf(value):
        return value
    if isinstance(value, Container):
        try:
            return OmegaConf.to_container(value, resolve=True)
        except Exception:  # if a resolver fails: keep the interpolation as written
            return OmegaConf.to_container(value, resolve=False)
    if isinstance(value, Mapping):
        new = {k if is_leaf(k) else str(k): described(v) for k, v in value.items()}
        same = type(value) in MAPPINGS and all(k in value and v is value[k] for k, v in new.items())
        return value if same else new
    if isinstance(value, list | tuple | set | frozenset | deque):
        each = [described(one) for one in value]
        same = type(value) in (list, tuple, set) and all(map(is_leaf, value))
        return value if same else tuple(each) if isinstance(value, tuple) else each
    if isinstance(value, Namespace):
        return described(vars(value))
    if isinstance(value, enum.Enum):
        return value.value if is_leaf(value.value) else value.name
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, np.generic) and is_leaf(value.item()):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: described(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, functools.partial):
        positional = {"_args_": described(list(value.args))} if value.args else {}
        target = {"_target_": name_of(value.func), "_partial_": True}
        return {**target, **positional, **described(value.keywords)}
    if inspect.ismodule(value):
        return value.__name__
    if callable(value):
        return name_of(type(value) if isinstance(value, nn.Module) else value)
    if loads(value):
        return value
    try:
        return repr(value)[:LONGEST]
    except Exception:  # a `__repr__` of the user's code
        return name_of(type(value))
