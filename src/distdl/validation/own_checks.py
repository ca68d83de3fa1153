"""The checks that a target has for its own node."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from distdl.config.paths import path_text
from distdl.config.schema import COLLECTIONS
from distdl.util.errors import Note
from distdl.util.typed import Path
from distdl.validation.findings import ConfigFindings
from distdl.validation.located import in_short, origin

HOOK = "check"  # the method by which a target checks its own node
# Classes with such a method for a node whatever its target is, in packages above this one.
OF_NODES: dict[Path, tuple[str, ...]] = {
    ("model",): ("distdl.models.recompute.Check", "distdl.models.lora.LoraCheck"),
    ("optimizer",): ("distdl.optim.trial.OneStep",),
    ("schedule",): ("distdl.optim.trial.ByClock",),
}


class OwnChecks:
    """Calls such checks.

    Args:
        config: All of it.
        context: The number of devices, whether the run is `local`, and more (`check_bindings`).
        skip: The nodes that are refused already; the list may grow.
        findings: Where problems and notes go.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        context: Mapping[str, Any],
        skip: Sequence[Path],
        findings: ConfigFindings,
    ) -> None:
        self.config = config
        self.context = context
        self.skip = skip
        self.findings = findings

    def of_node(self, called: Callable[..., Any], node: dict[str, Any], path: Path) -> None:
        """The check of the node's target, and those of its section."""
        self._of(called, node, path)
        for name in OF_NODES.get(path, ()):
            ours: Any = pydoc.locate(name)
            self._of(ours, node, path)

    def _of(self, called: Callable[..., Any], node: dict[str, Any], path: Path) -> None:
        """Calls a static or class method `check(node[, context])`, if there is one.

        It returns Problems, with paths relative to the node, and strings that say what it could
        not check. The context has the number of devices, whether the run is `local`, whether a
        `data.batch_size` of 1 stands for one that is chosen later, the `config`, and the `refused`
        components, which must not be imported: `model`, `callbacks.stop`. A data
        node's check without a context looks at files, so it is called for local runs only.
        """
        static = inspect.getattr_static(called, HOOK, None)
        is_ours = isinstance(static, (staticmethod, classmethod)) or inspect.isfunction(called)
        if static is None or not is_ours:
            return
        start = path_text(path)
        try:
            check = getattr(called, HOOK)
            wants_context = len(inspect.signature(check).parameters) > 1
            if path[0] == "data" and not self.findings.local and not wants_context:
                return
            refused = [path_text(bad[: 1 + (bad[0] in COLLECTIONS)]) for bad in self.skip if bad]
            context = {**self.context, "config": self.config, "refused": refused}
            arguments = (node, context) if wants_context else (node,)
            for problem in check(*arguments) or ():
                if isinstance(problem, Note):
                    self.findings.notes.append(str(problem))
                elif isinstance(problem, str):
                    self.findings.notes.append(f"not checked: {start}: {problem}")
                else:
                    location = f"{start}.{problem.path}" if problem.path else start
                    self.findings.problems.append(replace(problem, path=location))
        except Exception as error:  # a check may be the user's own code
            what = f"its own check failed: {in_short(error)}"
            self.findings.add(path, what, origin(error), code="failed")
