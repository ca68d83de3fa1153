"""Where things are now whose names frozen runs, requests and users' own code carry.

A run of any age must find what its config names, and code that imports by an old name goes on
working. When a module moves, its old name gets a line here, and no file stays behind.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

# Old name -> new name, of a package with all that is in it, of a module, or of an object.
MOVED = {
    # Tasks: the `_target_` of a run.
    "distdl.tasks.benchmark": "distdl.tools.measure.task.Benchmark",
    "distdl.tasks.doctor": "distdl.tools.doctor.task.Doctor",
    # What users' own code imports.
    "distdl.build": "distdl.worker.build",
    "distdl.errors": "distdl.util.errors",
    "distdl.ranges": "distdl.util.ranges",
    "distdl.tailing": "distdl.util.tail",
    # Packages that are tools now.
    "distdl.benchmark": "distdl.tools.measure",
    "distdl.data_check": "distdl.tools.data_check",
    "distdl.doctor": "distdl.tools.doctor",
    "distdl.drill": "distdl.tools.drill",
    "distdl.planner": "distdl.tools.measure",
    "distdl.report": "distdl.tools.report",
    "distdl.scaling": "distdl.tools.scaling",
    "distdl.serving": "distdl.tools.serving",
    # Modules.
    "distdl.report.data": "distdl.tools.pages.data",
    "distdl.report.plots": "distdl.tools.pages.plots",
    "distdl.tools.report.data": "distdl.tools.pages.data",
    "distdl.tools.report.parts": "distdl.tools.pages.parts",
    "distdl.tools.report.plots": "distdl.tools.pages.plots",
    "distdl.callbacks.epoch_metrics": "distdl.loops.epoch_metrics",
    "distdl.data.worker_signals": "distdl.data.worker_end",
    "distdl.util.plurals": "distdl.util.wording",
    "distdl.datasets.folder": "distdl.tools.prepare.folder",
    "distdl.datasets.imagenet": "distdl.tools.prepare.imagenet",
    "distdl.datasets.images": "distdl.tools.prepare.images",
    "distdl.datasets.next_steps": "distdl.tools.prepare.next_steps",
    "distdl.datasets.parquet": "distdl.tools.prepare.parquet",
    "distdl.datasets.records": "distdl.tools.prepare.records",
    "distdl.datasets.shard_plan": "distdl.tools.prepare.shard_plan",
    "distdl.datasets.source": "distdl.tools.prepare.source",
    "distdl.datasets.tfrecord": "distdl.tools.prepare.tfrecord",
    "distdl.datasets.upload": "distdl.tools.prepare.upload",
    "distdl.datasets.work": "distdl.tools.prepare.work",
    "distdl.config.words": "distdl.config.hints.words",
    "distdl.validation.lightning_1": "distdl.config.hints.lightning_1",
    "distdl.cli.data_arguments": "distdl.cli.arguments",
    "distdl.tools.scaling.fields": "distdl.util.typed",
    "distdl.tools.serving.json_rules": "distdl.util.json_rules",
    "distdl.datasets.writers": "distdl.tools.prepare.writers",
    "distdl.data.augment": "distdl.images.augment",
    "distdl.data.crop": "distdl.images.crop",
    "distdl.data.decoding": "distdl.images.decoding",
    "distdl.data.nvjpeg": "distdl.images.nvjpeg",
    "distdl.data.resizing": "distdl.images.resizing",
    "distdl.data.views": "distdl.images.views",
    "distdl.health.causes": "distdl.incident.causes",
    "distdl.health.evidence": "distdl.incident.evidence",
    "distdl.health.incident": "distdl.incident.incident",
    "distdl.health.sights": "distdl.incident.sights",
    "distdl.launchers.sagemaker.heartbeat": "distdl.launchers.heartbeat",
    "distdl.tasks.needs": "distdl.worker.needs",
    "distdl.planner.strategies": "distdl.tools.measure.plan",
    "distdl.worker.agent": "distdl.agent.agent",
    "distdl.worker.rank_output": "distdl.agent.rank_output",
    "distdl.worker.rendezvous": "distdl.agent.rendezvous",
    "distdl.worker.standby": "distdl.agent.standby",
    "distdl.worker.standby_ranks": "distdl.agent.standby_ranks",
}


def current(name: str) -> str:
    """The name that something has now; `name` itself if it has not moved."""
    known = name
    rest = ""
    while "." in known:
        if known in MOVED:
            return MOVED[known] + rest
        known, _, last = known.rpartition(".")
        rest = f".{last}{rest}"
    return name


class MovedFinder:
    """Finds an import by its old name: it gives the one object that there is, under both names."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("distdl.") or current(name) == name:
            return None
        return ModuleSpec(name, MovedLoader())  # type: ignore[arg-type]


class MovedLoader:
    def create_module(self, spec: ModuleSpec) -> None:
        """An empty module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = _found(current(module.__name__))

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m OLD_NAME`."""
        spec = importlib.util.find_spec(current(name))
        loader: Any = spec.loader if spec is not None else None
        return loader.get_code(current(name)) if hasattr(loader, "get_code") else None


def _found(name: str) -> ModuleType:
    """The module, or the object in a module; raises ModuleNotFoundError if there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    module, _, attribute = name.rpartition(".")
    try:
        return vars(importlib.import_module(module))[attribute]
    except KeyError:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name) from None


def serve() -> None:
    """From now on imports find old names; before all other finders, since the new packages would
    load a module a second time under its old name."""
    sys.meta_path.insert(0, MovedFinder)
