"""JSON that any program reads: Python's own writer puts NaN and infinities into it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

NOT_FINITE = ("nan", "inf", "-inf")


def dumps(
    value: object,
    *,
    indent: int | None = None,
    default: Callable[[Any], object] | None = None,
) -> str:
    """`json.dumps`, with "nan", "inf" and "-inf" for numbers that JSON does not have."""
    return json.dumps(finite(value), allow_nan=False, indent=indent, default=default)


def finite(value: object) -> object:
    """A copy in which numbers that are not finite are texts, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {finite(key): finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with the numbers that `dumps` has written as texts."""
    return {k: float(v) if v in NOT_FINITE else v for k, v in values.items()}
