"""The pages of reference, which distdl writes about itself."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distdl.cli.explain import explained
from distdl.cli.main import COMMANDS, answer
from distdl.cli.schemas import ANSWERS
from distdl.util.refusal_codes import CODES
from distdl.validation.kinds import locate

# What your own code imports or subclasses; a config names the rest by `_target_`.
PUBLIC = ("job", "tasks", "models", "data", "optim", "callbacks")
TARGET = re.compile(r"_target_: (distdl\.[\w.]+)")


def commands() -> str:
    """Each command with its help."""
    lines = [
        "# Commands",
        "",
        "Every command, with what `--help` says of it.",
        "",
        "```bash",
        "python -m distdl jobs --help",
        "```",
        "",
        "## Start a run",
        "",
        *_in_a_block(help_of()),
    ]
    for name in COMMANDS:
        lines += [f"## {name}", "", *_in_a_block(help_of(name))]
        for full in ANSWERS:
            verb, _, rest = full.partition(" ")
            if verb == name and rest:
                lines += [f"### {full}", "", *_in_a_block(help_of(*full.split()))]
    return "\n".join(lines)


def help_of(*words: str) -> str:
    """What a command prints with --help, on a terminal of 80 columns."""
    said = io.StringIO()
    os.environ["COLUMNS"] = "80"
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        answer([*words, "--help"])
    return said.getvalue()


def _in_a_block(text: str, language: str = "text") -> list[str]:
    return [f"```{language}", *text.rstrip().splitlines(), "```", ""]


def config(root: Path) -> str:
    """Each key of a config, with its default and what it means: the files of all options."""
    lines = [
        "# Config",
        "",
        "Every key, its default, and what it means, as the files in `conf/` have them. What a",
        "class named by `_target_` takes besides: [Python](python.md).",
        "",
        "```bash",
        "python -m distdl --cfg job",
        "```",
        "",
        "## A whole config",
        "",
        *_in_a_block((root / "conf/distdl.yaml").read_text(encoding="utf-8"), "yaml"),
    ]
    for group in sorted(path for path in (root / "conf").iterdir() if path.is_dir()):
        lines += [f"## {group.name}", ""]
        for option in sorted(group.glob("*.yaml")):
            text = option.read_text(encoding="utf-8")
            lines += [f"### {group.name}={option.stem}", "", *_in_a_block(text, "yaml")]
    return "\n".join(lines)


def refusals() -> str:
    """Each code of a refusal."""
    lines = [
        "# Refusals",
        "",
        "What the code behind a refusal means, a command that is refused so, and what helps.",
        "",
        "```bash",
        "python -m distdl explain unknown-key",
        "```",
        "",
    ]
    for code in CODES:
        each = explained(code)
        lines += [f"## {code}", "", f"{each.meaning[0].upper()}{each.meaning[1:]}.", ""]
        if each.where:
            lines += [f"For example, where {each.where}:", ""]
        lines += _in_a_block(each.example)
        lines += [f"What helps: {each.remedy}.", ""]
    return "\n".join(lines)


def python(root: Path) -> str:
    """The classes and functions that a config names, or that your own code uses."""
    lines = [
        "# Python",
        "",
        "What a config names by `_target_`, and what your own code may subclass or call. The rest",
        "of distdl may change without notice.",
        "",
        "```python",
        "from distdl.job import LauncherBase",
        "```",
        "",
    ]
    packages: dict[str, list[str]] = {}
    for name in sorted({*_exported(), *_named_by_options(root)}):
        packages.setdefault(".".join(name.split(".")[:2]), []).append(name)
    for package, names in packages.items():
        lines += [f"## {package}", ""]
        lines += [line for name in names for line in (f"::: {_defined_as(name)}", "")]
    return "\n".join(lines)


def _defined_as(name: str) -> str:
    """The name under which the source has what a package passes on."""
    thing: Any = locate(name)
    return f"{thing.__module__}.{thing.__qualname__}"


def _exported() -> Iterator[str]:
    for package in PUBLIC:
        module = importlib.import_module(f"distdl.{package}")
        for name in module.__all__:
            if not name.isupper():
                yield f"distdl.{package}.{name}"


def _named_by_options(root: Path) -> Iterator[str]:
    for option in (root / "conf").rglob("*.yaml"):
        yield from TARGET.findall(option.read_text(encoding="utf-8"))
