"""Ranges of numbers, for annotations: validation refuses other values before anything starts."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt

Count = Annotated[int, Ge(0)]
Positive = Annotated[int, Ge(1)]
NotNegative = Annotated[float, Ge(0)]
AboveZero = Annotated[float, Gt(0)]
