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
from typing import Any

import torch

GETATTR = "builtins.getattr"


def member(cls: Any, name: Any) -> Any:
    """The member of an enum with this name.

    Raises:
        UnpicklingError: `cls` is no enum, or has no such member.
    """
    is_enum = isinstance(cls, type) and issubclass(cls, enum.Enum)
    if not is_enum or not isinstance(name, str) or name not in cls.__members__:
        raise pickle.UnpicklingError(f"GLOBAL {GETATTR} was not an allowed global")
    return cls.__members__[name]


def allowed(
    lookup: Callable[[Any, Any], Any] = member,
) -> contextlib.AbstractContextManager[None]:
    """While torch loads a file with weights_only, it may hold members of the allowed enums."""
    return torch.serialization.safe_globals([(lookup, GETATTR)])
