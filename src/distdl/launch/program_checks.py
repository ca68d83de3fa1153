"""Checks of a program before anything starts: its command, its framework, its checkpoints."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from pydantic import ValidationError

from distdl.config import programs
from distdl.config import recipe as configs
from distdl.config.schema import Program
from distdl.job import LauncherBase, Resources, blamed
from distdl.runs.directory import RunDirectory
from distdl.util.errors import Problem
from distdl.util.suggest import closest
from distdl.util.wording import plural

COMMAND = f"{programs.SECTION}.command"
# What a framework's import says; `mpi` is spoken by several packages.
IMPORTS = {
    "tensorflow": "tensorflow",
    "jax": "jax",
    "flax": "jax",
    "mpi4py": "mpi",
    "horovod": "mpi",
}
ELF = b"\x7fELF"


def section_of(config: DictConfig) -> Program | None:
    """The section of a program's config; None without one, or if the first stage refuses it."""
    if not programs.is_program(config):
        return None
    with suppress(ValidationError, ValueError, TypeError):
        return Program.of(config[programs.SECTION])
    return None


def folder_of(root: Path, run: RunDirectory) -> str:
    """The folder in which the program is started, relative to the project's root: the current one
    of the run's first start."""
    first = run.attempts()[:1] if run.exists else []
    recorded = first[0].launch().get("folder") if first else None
    if isinstance(recorded, str):
        return recorded
    here, top = Path.cwd().resolve(), root.resolve()
    return here.relative_to(top).as_posix() if here.is_relative_to(top) else "."


def problems(
    program: Program,
    folder: Path,
    node: Mapping[str, Any],
    launcher: type[LauncherBase[Any]] | None,
    size: Resources | None,
    local: bool,
) -> Iterator[Problem]:
    """What can be known before the start.

    Args:
        program: The section.
        folder: In which the program is started, in this copy of the project.
        node: The launcher's settings, and its class.
        size: The size of the run, as far as it is known.
        local: Whether the ranks run on this machine.
    """
    if not folder.is_dir():
        what = f"was started in {folder}, which does not exist here"
        yield Problem(
            COMMAND, what=what, remedy="cd to the project that holds it", code="not-found"
        )
    else:
        yield from command_problems(program.command, folder, local)
    yield from framework_problems(program, node, launcher, size)
    why = ""
    if launcher is not None:
        with blamed(launcher, "loses_store"):
            why = launcher.loses_store(node)
    if why and node.get("max_attempts") and program.checkpoints is None:
        what = f"launcher.max_attempts={node['max_attempts']} needs a place that lasts: {why}"
        remedy = (
            "program.checkpoints=s3://BUCKET/FOLDER, azure://CONTAINER/FOLDER, or a folder "
            "that all hosts share; or launcher.max_attempts=0"
        )
        yield Problem("program.checkpoints", what=what, remedy=remedy, code="missing-key")


def framework_problems(
    program: Program,
    node: Mapping[str, Any],
    launcher: type[LauncherBase[Any]] | None,
    size: Resources | None,
) -> Iterator[Problem]:
    if program.framework == "mpi" and launcher is not None:
        if remedy := launcher.without_mpi(node):
            yield Problem(
                "program.framework",
                what="the ranks of this launcher are started by no mpirun",
                remedy=remedy,
                code="unsupported",
            )
        elif program.per == "node":
            yield Problem(
                "program.per",
                what="mpirun starts ranks, and a program per node would be one of them on each",
                remedy="program.per=rank",
                code="conflict",
            )
    roles = {"parameter_servers": program.parameter_servers, "evaluator": int(program.evaluator)}
    for key, count in roles.items():
        if count and program.framework != "tensorflow":
            yield Problem(
                f"program.{key}",
                what="only TensorFlow's tasks have such a role",
                remedy="program.framework=tensorflow",
                code="conflict",
            )
            return
    tasks = None if size is None else tasks_of(program, size)
    if tasks is not None and any(roles.values()):
        needed = sum(roles.values()) + (2 if program.parameter_servers else 1)
        if tasks < needed:
            servers = program.parameter_servers
            parts = ["a chief"]
            if servers:
                parts += ["a worker", f"{servers} parameter {plural('server', servers)}"]
            parts += ["an evaluator"] * program.evaluator
            unit = "trainer.num_nodes" if program.per == "node" else "trainer.devices"
            yield Problem(
                f"program.{next(k for k, n in roles.items() if n)}",
                what=f"{', '.join(parts)} are {needed} tasks, and the run has {tasks}",
                remedy=f"more {unit}",
                code="not-enough",
            )


def tasks_of(program: Program, size: Resources) -> int:
    """How many processes of the program a run of this size has."""
    return size.num_nodes if program.per == "node" else size.world_size


def command_problems(command: Sequence[str], folder: Path, local: bool) -> Iterator[Problem]:
    """Whether the program can be started, as far as this machine shows it."""
    first = command[0]
    if first == "-m":
        yield from _module_problems(command, folder, local)
    elif first.endswith(".py"):
        yield from _script_problems(first, folder, local)
    elif "/" in first:
        if local or not os.path.isabs(first):
            yield from _file_problems(first, folder, local)
    elif local and shutil.which(first) is None:
        beside = folder / first
        near = closest(first, [each.name for each in folder.iterdir() if each.is_file()])
        remedy = f"did you mean ./{near}?" if near else "write its path, or install it"
        if beside.is_file():
            remedy = f"it is in this folder: ./{first}"
        yield Problem(
            COMMAND, what=f"there is no program {first!r} on PATH", remedy=remedy, code="not-found"
        )


def _module_problems(command: Sequence[str], folder: Path, local: bool) -> Iterator[Problem]:
    if len(command) < 2:
        yield Problem(
            COMMAND, what="-m names no module", remedy="-m package.module", code="missing-key"
        )
        return
    parts = command[1].split(".")
    inside = folder.joinpath(*parts)
    own = inside.with_suffix(".py").is_file() or (inside / "__main__.py").is_file()
    if own or not local:
        return
    known = None
    with suppress(ImportError, ValueError, AttributeError):
        known = importlib.util.find_spec(parts[0])
    if known is None:
        near = closest(command[1], [each.stem for each in folder.glob("*.py")])
        yield Problem(
            COMMAND,
            what=f"there is no module {command[1]!r}, neither in {folder} nor installed",
            remedy=f"did you mean -m {near}?" if near else "correct the name",
            code="not-found",
        )


def _script_problems(name: str, folder: Path, local: bool) -> Iterator[Problem]:
    if os.path.isabs(name) and not local:
        return
    path = folder / name
    if path.is_dir():
        yield Problem(
            COMMAND, what=f"{name} is a folder", remedy="name the file in it", code="wrong-kind"
        )
    elif not path.is_file():
        yield _no_file(name, folder)


def _no_file(name: str, folder: Path) -> Problem:
    above = (folder / name).parent
    names = [each.name for each in above.iterdir() if each.is_file()] if above.is_dir() else []
    near = closest(Path(name).name, names)
    remedy = f"did you mean {os.path.join(os.path.dirname(name), near)}?" if near else ""
    return Problem(
        COMMAND,
        what=f"there is no file {name} in {folder}",
        remedy=remedy or "correct the path",
        code="not-found",
    )


def _file_problems(name: str, folder: Path, local: bool) -> Iterator[Problem]:
    """Of a file that is executed by its path."""
    path = folder / name
    if path.is_dir():
        yield Problem(
            COMMAND, what=f"{name} is a folder", remedy="name the program in it", code="wrong-kind"
        )
        return
    if not path.is_file():
        yield _no_file(name, folder)
        return
    with path.open("rb") as file:
        start = file.read(256)
    if not path.stat().st_mode & (stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH):
        by = "bash" if start[:2] == b"#!" or not start.startswith(ELF) else ""
        yield Problem(
            COMMAND,
            what=f"{name} is not executable",
            remedy=f"chmod +x {name}" + (f", or: {by} {name}" if by else ""),
            code="wrong-kind",
        )
        return
    if start.startswith(ELF):
        return
    if start[:2] != b"#!":
        yield Problem(
            COMMAND,
            what=f"{name} is no program: it begins with no #! line, and is not compiled for Linux",
            remedy="begin it with #!/bin/sh, or name what runs it: bash " + name,
            code="wrong-kind",
        )
        return
    interpreter = start[2:].split(b"\n")[0].split()[:1]
    named = os.fsdecode(interpreter[0]) if interpreter else ""
    if start[2:].split(b"\n")[0].endswith(b"\r"):
        yield Problem(
            COMMAND,
            what=f"the first line of {name} ends as Windows writes it, so that nothing runs it",
            remedy=f"sed -i 's/\\r$//' {name}",
            code="wrong-kind",
        )
    elif local and not os.access(named, os.X_OK):
        yield Problem(
            COMMAND,
            what=f"{name} is run by {named or 'nothing'} (its #! line), which does not exist",
            remedy="correct the line",
            code="not-found",
        )


def hints(program: Program, folder: Path) -> Iterator[str]:
    """What the program's own file lets one expect of its framework; distdl never guesses it."""
    source = _source(program.command, folder)
    if source is None or program.framework is not None:
        return
    with suppress(OSError, SyntaxError, ValueError, RecursionError):
        for name in _imported(ast.parse(source.read_bytes())):
            if framework := IMPORTS.get(name):
                yield (
                    f"{source.name} imports {name}: program.framework={framework} would give it "
                    f"{framework}'s variables"
                )
                return


def files(command: Sequence[str], folder: Path) -> Iterator[Path]:
    """The file of the project that a command starts: by its path, by -m, or by another program,
    whose first word that names a file it is (`bash run.sh`, `torchrun --nproc-per-node 2 x.py`)."""
    if source := _source(command, folder):
        yield source.resolve()
        return
    words = command[:1] if "/" in command[0] else command[1:]
    named = (folder / word for word in words if word and not word.startswith("-"))
    if found := next((path for path in named if _is_file(path)), None):
        yield found.resolve()


def _is_file(path: Path) -> bool:
    with suppress(OSError):  # of a word that is longer than any name
        return path.is_file()
    return False


def _source(command: Sequence[str], folder: Path) -> Path | None:
    """The Python file that the command starts, if it is one of the project."""
    words = [*command]
    if Path(words[0]).name.startswith("python"):
        words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        inside = folder.joinpath(*words[1].split("."))
        found = [inside.with_suffix(".py"), inside / "__main__.py"]
    else:
        found = [folder / word for word in words[:1] if word.endswith(".py")]
    return next((each for each in found if each.is_file()), None)


def _imported(tree: ast.Module) -> Iterator[str]:
    """The packages that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def unused_params(config: DictConfig) -> Iterator[str]:
    """A note on parameters that the command does not name."""
    raw = str(config[programs.SECTION]._get_node("command"))
    for name in configs.plain(config[programs.SECTION].get("params")):
        if f"{{{programs.PARAMS}.{name}}}" not in raw:
            yield f"params.{name} is not in the command: the program finds it in DISTDL_PARAMS"
