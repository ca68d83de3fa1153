"""Members of enums in files that are read without running code.

Python 3.11.0 to 3.11.3 (Debian 12 has 3.11.2) pickles a member as `getattr(Class, name)`, other
versions as `Class(value)`. `getattr` itself would open every door, so a function that only looks up
members takes its place.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
from collections.abc import Callable

import torch

GETATTR = "builtins.getattr"


def member(cls: object, name: object) -> object:
    """The member of an enum with this name.

    Raises:
        UnpicklingError: `cls` is no enum, or has no such member.
    """
    if isinstance(cls, type) and issubclass(cls, enum.Enum) and isinstance(name, str):
        found = cls.__members__.get(name)
        if found is not None:
            return found
    raise pickle.UnpicklingError(f"GLOBAL {GETATTR} was not an allowed global")


def allowed(
    lookup: Callable[[object, object], object] = member,
) -> contextlib.AbstractContextManager[None]:
    """While torch loads a file with weights_only, it may hold members of the allowed enums."""
    return torch.serialization.safe_globals([(lookup, GETATTR)])
