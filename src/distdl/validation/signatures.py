"""What a class or function takes, and whether a node's arguments fit (see `validation.binder`).

If a signature is unknown, every argument is accepted: a false refusal is worse than an overlooked
mistake, which the worker reports later anyway.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import Parameter
from typing import Any, Literal, Union

from annotated_types import Ge, Gt

from distdl.util.errors import Problem
from distdl.util.suggest import closest, meanings, written
from distdl.validation import kinds

# Lightning's strategies that pass their **kwargs to a class that is not their base.
VAR_KEYWORD_GOES_TO = {
    "ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
    "fsdp.FSDPStrategy": "torch.distributed.fsdp.FullyShardedDataParallel",
}
_STRATEGIES = "lightning.pytorch.strategies."
# Arguments that such a strategy sets itself.
_SET_ITSELF = ("module", "device_ids", "process_group")
UNIONS = (Union, types.UnionType)
DTYPE, TENSOR = "a dtype of torch", "<class 'torch.Tensor'>"
_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "an integer"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}

LISTS = (list, tuple, set, Sequence)

# The arguments of a callable by name, without `self`; `*args` and `**kwargs` are included.
Parameters = dict[str, Parameter]


def takes(called: object) -> Parameters | None:
    """Reads a signature; None if Python has none (some builtins)."""
    if not callable(called):
        return None
    try:
        parameters = _parameters(called)
    except (TypeError, ValueError):
        return None
    return _followed(called, parameters) if inspect.isclass(called) else parameters


def takes_anything(parameters: Parameters, kind: object = Parameter.VAR_KEYWORD) -> bool:
    """Whether any further arguments are taken, by keyword or by position."""
    return any(parameter.kind is kind for parameter in parameters.values())


def _parameters(called: Callable[..., Any]) -> Parameters:
    signature = inspect.signature(called)
    with suppress(Exception):  # an annotation may be a name that only a type checker knows
        signature = inspect.signature(called, eval_str=True)
    return {name: each for name, each in signature.parameters.items() if name != "self"}


def _followed(cls: type, parameters: Parameters) -> Parameters:
    """Replaces **kwargs by the arguments of the base classes that receive it. **kwargs stays if it
    is passed anywhere else."""
    if not takes_anything(parameters):
        return parameters
    names = {n: p for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD}
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if init is None:
            continue
        if base is object:
            return names
        inherited = _parameters(init)
        for name, parameter in inherited.items() if base is not cls else ():
            if parameter.kind is parameter.VAR_POSITIONAL:
                names.setdefault(name, parameter)
            elif parameter.kind is not parameter.VAR_KEYWORD:
                # A base's required argument may be passed by the subclass itself.
                optional = parameter.replace(kind=parameter.KEYWORD_ONLY, default=None)
                names.setdefault(name, optional)
        keyword = next((n for n, p in inherited.items() if p.kind is p.VAR_KEYWORD), None)
        if keyword is None:
            return names
        full_name = f"{base.__module__}.{base.__qualname__}"
        if wrapper := VAR_KEYWORD_GOES_TO.get(
            full_name.removeprefix("lightning.pytorch.strategies.")
        ):
            further = takes(kinds.locate(wrapper)) or parameters
            for name, parameter in further.items():
                # torch's wrappers have no annotations; a bool is known by its default.
                hint = bool if isinstance(parameter.default, bool) else parameter.empty
                if name not in _SET_ITSELF and parameter.kind is not parameter.VAR_KEYWORD:
                    names.setdefault(name, parameter.replace(default=None, annotation=hint))
            return {**parameters, **names} if takes_anything(further) else names
        if not _passes_on(init, keyword):
            break
    return {**parameters, **names}


def _passes_on(init: Callable[..., Any], keyword: str) -> bool:
    """Whether an `__init__` passes its **kwargs unchanged to `super().__init__` only."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(init))))
    except (OSError, TypeError, SyntaxError):
        return False
    nodes = [*ast.walk(tree)]
    receivers = [
        ast.unparse(call.func)
        for call in nodes
        if isinstance(call, ast.Call)
        for each in call.keywords
        if each.arg is None and isinstance(each.value, ast.Name) and each.value.id == keyword
    ]
    uses = sum(isinstance(node, ast.Name) and node.id == keyword for node in nodes)
    return receivers == ["super().__init__"] and uses == 1


def bind(
    called: Parameters,
    arguments: Mapping[str, Any],
    *,
    positional: int = 0,
    partial: bool = False,
    offered: Sequence[str] = (),
) -> Iterator[Problem]:
    """Checks that arguments bind, of which `positional` are passed by position.

    Arguments may be missing if they come later (`partial`), or if the builder passes them to
    targets that take them (`offered`).

    Yields:
        A problem whose path is the name of the argument ("" for the node itself). `{}` stands for
        the value in what is wrong, and for the path of the node in the remedy.
    """
    by_position = [
        name for name, p in called.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    filled = by_position[:positional]
    if positional > len(by_position) and not takes_anything(called, Parameter.VAR_POSITIONAL):
        yield Problem(
            "",
            what=f"takes {len(by_position)} positional arguments, {positional} are passed",
            code="wrong-type",
        )
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    names = [name for name, parameter in called.items() if parameter.kind in by_name]
    for name, value in arguments.items():
        if name in filled:
            yield Problem(
                name,
                what="is passed by distdl or by position already",
                remedy="remove it",
                code="conflict",
            )
        elif name in names and not _fits(value, called[name]):
            expected = _name_of(called[name].annotation)
            fitting = [each for each in meanings(value) if _fits(each, called[name])]
            remedy = near_dtype(value, expected)
            if fitting:
                remedy = f"write {written(f'{{}}{name}', fitting[0])}"
            yield Problem(
                name, what=f"must be {expected}, not {{}}", remedy=remedy, code="wrong-type"
            )
        elif name not in names and not takes_anything(called):
            free = [n for n in names if n not in filled]
            near = closest(name, free)
            listed = f"it takes {', '.join(free)}" if 0 < len(free) <= 24 else ""
            yield Problem(
                name,
                what="unknown argument",
                remedy=f"did you mean {{}}{near}?" if near else listed,
                code="unknown-key",
            )
    for name, p in called.items() if not partial else ():
        needed = p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        if needed and name not in (*filled, *arguments, *offered):
            yield Problem(name, what="missing argument", code="missing-key")


def _fits(value: object, parameter: Parameter) -> bool:
    return bool(value == parameter.default) or matches(value, parameter.annotation)


def matches(value: object, hint: object) -> bool:
    """Whether a plain value fits an annotation. Only simple types are checked: bool, int, float (an
    int fits), str, None, Literal, Annotated[int, Ge(1)], and unions of those. A dtype must be one
    that torch has, a string is not a tensor, and neither a string nor a number is a list, though
    Python takes a string for a sequence of its letters."""
    if isinstance(value, dict) and "_target_" in value:
        return True
    origin = typing.get_origin(hint)
    members = typing.get_args(hint)
    if origin is typing.Annotated:
        return matches(value, members[0]) and all(_within(value, b) for b in members[1:])
    if origin in UNIONS:
        return any(matches(value, member) for member in members)
    if origin is Literal:
        return value in members
    if hint in (None, type(None)):
        return value is None
    if isinstance(hint, type) and hint in _PLAIN:
        return isinstance(value, _PLAIN[hint][0]) and (hint is bool or not isinstance(value, bool))
    if hint == _dtype():
        return dtype_named(value) is not None
    if (origin or hint) in LISTS:
        return not isinstance(value, (str, int, float))
    return not (isinstance(value, str) and f"{hint}" == TENSOR)


class _NoDtype:
    """Of which nothing is an instance."""


def _dtype() -> type:
    # A signature that uses torch's types has imported torch.
    return getattr(sys.modules.get("torch"), "dtype", _NoDtype)


def dtype_named(value: object) -> str | None:
    """`torch.float32` for `torch.float32` and `float32`; None if it is not the name of a dtype."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    member = getattr(sys.modules.get("torch"), name, None)
    return f"torch.{name}" if member is not None and isinstance(member, _dtype()) else None


def near_dtype(value: object, expected: str) -> str:
    """A suggestion for a value that is not a dtype, if a dtype is expected."""
    if DTYPE not in expected:
        return ""
    torch: Any = sys.modules["torch"]
    names = [name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)]
    short = re.sub(r"^(torch\.|fp(?=\d)|f(?=\d))", "", str(value))
    near = closest(short, names) or (f"float{short}" if f"float{short}" in names else "")
    return f"did you mean torch.{near}?" if near else "such as torch.float32"


def _takes_dtype(parameter: Parameter) -> bool:
    """Whether an argument is a dtype, by its annotation, or by its default if it has none."""
    hint = parameter.annotation
    default = parameter.default
    name = parameter.name
    members = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    if hint is Parameter.empty:  # as in torch's own layers
        return isinstance(default, _dtype()) or (name.endswith("dtype") and default is None)
    if isinstance(hint, str):  # it holds a name that only a type checker knows
        return "torch.dtype" in hint and "str" not in hint
    return _dtype() in members and str not in members


def with_dtypes(node: object) -> object:
    """A plain node in which names of dtypes are replaced by nodes that give the dtype, for the
    arguments that take one."""
    if isinstance(node, list):
        return [with_dtypes(item) for item in node]
    if not isinstance(node, dict):
        return node
    new = {key: with_dtypes(value) for key, value in node.items()}
    texts = [key for key, value in node.items() if dtype_named(value)]
    if texts and "_target_" in node and node.get("_recursive_") is not False:
        called = takes(kinds.locate(node["_target_"])) or {}
        for key in (key for key in texts if key in called and _takes_dtype(called[key])):
            new[key] = {"_target_": "hydra.utils.get_object", "path": dtype_named(node[key])}
    return new


def _within(value: object, bound: object) -> bool:
    if not isinstance(value, (int, float)) or not isinstance(bound, (Ge, Gt)):
        return True
    return bool(value >= bound.ge if isinstance(bound, Ge) else value > bound.gt)  # type: ignore


def _name_of(hint: object) -> str:
    origin = typing.get_origin(hint)
    members = typing.get_args(hint)
    if origin is typing.Annotated:
        least = [f" of at least {b.ge}" for b in members[1:] if isinstance(b, Ge)]
        least += [f" above {b.gt}" for b in members[1:] if isinstance(b, Gt)]
        return _name_of(members[0]) + "".join(least)
    if origin in UNIONS or origin is Literal:
        return " or ".join(map(_name_of if origin in UNIONS else repr, members))
    if hint == _dtype() or f"{hint}" == TENSOR:
        return DTYPE if hint == _dtype() else "a tensor"
    if hint in (None, type(None)):
        return "null"
    if (origin or hint) in LISTS:
        return "a list"
    return _PLAIN[hint][1] if isinstance(hint, type) and hint in _PLAIN else str(hint)
