"""What a number must be to be reckoned with, in the words of a refusal."""

from __future__ import annotations

import math
from numbers import Real

MORE_THAN_0 = "more than 0"
FROM_0 = "0 or more"
FROM_1 = "at least 1"


def amiss(value: object, bound: str = MORE_THAN_0, whole: bool = False) -> str:
    """What is wrong with a number, or "" where nothing is.

    Args:
        bound: One of the constants above.
        whole: 8.0 is, as is any of numpy's integers.
    """
    kind = "a whole number" if whole else "a number"
    # True would count as 1, and nobody means that by it.
    if isinstance(value, bool) or not isinstance(value, Real):
        return f"must be {kind}, {bound}, not {value!r}"
    try:
        number = float(value)
    except OverflowError:  # an integer beyond any float
        number = math.inf
    if whole and math.isfinite(number) and not number.is_integer():
        return f"must be {kind}, {bound}, not {value}"
    enough = {MORE_THAN_0: number > 0, FROM_0: number >= 0, FROM_1: number >= 1}[bound]
    return "" if enough and math.isfinite(number) else f"must be {bound}, not {value}"
