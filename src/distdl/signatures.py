"""What a class or function takes, and whether given arguments fit (used by `distdl.binding`).

False refusals are worse than misses here, since the worker's own error comes later anyway: where a
signature cannot be known, everything is accepted.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from annotated_types import Ge, Gt

from distdl import kinds
from distdl.suggest import closest, respelt, written

# Classes that keep their **kwargs for another class than their base.
VAR_KEYWORD_GOES_TO = {
    "lightning.pytorch.strategies.ddp.DDPStrategy": "torch.nn.parallel.DistributedDataParallel",
    "lightning.pytorch.strategies.fsdp.FSDPStrategy": (
        "torch.distributed.fsdp.FullyShardedDataParallel"
    ),
}
UNIONS = (Union, types.UnionType)
DTYPE, TENSOR = "a dtype of torch", "<class 'torch.Tensor'>"
# Arguments that such a class passes itself.
_OWN = {"module", "device_ids", "process_group"}


@dataclass
class Takes:
    """The arguments of a callable, without `self`."""

    parameters: dict[str, inspect.Parameter] = field(default_factory=dict)
    any_positional: bool = False
    any_keyword: bool = False
    hints: dict[str, Any] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [n for n, p in self.parameters.items() if p.kind is not p.POSITIONAL_ONLY]


def takes(called: Callable[..., Any]) -> Takes | None:
    """Reads a signature; None where Python cannot tell (some builtins)."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return None
    result = Takes()
    _add(result, signature, _hints(called))
    if result.any_keyword and inspect.isclass(called):
        result.any_keyword = _follow(called, result)
    return result


def _add(result: Takes, signature: inspect.Signature, hints: dict[str, Any]) -> None:
    result.any_keyword = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            result.any_positional = True
        elif parameter.kind is parameter.VAR_KEYWORD:
            result.any_keyword = True
        elif name != "self":
            result.parameters.setdefault(name, parameter)
            result.hints.setdefault(name, hints.get(name, parameter.annotation))


def _hints(called: Any) -> dict[str, Any]:
    function = called.__init__ if inspect.isclass(called) else called
    try:
        return typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    except Exception:  # a name that only a type checker can see
        return {}


def _follow(cls: type, result: Takes) -> bool:
    """Follows **kwargs from a class to its bases; True when they end anywhere else."""
    for base in cls.__mro__:
        init = vars(base).get("__init__")
        if init is None:
            continue
        if base is object:
            return False
        keyword = _keyword_of(init)
        if base is not cls:
            inherited = Takes()
            _add(inherited, inspect.signature(init), _hints(base))
            for name, parameter in inherited.parameters.items():
                # A base's required argument may be passed by the subclass itself.
                optional = parameter.replace(kind=parameter.KEYWORD_ONLY, default=None)
                result.parameters.setdefault(name, optional)
                result.hints.setdefault(name, inherited.hints[name])
        if keyword is None:
            return False
        elsewhere = VAR_KEYWORD_GOES_TO.get(f"{base.__module__}.{base.__qualname__}")
        if elsewhere:
            module, _, name = elsewhere.rpartition(".")
            further = takes(getattr(importlib.import_module(module), name))
            for name, parameter in (further.parameters if further else {}).items():
                if name not in _OWN:
                    result.parameters.setdefault(name, parameter.replace(default=None))
                    # torch's wrappers have no annotations; a switch is known by its default.
                    if isinstance(parameter.default, bool):
                        result.hints.setdefault(name, bool)
            return further is None or further.any_keyword
        if not _passes_on(init, keyword):
            return True
    return True


def _keyword_of(function: Any) -> str | None:
    parameters = inspect.signature(function).parameters.values()
    return next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)


def _passes_on(init: Any, keyword: str) -> bool:
    """Whether an `__init__` hands its **kwargs untouched to `super().__init__`, nowhere else."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(init))))
    except (OSError, TypeError, SyntaxError):
        return False
    passed = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for argument in node.keywords:
                value = argument.value
                if argument.arg is None and isinstance(value, ast.Name) and value.id == keyword:
                    is_super = ast.unparse(node.func) == "super().__init__"
                    if not is_super:
                        return False
                    passed = True
    uses = sum(isinstance(n, ast.Name) and n.id == keyword for n in ast.walk(tree))
    return passed and uses == 1


def bind(
    called: Takes,
    given: Mapping[str, Any],
    *,
    positional: int = 0,
    partial: bool = False,
    offered: Sequence[str] = (),
) -> Iterator[tuple[str, str, str]]:
    """Checks that arguments bind.

    Args:
        called: What the target takes.
        given: Keyword arguments.
        positional: How many arguments are passed by position.
        partial: Whether missing arguments come later (`_partial_: true`).
        offered: Names that the builder passes if they are taken.

    Yields:
        Name of the argument ("" for the node itself), what is wrong, the remedy. `{}` stands for
        the value in what is wrong, and for the path of the node in the remedy.
    """
    by_position = [
        name
        for name, p in called.parameters.items()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    filled = by_position[:positional]
    if positional > len(by_position) and not called.any_positional:
        yield "", f"takes {len(by_position)} positional arguments, {positional} are given", ""
    names = called.names()
    for name, value in given.items():
        if name in filled:
            yield name, "is passed by distdl or by position already", "remove it"
        elif name not in names and not called.any_keyword:
            free = [n for n in names if n not in filled]
            near = closest(name, free)
            listed = f"it takes {', '.join(free)}" if 0 < len(free) <= 24 else ""
            yield name, "unknown argument", f"did you mean {{}}{near}?" if near else listed
        elif name in called.hints and not _fits(value, called, name):
            expected, other = _name_of(called.hints[name]), respelt(value)
            meant = repr(other) != repr(value) and _fits(other, called, name)
            typed = written(f"{{}}{name}", other)
            remedy = f"write {typed}" if meant else near_dtype(value, expected)
            yield name, f"must be {expected}, not {{}}", remedy
    if partial:
        return
    for name, parameter in called.parameters.items():
        if parameter.default is parameter.empty and name not in (*filled, *given, *offered):
            yield name, "missing argument", ""


def _fits(value: Any, called: Takes, name: str) -> bool:
    default = called.parameters[name].default
    return value == default or matches(value, called.hints[name])


def matches(value: Any, hint: Any) -> bool:
    """Whether a plain value fits an annotation; anything but simple types is accepted.

    Simple are bool, int, float (an int fits), str, None, Literal and unions of those, and
    Annotated[int, Ge(1)].
    """
    if isinstance(value, dict) and "_target_" in value:
        return True
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return matches(value, hint.__origin__) and all(_within(value, b) for b in hint.__metadata__)
    if origin in UNIONS:
        return any(matches(value, member) for member in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    if hint == _dtype():
        return dtype_named(value) is not None
    return not (isinstance(value, str) and f"{hint}" == TENSOR)


def _dtype() -> Any:
    torch: Any = sys.modules.get("torch")  # who names its types has imported it
    return torch and torch.dtype


def dtype_named(value: Any) -> str | None:
    """`torch.float32` for that and for `float32`; None for what names no dtype."""
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    found = getattr(sys.modules.get("torch"), name, None)
    return f"torch.{name}" if found is not None and isinstance(found, _dtype()) else None


def near_dtype(value: Any, expected: str) -> str:
    """What a name may have meant that is no dtype's, where one is expected."""
    if DTYPE not in expected:
        return ""
    torch: Any = sys.modules["torch"]
    names = [name for name in vars(torch) if isinstance(getattr(torch, name), torch.dtype)]
    short = re.sub(r"^(torch\.|fp(?=\d)|f(?=\d))", "", str(value))
    near = closest(short, names) or (f"float{short}" if f"float{short}" in names else "")
    return f"did you mean torch.{near}?" if near else "such as torch.float32"


def _takes_dtype(called: Takes, name: str) -> bool:
    """Whether an argument is a dtype: by its annotation, or by its default where it has none."""
    hint, default = called.hints.get(name), called.parameters[name].default
    members = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    if hint is inspect.Parameter.empty:  # as of torch's own layers
        return isinstance(default, _dtype()) or (name.endswith("dtype") and default is None)
    if isinstance(hint, str):  # a name beside it is one that only a type checker sees
        return "torch.dtype" in hint and "str" not in hint
    return _dtype() in members and str not in members


def with_dtypes(node: Any) -> Any:
    """A plain node in which what names a dtype is one, where one is asked for."""
    if isinstance(node, list):
        return [with_dtypes(item) for item in node]
    if not isinstance(node, dict):
        return node
    new = {key: with_dtypes(value) for key, value in node.items()}
    texts = [key for key, value in node.items() if dtype_named(value)]
    if texts and "_target_" in node and node.get("_recursive_") is not False:
        called = takes(kinds.locate(node["_target_"])) or Takes()
        for key in texts:
            if key in called.parameters and _takes_dtype(called, key):
                new[key] = {"_target_": "hydra.utils.get_object", "path": dtype_named(node[key])}
    return new


def _within(value: Any, bound: Any) -> bool:
    if not isinstance(value, (int, float)) or not isinstance(bound, (Ge, Gt)):
        return True
    least: Any = bound.ge if isinstance(bound, Ge) else bound.gt
    return bool(value >= least if isinstance(bound, Ge) else value > least)


def _name_of(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Annotated:
        bounds = [
            f" of at least {b.ge}" if isinstance(b, Ge) else f" above {b.gt}"
            for b in hint.__metadata__
            if isinstance(b, (Ge, Gt))
        ]
        return _name_of(hint.__origin__) + "".join(bounds)
    if hint == _dtype():
        return DTYPE
    if f"{hint}" == TENSOR:
        return "a tensor"
    words = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
    if typing.get_origin(hint) in UNIONS:
        return " or ".join(_name_of(member) for member in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    return "null" if hint in (None, type(None)) else words.get(hint, str(hint))
