"""Finds the mistakes of a run before anything starts; each stage reports all that it finds at once.

Stage 1 (`problems_of`) looks at the config alone and imports neither torch nor Lightning. Stage 2
(`check_bindings`) takes what stage 1 has resolved, imports every `_target_`, and binds its
arguments. It uses a child process, since these imports take seconds, may run the user's code and
may fail in any way.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from omegaconf import DictConfig

from distdl.config.own_code import own_folders
from distdl.config.paths import lies_below, path_text, walk
from distdl.config.recipe import LAYERS
from distdl.config.schema import COLLECTIONS, COMPONENTS, known_paths
from distdl.config.section_checks import check
from distdl.job import Resources
from distdl.util.errors import Problem, Unchecked, UserError
from distdl.util.imports import logged_later, uncollected
from distdl.util.redact import redact
from distdl.validation import rules
from distdl.validation.resolve import Resolved, resolve
from distdl.validation.rules import is_local, strings
from distdl.validation.targets import BUILT, Trust, nodes, target_problems

_CHILD_SECONDS = 300.0


def problems_of(
    config: DictConfig | Mapping[str, Any],
    *,
    topology: Resources | None = None,
    local: bool | None = None,
    folders: Sequence[str] | None = None,
) -> list[Problem]:
    """Stage 1: all problems that can be found without importing the classes that a config names.

    Args:
        config: As composed, with unknown keys still in it.
        topology: The resolved size of the run; None skips the checks that need it.
        local: Whether the workers run on this machine; None reads it from the launcher.
        folders: Of the user's own code (`own_folders`); None: those of `project.root`.

    Returns:
        Problems sorted by path; their texts never repeat a value from the environment.
    """
    return problems_in(resolve(config), topology=topology, local=local, folders=folders)


def problems_in(
    resolved: Resolved,
    *,
    topology: Resources | None = None,
    local: bool | None = None,
    folders: Sequence[str] | None = None,
) -> list[Problem]:
    """As `problems_of`, for a config that has been resolved."""
    local = is_local(resolved, local)
    trainer = [*rules.trainer(resolved)]
    shape = check(resolved.values, show=resolved.show, known=lambda: _known(resolved))
    problems = [
        *trainer,
        *(each for each in shape if each.path not in [known.path for known in trainer]),
        *rules.names(resolved),
        *rules.services(resolved, local),
        *(each for _, each in target_problems(resolved.values, _trust(resolved, folders))),
        *rules.topology(resolved, topology, local),
        *rules.classes(resolved),
        *rules.layer_rates(resolved),
        *rules.chosen_batch(resolved),
        *rules.chosen_recompute(resolved),
        *rules.secrets(resolved),
    ]
    # A value that did not resolve is None now, and must not be reported a second time.
    broken = [*resolved.problems, *rules.class_paths(resolved)]
    problems = [p for p in problems if not any(lies_below(p.path, top.path) for top in broken)]
    problems += [*broken, *rules.environment(resolved, local)]
    # Otherwise stage 2 reports misspelt arguments, together with all others.
    return _tidy([*problems, *(rules.misspelt(resolved) if problems else ())], resolved)


def refuse(
    config: DictConfig | Mapping[str, Any],
    topology: Resources | None,
    *,
    local: bool | None = None,
    folders: Sequence[str] | None = None,
    further: Sequence[Problem] = (),
) -> Resolved:
    """Stage 1 of a run that is about to start. Returns the resolved config, for stage 2.

    Args:
        config, topology, local, folders: As in `problems_of`.
        further: The caller's own problems, reported if stage 1 finds nothing at their path.

    Raises:
        Unchecked: with all problems, so that a typo is reported without waiting for torch.
    """
    resolved = resolve(config)
    problems = problems_in(resolved, topology=topology, local=local, folders=folders)
    paths = {problem.path for problem in problems}
    problems += [problem for problem in further if problem.path.partition("=")[0] not in paths]
    if problems:
        raise Unchecked(*_tidy(problems))
    return resolved


def check_bindings(
    resolved: Resolved,
    size: Resources | None,
    folders: Sequence[str] | None = None,
    *,
    local: bool | None = None,
    in_process: bool = False,
    new: bool = False,
    resumes: bool = False,
    builds: bool = True,
    fetched: bool = False,
) -> tuple[list[Problem], list[str], dict[str, Any]]:
    """Stage 2: imports each `_target_` and binds its arguments, in a child process.

    Args:
        resolved: The config, in which stage 1 has found nothing (`refuse`).
        local, folders: As in `problems_of`.
        size: The size of the run; None if only the launcher knows it.
        in_process: Import everything in this process, which becomes the worker afterwards.
        new: Whether the run has no attempt yet: a resume is not refused for its tracker.
        resumes: Whether the run has a checkpoint here, and so needs no other weights.
        builds: Whether the task needs the built run; else only the task and the launcher are
            imported.
        fetched: Whether the files that the config names are on this machine, wherever it runs.

    Returns:
        Problems; notes for the user ("not checked: ..."); facts: `model_configures_optimizers` is
        True or False if the model is a class, and None if it is a function or could not be
        imported; `metrics`: see `logged.metrics_of`; for a job elsewhere, `imported`: the files of
        the user's modules.
    """
    known = size or Resources(accelerator="auto")
    trust = _trust(resolved, folders)
    here = is_local(resolved, local)
    more = {
        "world_size": known.world_size,
        "local": here,
        "new": new,
        "resumes": resumes,
        "fetched": fetched,
        "batch_chosen_later": resolved.batch_chosen_later,
    }
    unused = () if builds else {*BUILT} - {"task", "launcher"}
    request = {
        "config": {key: value for key, value in resolved.values.items() if key not in unused},
        "expressions": list(resolved.expressions.items()),
        "trust": [trust.folders, trust.allow],
        "context": asdict(known) | more,
    }
    check_in = _check_in_process if in_process else _check_in_child
    answer = check_in(json.dumps(request, default=str))
    notes = [resolved.hide_environment(note) for note in answer["notes"]]
    problems = [
        Problem(path, what=what, remedy=remedy, code=code)
        for path, what, remedy, code in answer["problems"]
    ]
    return _tidy(problems, resolved), notes, answer["facts"]


def validate(
    config: DictConfig | Mapping[str, Any],
    size: Resources | None,
    *,
    local: bool | None = None,
    folders: Sequence[str] | None = None,
) -> tuple[list[str], dict[str, Any]]:
    """Runs stage 1 and, if it finds nothing, stage 2. Returns notes and facts (`check_bindings`),
    or raises a UserError with all problems of the first stage that finds any."""
    resolved = refuse(config, size, local=local, folders=folders)
    problems, notes, facts = check_bindings(resolved, size, folders, local=local)
    if problems:
        raise UserError(*problems)
    return notes, facts


def _tidy(problems: Sequence[Problem], resolved: Resolved | None = None) -> list[Problem]:
    """Removes duplicates and values from the environment, and sorts by path."""
    hide = (resolved or Resolved()).hide_environment
    safe = (replace(each, what=hide(each.what), remedy=hide(each.remedy)) for each in problems)
    return sorted(dict.fromkeys(safe), key=lambda problem: problem.path)


def _trust(resolved: Resolved, folders: Sequence[str] | None) -> Trust:
    project = resolved.section("project")
    if folders is None:
        folders = own_folders(str(project.get("root") or os.getcwd()))
    return Trust(tuple(folders), tuple(strings(project.get("allow"))))


def _known(resolved: Resolved) -> list[str]:
    """Existing paths to suggest: those of the schema and of the chosen components."""
    sections = {key: resolved.values.get(key) for key in (*COMPONENTS, *COLLECTIONS)}
    inside = (path for top, node in nodes(sections) for path, _ in walk(node, top))
    keys = (path_text(path) for path in inside if not str(path[-1]).startswith("_"))
    return [*dict.fromkeys([*known_paths(), *LAYERS, *(text for text in keys if "[" not in text)])]


def _check_in_process(request: str) -> dict[str, Any]:
    with uncollected(), logged_later(), contextlib.chdir("."):  # an import may change the folder
        from distdl.validation import child

        return child.check(json.loads(request))


def _check_in_child(request: str) -> dict[str, Any]:
    """Runs `distdl.validation.child`. A child that hangs or crashes is returned as a problem."""
    # -P: the child imports from the folders in the request, not from the current folder.
    command = [sys.executable, "-P", "-m", "distdl.validation.child", str(os.getpid())]
    streams: dict[str, Any] = {"capture_output": True, "text": True}
    try:
        child = subprocess.run(command, input=request, timeout=_CHILD_SECONDS, **streams)
        return json.loads(child.stdout)
    except subprocess.TimeoutExpired:
        what = f"importing the config's targets took more than {_CHILD_SECONDS:.0f} s"
        remedy = "import your modules by hand to see where they hang"
    except ValueError:
        what = f"importing the config's targets ended Python (exit code {child.returncode})"
        lines = [line for line in redact(child.stderr).splitlines() if line.strip()]
        remedy = "\n    ".join(lines[-5:])
    return {"problems": [["", what, remedy, "failed"]], "notes": [], "facts": {}}
