"""Stage 2 of validation: imports every `_target_` of a config, and looks at each node with it.

A node's class is imported and accepted (`located.py`), its arguments are bound (`binder.py`), its
own checks are called (`own_checks.py`), and it is compared with what Lightning takes
(`lightnings.py`). It runs in a child process (`child.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from distdl.config.hints.words import TRAINER_OWNED
from distdl.config.schema import COLLECTIONS, COMPONENTS
from distdl.util.imports import no_exit
from distdl.util.typed import Path
from distdl.validation import imported_modules, logged
from distdl.validation.binder import UNKNOWN, Binder
from distdl.validation.findings import ConfigFindings
from distdl.validation.located import accepted, locate
from distdl.validation.own_checks import OwnChecks
from distdl.validation.resolve import Resolved
from distdl.validation.targets import BUILT, Trust, nodes, target_problems


class Binding:
    """One validation.

    Args:
        request: What `validate.check_bindings` asks: `config`, `context`, `trust`, `expressions`.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.config: dict[str, Any] = request["config"]
        self.context: dict[str, Any] = request["context"]
        self.trust = Trust(*map(tuple, request["trust"]))
        self.skip = [path[:-1] for path, _ in target_problems(self.config, self.trust)]
        self.called: dict[Path, Callable[..., Any]] = {}
        self.before = {*sys.modules}
        expressions = {tuple(path): text for path, text in request["expressions"]}
        self.findings = ConfigFindings(local=self.context["local"], expressions=expressions)
        resolved = Resolved(values=self.config, expressions=expressions)
        self.binder = Binder(resolved, self.skip, self.findings)
        self.own_checks = OwnChecks(self.config, self.context, self.skip, self.findings)

    @no_exit()
    def run(self) -> None:
        findings = self.findings
        self.import_targets()
        self.compare_domains()
        for key in (*COMPONENTS, *COLLECTIONS):
            self.visit(self.config.get(key), (key,))
        findings.facts["metrics"] = logged.metrics_of(self.called.get(("model",)))
        if isinstance(self.config.get("trainer"), dict):
            self.check_trainer(self.config["trainer"])
        if not findings.local:
            launcher = self.config.get("launcher") or {}
            imported_modules.check_imported(self.before, launcher, self.trust, findings)
            files = imported_modules.imported_files(self.trust)
            findings.facts["imported"] = sorted(files)
        findings.drop_consequences()

    def import_targets(self) -> None:
        """Imports every target and checks its kind, before any model is built for a check."""
        for path, node in nodes({key: self.config.get(key) for key in BUILT}):
            if path not in self.skip:
                called = locate(node["_target_"], path, self.trust, self.findings)
                if called is not None and accepted(called, node, path, self.trust, self.findings):
                    self.called[path] = called
                else:
                    self.skip.append(path)

    def compare_domains(self) -> None:
        """Data and model that name a domain must name the same one. If they do not, nothing else
        about the two is worth a message."""
        parts = [self.called.get((section,)) for section in ("data", "model")]
        named = [getattr(getattr(part, "domain", None), "name", None) for part in parts]
        given, learnt = named
        if not (isinstance(given, str) and isinstance(learnt, str)) or given == learnt:
            return
        data, model = (getattr(part, "__name__", "") for part in parts)
        what = f"{data} gives samples of {given}, and {model} learns {learnt}"
        remedy = "choose data and model of one domain: data=NAME or model=NAME"
        self.findings.add(("data",), what, remedy, code="mismatch")
        self.skip += [("data",), ("model",)]

    def visit(self, value: object, path: Path) -> None:
        """Checks a node and the nodes inside it. Nodes below `_recursive_: false` are not bound:
        the target builds them itself, and may pass further arguments."""
        from distdl.validation import lightnings

        sharded = bool((self.config.get("checkpoint") or {}).get("sharded"))
        unbuilt: list[Path] = []
        for inner, node in nodes(value):
            built = not any(inner[: len(above)] == above for above in unbuilt)
            if node.get("_recursive_", True) is False:
                unbuilt.append(inner)
            location = (*path, *inner)
            if location in self.skip:
                continue
            called = self.called[location]
            lightnings.component(called, location, self.trust, self.findings, sharded=sharded)
            before = len(self.findings.problems)
            if built:
                self.binder.bind(called, node, location)
            # A check may rely on values that are known to be wrong; only unknown keys do no harm.
            found = self.findings.problems[before:]
            if built and all(UNKNOWN in problem.what for problem in found):
                self.own_checks.of_node(called, node, location)

    def check_trainer(self, node: dict[str, Any]) -> None:
        from lightning.pytorch import Trainer

        from distdl.validation import lightnings

        self.visit(node, ("trainer",))
        # Stage 1 reports the arguments that distdl sets itself.
        arguments = {key: value for key, value in node.items() if key not in TRAINER_OWNED}
        self.binder.bind(Trainer, arguments, ("trainer",), "lightning's Trainer")
        lightnings.trainer(arguments, self.findings)
        world_size = int(self.context.get("world_size", 1))
        self.findings.problems += lightnings.misfits_of(self.config, self.called, world_size)
