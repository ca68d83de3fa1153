"""`import pytorch_lightning` gives lightning.pytorch here, and `lightning_fabric` lightning.fabric:
Lightning is published as two packages, and each refuses subclasses of the other's classes."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import multiprocessing
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}

log = logging.getLogger(__name__)


def real_name(name: str) -> str:
    """`lightning.pytorch.callbacks` for `pytorch_lightning.callbacks`; "" for other packages."""
    package, dot, rest = name.partition(".")
    return f"{NAMES[package]}{dot}{rest}" if package in NAMES else ""


class Names(MetaPathFinder, Loader):
    """Finds modules under their other name, and imports each only when it is asked for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        real = real_name(fullname)
        # The parent package is imported already. A missing module is reported under `fullname`.
        if not real or ("." in fullname and importlib.util.find_spec(real) is None):
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(real_name(spec.name))
        spec.loader_state = module.__spec__  # the import system replaces it by this spec
        if spec.name in NAMES:
            version = getattr(module, "__version__", "")
            log.info("import %s: served by %s %s", spec.name, module.__name__, version)
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


class Spawned:
    """Calls `serve` in the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return serve, ()


def serve() -> None:
    """Makes the names work in this process and its loader workers."""
    # A spawned worker receives its parent's process settings before its data set, whose module may
    # import Lightning.
    multiprocessing.current_process()._config["distdl"] = Spawned()  # type: ignore[attr-defined]
    loaded = [*sys.modules]  # another thread may import meanwhile
    both = {name: real_name(name) for name in loaded}
    second = [
        name
        for name, real in both.items()
        if real and sys.modules.get(name) is not sys.modules.get(real)
    ]
    for name in second:
        sys.modules.pop(name, None)
    if second:
        text = "%s was imported before distdl: its subclasses do not count as Lightning's"
        log.warning(text, second[0])
    if not any(isinstance(finder, Names) for finder in sys.meta_path):
        sys.meta_path.insert(0, Names())
