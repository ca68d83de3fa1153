"""The random generators that a data set holds itself, found so that each sample can seed them.

Seeding the global generators does not reach a transform's own one (MONAI's `R`, albumentations'
`random_generator`, a `np.random.default_rng()` in an attribute or in a global variable).
"""

from __future__ import annotations

import collections
import functools
import inspect
import itertools
import os
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from distdl.data.entropy import drawn_from_entropy
from distdl.util.seeds import stable_seed

Generator: TypeAlias = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
SetState: TypeAlias = Callable[..., Any]  # an object's `set_random_state`
KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

# A longer container holds samples, not transforms.
LONGEST = 1000
MOST = 20_000  # objects that are looked at
DEEPEST = 60  # objects inside each other
DATA = (str, bytes, bool, int, float, complex, type(None), np.ndarray, np.generic, torch.Tensor)
# Their objects lead to the whole program, or hold nothing but data.
CLOSED = (
    "builtins",
    "numpy",
    "lightning",
    "pytorch_lightning",
    "logging",
    "threading",
    "multiprocessing",
    "concurrent",
    "asyncio",
    "pandas",
    "pyarrow",
    "h5py",
    "PIL",
    "fsspec",
    "http",
    "ssl",
    # Clients of far stores.
    "azure",
    "msal",
    "boto3",
    "botocore",
    "s3transfer",
    "requests",
    "urllib3",
    "google",
    # Settings, and engines around a model.
    "omegaconf",
    "hydra",
    "deepspeed",
    "torchmetrics",
)
CLOSED_PARTS = (
    "torch._",
    "torch.distributed.",
    "torch.fx.",
    "torch.utils.hooks.",
    # What of distdl's own parts holds such clients, or the Trainer.
    "distdl.stores.",
    "distdl.datasets.",
    "distdl.strategies.",
    "distdl.loops.",
    "distdl.worker.",
    "distdl.callbacks.",
    "distdl.tracking.",
    "distdl.tools.measure.",
    "distdl.health.",
)
OF_ANY_MODULE = frozenset(vars(torch.nn.Module()))  # torch's own attributes
WEIGHTS = ("_parameters", "_buffers")
# The global ones, which are seeded apart.
DEFAULT = (torch.default_generator, np.random.mtrand._rand, random._inst)
INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))


class OwnGenerators:
    """The generators that some objects hold: in attributes, containers, closures, classes, and in
    global variables of the user's modules that their methods name.

    They are looked for once per process and epoch, and again in the objects that were found before
    each batch: a worker's start, an epoch's or the first sample may make them.

    Args:
        roots: Name -> the data set, its `collate_fn`.
    """

    left_out: tuple[type, ...] = ()  # objects that are not searched

    def __init__(self, **roots: object) -> None:
        self._roots = roots
        self._found: dict[str, Generator | SetState] = {}
        self._owners: dict[str, Mapping[Any, Any]] = {}
        self._looked: tuple[int, int] | None = None  # process, epoch
        self.unknown: list[str] = []

    def __getstate__(self) -> dict[str, object]:
        return self._roots  # the process that unpickles this looks itself

    def __setstate__(self, roots: dict[str, object]) -> None:
        self.__init__(**roots)  # type: ignore[misc]

    @property
    def places(self) -> list[str]:
        """Where they are, as `dataset.transform.R`."""
        return [*self._found]

    def is_new(self, epoch: int) -> bool:
        """Whether this process has not looked in this epoch."""
        return self._looked != (os.getpid(), epoch)

    def look(self, epoch: int = 0) -> bool:
        """Looks for generators; whether there are others than before."""
        before = self._found.keys()
        search = _Search(self.left_out)
        for name, root in self._roots.items():
            search.visit(name, root)
        self._found = search.found
        self._owners = search.owners
        self.unknown = search.unknown
        self._looked = os.getpid(), epoch
        return self._found.keys() != before

    def refresh(self) -> None:
        """Takes what has replaced a generator in the same place."""
        for path, owner in self._owners.items():
            for name, value in list(owner.items()):
                if isinstance(value, KINDS) and value not in DEFAULT:
                    self._found[f"{path}.{name}"] = value

    def seed(self, *parts: object) -> None:
        """Seeds each by `parts` and its place, so that two of them do not draw the same."""
        for path, generator in self._found.items():
            reseed(generator, stable_seed(*parts, path))


class _Search:
    """One walk through the objects; each is visited once, in an order that every process has."""

    def __init__(self, left_out: tuple[type, ...] = ()) -> None:
        self._left_out: tuple[type, ...] = (*DATA, type, types.ModuleType, *left_out)
        self.found: dict[str, Generator | SetState] = {}
        self.owners: dict[str, Mapping[Any, Any]] = {}
        self.unknown: list[str] = []
        self._seen: dict[int, Any] = {}  # the object too, so that no other one gets its id
        self._depth = 0

    def visit(self, path: str, value: object) -> None:
        if self._depth >= DEEPEST:
            self._say(f"what lies in {path[:100]}... (more than {DEEPEST} objects in each other)")
            return
        self._depth += 1
        try:
            self._visit(path, value)
        finally:
            self._depth -= 1

    def _visit(self, path: str, value: object) -> None:
        if isinstance(value, self._left_out) or id(value) in self._seen:
            return
        if len(self._seen) >= MOST:
            self._say(f"what lies beyond the first {MOST} objects that are searched")
            return
        self._seen[id(value)] = value
        module = _module_of(type(value))
        if _is_closed(module) and module != "builtins" and not isinstance(value, KINDS):
            return
        match value:
            case random.SystemRandom():
                self._say(f"{path} (SystemRandom)")
            case _ if any(value is each for each in DEFAULT):
                return
            case torch.Generator() | np.random.Generator() | np.random.RandomState():
                self.found[path] = value
            case random.Random():
                self.found[path] = value
            case types.FunctionType():
                self._function(path, value)
            case types.MethodType():
                self.visit(path, value.__self__)
                self.visit(path, value.__func__)
            case types.BuiltinMethodType():
                self.visit(path, value.__self__)
            case functools.partial():
                self.visit(path, value.func)
                self._items(path, dict(enumerate(value.args)))
                self._items(path, value.keywords)
            case list() | tuple() | collections.deque() if len(value) <= LONGEST:
                self._items(path, dict(enumerate(value)))
            case Mapping() if len(value) <= LONGEST:
                self._items(path, value)
            case types.GeneratorType() | itertools.count() | itertools.cycle():
                self._say(f"{path} (an iterator goes on from where it is)")
        if not _is_closed(module):
            self._object(path, value)

    def _items(self, path: str, items: Mapping[Any, Any]) -> None:
        held = list(items.items())  # another thread may add to it
        if any(isinstance(value, KINDS) for _, value in held):
            self.owners[path] = items
        for name, value in held:
            self.visit(f"{path}.{name}", value)

    def _object(self, path: str, value: object) -> None:
        kind = type(value)
        before = len(self.found)
        if hasattr(value, "__dict__"):
            self.owners[path] = vars(value)
            of_torch = OF_ANY_MODULE if isinstance(value, torch.nn.Module) else ()
            for name, held in list(vars(value).items()):
                if name not in of_torch:
                    self.visit(f"{path}.{name}", held)
                elif name == "_modules":
                    self._items(path, held)
                elif name not in WEIGHTS and isinstance(held, dict):
                    # Of hooks, whose keys count all of this process.
                    self._items(f"{path}.{name}", dict(enumerate(held.values())))
        for base in kind.__mro__:
            self._class(path, base, value)
        # Not `hasattr(value)`, which a client that makes its methods itself would answer.
        if not hasattr(kind, "set_random_state") or len(self.found) > before:
            return
        setter: Any = getattr(value, "set_random_state", None)
        if "seed" in _parameters(setter):
            self.found[path] = setter
        else:
            self._say(f"{path} ({kind.__name__}.set_random_state takes no seed)")

    def _class(self, path: str, base: type, value: object) -> None:
        """The class's own attributes, as MONAI's `R`, and what its methods name."""
        users = _is_users(base.__module__)
        for name in vars(base).get("__slots__", ()) if users else ():
            self.visit(f"{path}.{name}", getattr(value, name, None))
        if id(base) not in self._seen:
            self._seen[id(base)] = base
            self._what_it_names(base, users)

    def _what_it_names(self, kind: type, users: bool) -> None:
        for name, held in list(vars(kind).items()):
            if isinstance(held, KINDS):
                self.visit(f"{kind.__qualname__}.{name}", held)
            elif users:
                for function in _functions(held):
                    self._function(f"{kind.__qualname__}.{name}", function)

    def _function(self, path: str, function: types.FunctionType) -> None:
        """What a function has in its closure and defaults, and in the globals that it names."""
        if _is_closed(str(function.__module__)):
            return
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if cell != types.CellType():  # of a variable that has no value yet
                self.visit(f"{path}.{name}", cell.cell_contents)
        self._items(path, function.__kwdefaults__ or {})
        self._items(path, dict(enumerate(function.__defaults__ or ())))
        code = function.__code__
        if not _is_users(function.__module__) or id(code) in self._seen:
            return
        self._seen[id(code)] = code
        for what in drawn_from_entropy(code):
            self._say(f"{function.__qualname__} ({what} without a seed)")
        names = set(_names(code))
        for name in sorted(names & function.__globals__.keys()):
            self._global(function.__module__, name, function.__globals__[name], names)

    def _global(self, module: str, name: str, value: object, names: set[str]) -> None:
        path = f"{module}.{name}"
        if isinstance(value, types.ModuleType):
            if _is_users(value.__name__):
                for each in sorted(names & vars(value).keys()):
                    self._global(value.__name__, each, vars(value)[each], set())
        elif not isinstance(value, type):
            self.visit(path, value)
        elif _is_users(value.__module__) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._what_it_names(value, users=True)

    def _say(self, text: str) -> None:
        if text not in self.unknown:
            self.unknown.append(text)


def reseed(generator: Generator | SetState, value: int) -> None:
    """Seeds a generator, or the object whose `set_random_state` this is."""
    match generator:
        case torch.Generator():
            generator.manual_seed(value)
        case np.random.Generator():
            bits = generator.bit_generator
            bits.state = type(bits)(value).state
        case np.random.RandomState():
            generator.seed(value & 0xFFFFFFFF)
        case random.Random():
            generator.seed(value)
        case _:
            generator(seed=value & 0xFFFFFFFF)


def _is_users(module: str | None) -> bool:
    """Whether a module is neither installed nor distdl's."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None or (module or "").partition(".")[0] == "distdl":
        return False
    return not file.startswith(INSTALLED) and "dist-packages" not in file


def _module_of(kind: type) -> str:
    """Where a class is from; for a layer to which FSDP2 has given another one, its own."""
    modules = (base.__module__ or "" for base in kind.__mro__)  # None: made at run time
    return next(name for name in modules if not name.startswith("torch.distributed."))


def _is_closed(module: str) -> bool:
    return module.partition(".")[0] in CLOSED or f"{module}.".startswith(CLOSED_PARTS)


def _functions(held: object) -> Iterator[types.FunctionType]:
    """The functions of a class's attribute."""
    parts = [held.fget] if isinstance(held, property) else [getattr(held, "__func__", held)]
    for part in parts:
        if isinstance(part, types.FunctionType):
            yield part


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # one of C says nothing
        return []
