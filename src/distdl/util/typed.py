"""pydantic's errors as problems: the one place that reads them, for the config, the settings of
launchers and of the server, and the fields of dataclasses."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, get_type_hints

from annotated_types import Ge, Gt, Le
from pydantic import (
    BaseModel,
    BeforeValidator,
    FiniteFloat,
    TypeAdapter,
    ValidationError,
    create_model,
)

from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean_word

Path = tuple[str | int, ...]

KEY = "[key]"  # pydantic's mark for a mapping's key
# What belongs there, by pydantic's name of the mistake or by its words.
BY_KIND = {
    "model_type": "a mapping",
    "dict_type": "a mapping",
    "string_too_long": "of at most {max_length} characters",
}
BY_WORDS = {
    "a integer": "an integer",
    "a boolean": "true or false",
    "a dictionary": "a mapping",
}


# pydantic's names of mistakes -> `refusal_codes.CODES`; "..._type" and others: wrong-type.
CODE_OF_KIND = {
    "missing": "missing-key",
    "extra_forbidden": "unknown-key",
    "literal_error": "wrong-choice",
}


@dataclass(frozen=True)
class Misfit:
    """A value that pydantic refuses.

    Args:
        path: Where it is, by the keys that the user wrote.
        below: The rest of pydantic's own path: the branch of a union, or a field that is missing.
        kind: pydantic's name of the mistake: "missing", "extra_forbidden", "literal_error", ...
        expected: What belongs there, in words that follow "must be": "an integer".
        value: What is there instead.
        choices: The texts of which it must be one; empty if there are none.
        reason: The error that a validator of ours has raised; None if pydantic itself refuses.
    """

    path: Path
    below: Path
    kind: str
    expected: str
    value: Any
    choices: Sequence[str]
    reason: ValueError | None

    @property
    def code(self) -> str:
        """Of `refusal_codes.CODES`; that of `reason` if a validator of ours has raised it."""
        if self.reason is not None:
            # A validator of the whole, which has no path, compares several values.
            return getattr(self.reason, "code", "wrong-type" if self.path else "conflict")
        if self.kind.startswith(("greater_", "less_")) or self.kind.endswith(("_long", "_short")):
            return "out-of-range"
        return CODE_OF_KIND.get(self.kind, "wrong-type")


def misfits(error: ValidationError, values: object, *, into_lists: bool = True) -> Iterator[Misfit]:
    """What pydantic refuses of `values`. Without `into_lists`, the path of a list's item is that of
    the list."""
    for each in error.errors(include_url=False):
        context = each.get("ctx", {})
        location: Path = each["loc"]
        depth = _depth(values, location, into_lists)
        literal = each["type"] == "literal_error"
        yield Misfit(
            path=location[:depth],
            below=location[depth:],
            kind=each["type"],
            expected=_expected(each["type"], each["msg"], context),
            value=each["input"],
            choices=context["expected"].split("'")[1::2] if literal else (),
            reason=context.get("error"),
        )


def _depth(values: object, location: Path, into_lists: bool) -> int:
    """How many parts of pydantic's path are keys of `values`: branches of unions follow them."""
    found: Any = values
    for depth, part in enumerate(location):
        key = isinstance(found, Mapping) and part in found
        index = into_lists and isinstance(found, list) and isinstance(part, int)
        if not (key or index):
            return depth
        found = found[part]
    return len(location)


def _expected(kind: str, message: str, context: Mapping[str, Any]) -> str:
    """`an integer` for `Input should be a valid integer`."""
    if kind in BY_KIND:
        return BY_KIND[kind].format(**context)
    text = message.removeprefix("Value error, ").removeprefix("Input should be ")
    text = text.split(", unable")[0].replace("a valid ", "a ")
    return BY_WORDS.get(text, text)


def either(misfits: Iterable[Misfit]) -> str:
    """What belongs in one place, as a sentence: each branch of a union has a misfit."""
    return " or ".join(dict.fromkeys(each.expected for each in misfits))


def by_path(misfits: Iterable[Misfit]) -> dict[Path, list[Misfit]]:
    """The misfits of each place: those of a union's branches are together."""
    found: dict[Path, list[Misfit]] = {}
    for each in misfits:
        found.setdefault(each.path, []).append(each)
    return found


def problems(
    error: ValidationError, values: Mapping[str, Any], known: Iterable[str], section: str = ""
) -> Iterator[Problem]:
    """A problem for each setting that pydantic refuses, with its key in `values` as the path.
    `known` are the keys to suggest; `section` is where they are set: `launcher.`."""
    found: dict[str, list[Misfit]] = {}
    for misfit in misfits(error, values, into_lists=False):
        path = ".".join(map(str, misfit.path or misfit.below[:1]))
        found.setdefault(path, []).append(misfit)
    for path, same in found.items():
        first = same[0]
        ours = next((each for each in same if each.reason is not None), None)
        if ours is not None:
            remedy = getattr(ours.reason, "remedy", "")
            yield Problem(path, what=str(ours.reason), remedy=remedy, code=ours.code)
        elif first.kind == "missing":
            yield Problem(path, what="missing", remedy=f"write {path}=...", code=first.code)
        elif first.kind == "extra_forbidden":
            remedy = did_you_mean_word(path, known)
            yield Problem(path, what="no such setting", remedy=remedy, code=first.code)
        else:
            remedy = did_you_mean_word(first.value, first.choices)
            if first.kind == "list_type":
                remedy = _as_list(f"{section}{path}", first.value)
            yield Problem(
                path, what=f"{first.value!r} is not {either(same)}", remedy=remedy, code=first.code
            )


def _as_list(key: str, value: object) -> str:
    """The override that sets a list of one value, quoted for a shell if need be."""
    plain = re.fullmatch(r"[\w./:-]+", str(value))
    return f"{key}=[{value}]" if plain else f"'{key}=[\"{value}\"]'"


def _a_number(value: object) -> object:
    # pydantic accepts "8" and True as numbers.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError("a number")
    return value


# Numbers of `Checked` dataclasses: 8.0 and numpy's integers count as whole numbers, too.
FromOne = Annotated[int, Ge(1), BeforeValidator(_a_number)]
Above0 = Annotated[FiniteFloat, Gt(0), BeforeValidator(_a_number)]
From0 = Annotated[FiniteFloat, Ge(0), BeforeValidator(_a_number)]
Share = Annotated[From0, Le(1)]


class Checked:
    """A dataclass whose fields are checked against their annotations when it is created."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        # 8.0 becomes 8. A frozen dataclass has no other way to replace a value.
        vars(self).update(vars(checked(_model(kind), vars(self))))


@functools.cache
def _model(kind: type) -> type[BaseModel]:
    hints = get_type_hints(kind, include_extras=True)
    required: dict[str, Any] = {name: (hint, ...) for name, hint in hints.items()}
    return create_model(kind.__name__, **required)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - a type, a union, an Annotated
    return TypeAdapter(kind)


def checked(kind: object, value: object, path: str = "") -> Any:  # noqa: ANN401 - of that kind
    """The value, converted to its annotation: 8 for 8.0.

    Raises:
        UserError: The value does not fit. `path` is the user's name for it.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        wrong = []
        for misfit in misfits(error, value):
            parts = [path, *misfit.path, *misfit.below]
            where = ".".join(str(part) for part in parts if part not in ("", KEY))
            wrong.append(
                Problem(
                    where,
                    what=f"must be {misfit.expected}, not {misfit.value!r:.60}",
                    remedy=did_you_mean_word(misfit.value, misfit.choices),
                    code=misfit.code,
                )
            )
        raise UserError(*wrong) from None
