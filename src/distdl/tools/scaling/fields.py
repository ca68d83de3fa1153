"""Checks values against their annotations with pydantic; a mismatch is a UserError."""

from __future__ import annotations

import functools
from numbers import Real
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator, FiniteFloat, TypeAdapter, ValidationError, create_model

from distdl.util.errors import Problem, UserError
from distdl.util.suggest import closest


def _a_number(value: object) -> object:
    # pydantic accepts "8" and True as numbers.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("a number")
    return value


# 8.0 and numpy's integers count as whole numbers, too.
Count = Annotated[int, Ge(1), BeforeValidator(_a_number)]
Above0 = Annotated[FiniteFloat, Gt(0), BeforeValidator(_a_number)]
From0 = Annotated[FiniteFloat, Ge(0), BeforeValidator(_a_number)]
Share = Annotated[From0, Le(1)]
KEY = "[key]"  # pydantic's mark for a mapping's key


class Checked:
    """A dataclass whose fields are checked against their annotations when it is created."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        # 8.0 becomes 8. A frozen dataclass has no other way to replace a value.
        vars(self).update(vars(checked(_model(kind), vars(self))))


@functools.cache
def _model(kind: type) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    required: Any = {name: (hint, ...) for name, hint in hints.items()}
    return create_model(kind.__name__, **required)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def checked(kind: Any, value: object, path: str = "") -> Any:
    """The value, converted to its annotation: 8 for 8.0.

    Raises:
        UserError: The value does not fit. `path` is the user's name for it.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            must = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            near = ""
            if item["type"] == "literal_error":
                near = closest(str(item["input"]), item["ctx"]["expected"].split("'")[1::2])
            where = ".".join(str(part) for part in (path, *item["loc"]) if part not in ("", KEY))
            what = f"must be {must}, not {item['input']!r:.60}"
            problems.append(Problem(where, what, f"did you mean {near}?" if near else ""))
        raise UserError(*problems) from None
