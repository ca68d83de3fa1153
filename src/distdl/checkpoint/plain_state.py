"""State of callbacks, data and modules, in a form that `torch.load(weights_only=True)` reads.

torch reads tensors, numbers, strings and containers of them without running code from the file.
Some other types (path, array, deque, enum member) are stored as plain data, {TAG: kind, ...}, and
restored to their type. All other objects are stored as the bytes of their pickle, which is opened
only if the user trusts the file.
"""

from __future__ import annotations

import copy
import enum
import functools
import io
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl.util.errors import UserError

TAG = "__distdl__"
TRUST = (
    "if you or your own run wrote it: checkpoint.trust_pickle=true (convert: --trust-pickle), "
    "which runs any code in the file"
)
LEAVES = (bool, int, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device)
MAPPINGS = (dict, OrderedDict, Counter)
FACTORIES = {kind.__name__: kind for kind in (list, dict, set, int, float, str)}


def restored(checkpoint: dict[str, Any], file: Path, *, trust: bool) -> dict[str, Any]:
    """Undoes `Packing`; opens pickles only with `trust`. Raises a UserError about `file` for a
    pickle that is not trusted, or a form that distdl does not write."""
    try:
        whole = _restored(checkpoint, trust, "")
        if not isinstance(whole, dict):
            raise TypeError("it is no mapping")
        return whole
    except _NotTrusted as error:
        raise UserError.at(str(file), what=str(error), remedy=TRUST, code="not-trusted") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError.at(
            str(file),
            what=f"its state is not as distdl writes it ({type(error).__name__}: {error})",
            code="damaged-file",
        ) from error


class Packing:
    """Converts one checkpoint to plain forms. `pickled` names each object that is stored as a
    pickle: "callbacks.Mine.seen (a mine.Seen)"."""

    def __init__(self) -> None:
        self.pickled: list[str] = []
        self._open: set[int] = set()  # containers being packed, to detect cycles

    def pack(self, value: object, path: str) -> object:
        """A value in a form that loads with weights_only. Tensors, and containers that need no
        change, are not copied. Raises a UserError for an object that cannot be pickled either."""
        if is_leaf(value):
            return value
        kind = type(value)
        if isinstance(value, list | tuple | dict) and kind in (list, tuple, *MAPPINGS):
            if id(value) in self._open:
                return value
            self._open.add(id(value))
            try:
                return self._container(value, path)
            finally:
                self._open.discard(id(value))
        if (form := self._form(value, path)) is not None:
            return form
        if loads(value):  # such as a class that the user has registered with torch
            return value
        self.pickled.append(f"{path} (a {name_of(kind)})")
        try:
            buffer = io.BytesIO()
            torch.save(value, buffer)
        except Exception as error:  # the user's __reduce__ runs
            raise UserError.at(
                path,
                what=f"holds a {name_of(kind)}, which cannot be saved ({error})",
                code="unsupported",
            ) from error
        return {TAG: "pickle", "of": name_of(kind), "data": octets(buffer.getvalue())}

    def _container(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any], path: str) -> object:
        if isinstance(value, dict):
            if TAG in value or not all(is_key(key) for key in value):
                items = [[self.pack(k, path), self.pack(v, path)] for k, v in value.items()]
                return {TAG: "dict", "items": items}
            new = {key: self.pack(each, f"{path}.{key}") for key, each in value.items()}
            if all(new[key] is value[key] for key in value):
                return value
            changed = copy.copy(value)  # keeps the class and its attributes
            dict.update(changed, new)
            return changed
        each = [self.pack(one, f"{path}[{i}]") for i, one in enumerate(value)]
        same = all(a is b for a, b in zip(each, value, strict=True))
        return value if same else type(value)(each)

    def _form(self, value: object, path: str) -> dict[str, Any] | None:
        """The plain form of a value that can be rebuilt without code from the file, or None."""
        kind = type(value)
        if isinstance(value, PurePath):
            return {TAG: "path", "text": str(value)}
        if type(value) is int:
            return {TAG: "int", "text": hex(value)}
        if type(value) is bytes:
            return {TAG: "bytes", "data": octets(value)}
        if isinstance(value, np.generic | np.ndarray) and kind is not np.ma.MaskedArray:
            array = np.ascontiguousarray(value)
            if array.dtype.hasobject or array.dtype.names:
                return None
            data = octets(array.tobytes())
            shape = None if isinstance(value, np.generic) else list(value.shape)
            return {TAG: "array", "dtype": array.dtype.str, "shape": shape, "data": data}
        if isinstance(value, enum.Enum) and value.name in type(value).__members__:
            return {TAG: "enum", "of": [kind.__module__, kind.__qualname__], "name": value.name}
        if kind is Namespace:
            return {TAG: "namespace", "value": self.pack(vars(value), path)}
        if isinstance(value, set | frozenset) and kind in (set, frozenset):
            return {TAG: kind.__name__, "items": self.pack(list(value), path)}
        if type(value) is deque:
            return {TAG: "deque", "items": self.pack(list(value), path), "maxlen": value.maxlen}
        if type(value) is defaultdict:
            factory = getattr(value.default_factory, "__name__", None)
            if value.default_factory in (None, *FACTORIES.values()):
                return {TAG: "default", "of": factory, "value": self.pack(dict(value), path)}
        return None


def is_leaf(value: object) -> bool:
    """Whether torch reads a value as it is, and the value is not a container."""
    if value is None or type(value) in LEAVES:
        return not (type(value) is int and value.bit_length() > 2000)  # torch's limit: 255 bytes
    if type(value) is bytes:
        return bool(value)  # torch cannot read empty bytes
    if type(value) in (torch.Tensor, nn.Parameter):
        return not vars(value)
    # A DTensor slice: written to the sharded folder, never to a file.
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")


def is_key(value: object) -> bool:
    return all(map(is_key, value)) if type(value) is tuple else is_leaf(value)


def loads(value: object) -> bool:
    """Whether torch can save a value and load it with weights_only."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception:  # pickling can raise anything
        return False
    return True


def octets(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def name_of(value: object) -> str:
    """The name of a class or function as in `_target_`; for other objects, that of their class."""
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


# ----------------------------------------------------------------------------------- restoring


class _NotTrusted(Exception):
    pass


def _restored(value: object, trust: bool, path: str) -> object:
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        each = [_restored(one, trust, f"{path}[{i}]") for i, one in enumerate(value)]
        same = all(a is b for a, b in zip(each, value, strict=True))
        return value if same else type(value)(each)
    if not isinstance(value, dict) or type(value) not in MAPPINGS:
        return value
    if type(value.get(TAG)) is str:
        return _made(value, trust, path)
    for key, one in list(value.items()):
        new = _restored(one, trust, f"{path}.{key}" if path else str(key))
        if new is not one:
            value[key] = new
    return value


def _made(form: Mapping[str, Any], trust: bool, path: str) -> object:
    kind = form[TAG]
    inside: Callable[[object], Any] = functools.partial(_restored, trust=trust, path=path)
    if kind == "pickle":
        if not trust:
            what = f"its {path} is a pickled {form['of']}, which may run code while it is read"
            raise _NotTrusted(what)
        return torch.load(io.BytesIO(raw(form)), map_location="cpu", weights_only=False)
    if kind == "array":
        dtype = np.dtype(str(form["dtype"]))
        if dtype.hasobject:
            raise ValueError("an array of objects")
        array = np.frombuffer(raw(form), dtype=dtype).copy()
        return array[0] if form["shape"] is None else array.reshape(form["shape"])
    makes: dict[str, Callable[[], Any]] = {
        "enum": lambda: member(form["of"], form["name"]),
        "path": lambda: Path(form["text"]),
        "bytes": lambda: raw(form),
        "int": lambda: int(form["text"], 16),
        "namespace": lambda: Namespace(**inside(form["value"])),
        "set": lambda: set(inside(form["items"])),
        "frozenset": lambda: frozenset(inside(form["items"])),
        "deque": lambda: deque(inside(form["items"]), form["maxlen"]),
        "default": lambda: defaultdict(FACTORIES.get(form["of"]), inside(form["value"])),
        "dict": lambda: {inside(k): inside(v) for k, v in form["items"]},
    }
    return makes[kind]()


def raw(form: Mapping[str, Any]) -> bytes:
    return bytes(form["data"].numpy().tobytes())


def member(of: list[str], name: str) -> enum.Enum:
    """A member of an enum whose module is already imported; else raises a ValueError."""
    module, qualname = of
    named: Any = sys.modules.get(module)
    for part in qualname.split("."):  # by `vars`: a computed attribute would run code
        named = vars(named).get(part) if named is not None else None
    if not (isinstance(named, type) and issubclass(named, enum.Enum)):
        raise ValueError(f"{module}.{qualname} is not an enum that is imported")
    return named.__members__[name]
