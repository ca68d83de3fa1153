"""The modules that importing a config's targets has brought in: which of them the nodes of a job
may lack, and which files a job takes along."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path as FilePath
from typing import Any

from distdl.config.own_code import editable, is_installed
from distdl.validation.findings import ConfigFindings
from distdl.validation.targets import Trust


def check_imported(
    before: Collection[str], launcher: Mapping[str, Any], trust: Trust, findings: ConfigFindings
) -> None:
    """Notes modules from outside the project and outside the installed packages: the nodes may
    have them. Modules that only $PYTHONPATH finds are refused: a job has its own $PYTHONPATH.

    Args:
        before: The names of the modules that were there before the targets were imported.
        launcher: The launcher's node.
    """
    searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if launcher.get("modules") or "PYTHONPATH" in str(launcher):
        searched = []  # the user sets up modules or $PYTHONPATH of the nodes
    installed = [folder for _, folder in editable()]
    launches = str(launcher.get("_target_")).partition(".")[0]  # runs here, not on the nodes
    new = {*sys.modules} - {*before} - {launches}
    # Top-level modules only: those below torch.classes claim to have any attribute.
    for name in sorted(n for n in new if n.isidentifier() and not n.startswith("__")):
        module = sys.modules[name]
        files = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
        home = FilePath(str(files[0] or ".")).parent
        known = str(home) in trust.folders or is_installed(home)
        if known or not home.is_absolute():
            continue
        what = f"{name} is imported from {home}, which no job takes along"
        remedy = "or choose a project.root that contains it"
        if str(home) in searched and not any(home.is_relative_to(f) for f in installed):
            what += ", and no node finds it: nodes have another PYTHONPATH"
            remedy = f"pip install it, here and there; {remedy}"
            findings.add(("project", "root"), what, remedy, code="incomplete")
        else:
            findings.notes.append(f"{what}: install it on the nodes, {remedy}")


def imported_files(trust: Trust) -> Iterator[str]:
    """Files of the user's modules, which the nodes need as well."""
    for module in [*sys.modules.values()]:
        file = vars(module).get("__file__")  # some modules claim to have any attribute
        if isinstance(file, str) and FilePath(file).is_absolute():
            own = any(FilePath(file).is_relative_to(f) for f in trust.folders)
            if own and not is_installed(FilePath(file)):
                yield file
