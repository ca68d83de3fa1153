"""Finds what is wrong with a run before anything starts: all that a stage finds in one go.

Stage 1 (`problems_of`) looks at the config alone and imports neither torch nor Lightning. Stage 2
(`check_bindings`) imports every `_target_` and binds its arguments, in a child process, since that
import takes seconds, may run the user's code and may fail in any way.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from distdl import checks
from distdl.checks import Topology, is_here, strings
from distdl.errors import Problem, Unchecked, UserError
from distdl.importing import logged_later, uncollected
from distdl.own_code import own_folders
from distdl.redact import redact
from distdl.resolve import Resolved, all_paths, resolve
from distdl.schema import (
    COLLECTIONS,
    COMPONENTS,
    LAYERS,
    Checkpoint,
    Config,
    Project,
    check,
    known_paths,
)
from distdl.targets import Trust, target_problems

_CHILD_SECONDS = 300.0

# What the builder (distdl.build) passes besides the node's own keys. `supplied`: names of the
# leading positional arguments; `consumed`: keys of the node that never reach the target;
# `null_is_absent`: keys that reach it if they are set; `offered`: arguments passed if the signature
# takes them.
SUPPLIED: dict[str, dict[str, list[str]]] = {
    "optimizer": {
        "supplied": ["params"],
        "consumed": ["lr_scaling", "lr_reference_batch", "decay_norm_and_bias"],
        "null_is_absent": ["fused"],
    },
    "schedule": {
        "supplied": ["optimizer"],
        "consumed": ["interval"],
        "offered": ["steps_per_epoch", "max_epochs", "total_steps"],
    },
    "task": {"supplied": ["context"]},
}


def problems_of(
    config: DictConfig | Mapping[str, Any],
    *,
    topology: Topology | None = None,
    local: bool | None = None,
    project_root: str | None = None,
) -> list[Problem]:
    """Stage 1: everything that is wrong with a config, found without importing what it names.

    Args:
        config: As composed, with unknown keys still in it.
        topology: The resolved size of the run; None leaves out the checks that need it.
        local: Whether the workers run on this machine; None reads it from the launcher.
        project_root: Folder of the user's code; None means `project.root`.

    Returns:
        Problems sorted by path; their texts never repeat a value from the environment.
    """
    resolved = resolve(config)
    here = is_here(resolved, local)
    removed = checks.removed(resolved)
    shape = check(resolved.values, show=resolved.show, known=_known(resolved))
    found = [
        *removed,
        *(item for item in shape if item[0] not in [path for path, _ in removed]),
        *checks.owned(resolved),
        *checks.unknown(resolved),
        *checks.names(resolved),
        *checks.nothing(resolved),
        *checks.services(resolved, here),
        *target_problems(resolved.values, _trust(resolved, project_root)),
        *checks.topology(resolved, topology, here),
        *checks.secrets(resolved.written, resolved, ()),
    ]
    # What did not resolve is None by now and must not be told a second time.
    broken = [*resolved.problems, *checks.class_paths(resolved)]
    found = [item for item in found if not any(item[0][: len(path)] == path for path, _ in broken)]
    found += [*broken, *checks.forwarded(resolved, here), *checks.sent(resolved, here)]
    return _tidy([_safe(problem, resolved) for _, problem in found])


def refuse(
    config: DictConfig | Mapping[str, Any],
    topology: Topology | None,
    *,
    local: bool | None = None,
    project_root: str | None = None,
    further: Sequence[Problem] = (),
) -> None:
    """Stage 1 of a run that is about to start.

    Args:
        config, topology, local, project_root: As in `problems_of`.
        further: Problems that the caller has found, told where stage 1 says nothing of their path.

    Raises:
        Unchecked: with all problems. Whoever mends a typo must not wait for torch to hear of it.
    """
    found = problems_of(config, topology=topology, local=local, project_root=project_root)
    told = {problem.path for problem in found}
    found += [problem for problem in further if problem.path.partition("=")[0] not in told]
    if found:
        raise Unchecked(*_tidy(found))


def check_bindings(
    config: DictConfig | Mapping[str, Any],
    size: Topology | None,
    project_root: str | None = None,
    *,
    local: bool | None = None,
    goes_on: bool = False,
) -> tuple[list[Problem], list[str], dict[str, Any]]:
    """Stage 2: imports each `_target_` and binds its arguments, in a child process.

    Args:
        config, local, project_root: As in `problems_of`, which has found nothing.
        size: The size of the run; None where only the launcher knows it.
        goes_on: This very process goes on as the worker, and imports all of it but once.

    Returns:
        Problems; notes for the user ("not checked: ..."); facts: `model_configures_optimizers` is
        True or False for a model that is a class, and None where it is a function or could not be
        imported.
    """
    resolved = resolve(config)
    nodes, devices = (size.num_nodes, size.devices) if size else (1, 1)
    trust = _trust(resolved, project_root)
    request = {
        "config": resolved.values,
        "expressions": list(resolved.expressions.items()),
        "trust": [trust.folders, trust.allow],
        "supplied": SUPPLIED,
        "context": {
            "num_nodes": nodes,
            "devices": devices,
            "world_size": nodes * devices,
            "accelerator": size.accelerator if size else "auto",
            "local": is_here(resolved, local),
        },
    }
    answer = (_ask_here if goes_on else _ask_child)(json.dumps(request, default=str))
    problems = [_safe(Problem(*problem), resolved) for problem in answer["problems"]]
    notes = [resolved.hide_environment(note) for note in answer["notes"]]
    return _tidy(problems), notes, answer["facts"]


def validate(
    config: DictConfig | Mapping[str, Any],
    size: Topology | None,
    *,
    local: bool | None = None,
    project_root: str | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Both stages, the second if the first finds nothing; notes and facts of `check_bindings`.

    Raises:
        UserError: with all problems of the stage that finds any.
    """
    refuse(config, size, local=local, project_root=project_root)
    problems, notes, facts = check_bindings(config, size, project_root, local=local)
    if problems:
        raise UserError(*problems)
    return notes, facts


def _tidy(problems: Sequence[Problem]) -> list[Problem]:
    return sorted(dict.fromkeys(problems), key=lambda problem: problem.path)


def _root(resolved: Resolved, project_root: str | None) -> str:
    return str(project_root or resolved.section("project").get("root") or os.getcwd())


def _trust(resolved: Resolved, project_root: str | None) -> Trust:
    allow = strings(resolved.section("project").get("allow"))
    return Trust(own_folders(_root(resolved, project_root)), tuple(allow))


def _safe(problem: Problem, resolved: Resolved) -> Problem:
    what, remedy = map(resolved.hide_environment, (problem.what, problem.remedy))
    return Problem(problem.path, what, remedy)


def _known(resolved: Resolved) -> list[str]:
    """Paths that exist, to suggest: the schema's and those of the chosen components."""
    fixed = {"project": Project, "checkpoint": Checkpoint}
    names = dict.fromkeys([*known_paths(), *LAYERS])
    for path in all_paths(resolved.values):
        top = path.partition(".")[0]
        leaf = path.rpartition(".")[2]
        if top in Config.model_fields and top not in fixed and not leaf.startswith("_"):
            is_component = top in COMPONENTS or top in COLLECTIONS
            if is_component and _has_target(resolved.values, path):
                names[path] = None
    return list(names)


def _has_target(values: Any, path: str) -> bool:
    """Whether the value at `path`, or the component around it, names a class."""
    for part in path.split("."):
        if isinstance(values, dict) and "_target_" in values:
            return True
        values = values.get(part) if isinstance(values, dict) else None
    return isinstance(values, dict) and "_target_" in values


def _ask_here(request: str) -> dict[str, Any]:
    with uncollected(), logged_later(), contextlib.chdir("."):  # an import may go elsewhere
        from distdl.binding import answered

        return answered(json.loads(request))


def _ask_child(request: str) -> dict[str, Any]:
    """Runs `distdl.binding`; that it hangs or crashes is a problem like any other."""
    # -P: the current folder may hold anything; what is the user's own code stands in the request.
    command = [sys.executable, "-P", "-m", "distdl.binding", str(os.getpid())]
    try:
        child = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=_CHILD_SECONDS
        )
        return json.loads(child.stdout)
    except subprocess.TimeoutExpired:
        what = f"importing what the config names took more than {_CHILD_SECONDS:.0f} s"
        remedy = "import your modules by hand to see where they hang"
    except ValueError:
        what = f"importing what the config names ended Python (exit code {child.returncode})"
        lines = [line for line in redact(child.stderr).splitlines() if line.strip()]
        remedy = "\n    ".join(lines[-5:])
    return {"problems": [["", what, remedy]], "notes": [], "facts": {}}
