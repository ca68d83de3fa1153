"""Where a run came from: commit, diff, command, packages. Redacted; never `os.environ`."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distdl import __version__
from distdl.runs import git
from distdl.util.redact import redact_command, redact_diff

DIFF_LIMIT = 200_000  # characters; a longer diff is cut and marked as such


def collect(
    command: Sequence[str], root: Path, overrides: Sequence[str] = (), swept: Sequence[str] = ()
) -> dict[str, Any]:
    """Everything that is recorded with a new run. `command` is sys.argv, and the user's code is in
    `root`. `swept` are the overrides that differ between the members of the run's sweep."""
    started = {"__main__.py": ["python", "-m", "distdl"], "torchx": ["torchx"]}
    typed = started.get(Path(command[0]).name, ["distdl"])
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "id": uuid.uuid4().hex,  # runs of one name in two folders may start in the same second
        "distdl": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": redact_command([*typed, *command[1:]]),
        "overrides": redact_command(overrides),
        "swept": redact_command(swept),
        "git": git_state(root),
        "packages": packages(),
    }


def git_state(root: Path) -> dict[str, Any]:
    """Commit, branch, changed files and the redacted diff of `root`; empty outside git. `error` is
    what git says if it refuses the repository. Before the first commit there is no commit."""
    if git.top_of(root) is None:
        return {}
    try:
        return _git_state(root)
    except git.GitRefuses as refused:
        return {"error": str(refused)}


def _git_state(root: Path) -> dict[str, Any]:
    lines = git.output(root, "status", "--porcelain=v2", "--branch").splitlines()
    headers = [line.removeprefix("# ").partition(" ") for line in lines if line.startswith("# ")]
    branch = {key: value for key, _, value in headers}
    changed = [_changed(line) for line in lines if not line.startswith("#")]
    state: dict[str, Any] = {"dirty": bool(changed), "changed": changed[:200]}
    if branch["branch.oid"] == "(initial)":
        return {**state, "error": "there is no commit yet"}
    # No program that the repository's settings name, and no colours: this is read by programs.
    diff = git.output(root, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD")
    # A diff holds the bytes of the files, which need not be UTF-8.
    diff = redact_diff(os.fsencode(diff).decode("utf-8", "replace"))
    if len(diff) > DIFF_LIMIT:
        diff = diff[:DIFF_LIMIT] + "\n[cut here]\n"
    return {
        "commit": branch["branch.oid"],
        "branch": branch["branch.head"].replace("(detached)", "HEAD"),
        **state,
        "diff": diff,
    }


# How many words come before the name of a file, by the first word of its line.
_WORDS_BEFORE_NAME = {"1": 8, "2": 9, "u": 10, "?": 1, "!": 1}


def _changed(line: str) -> str:
    """A line of `git status --porcelain=v2` as its short form has it: " M train.py"."""
    kind = line[0]
    words = line.split(" ", _WORDS_BEFORE_NAME[kind])
    name = words[-1]
    if kind in "?!":
        return f"{kind * 2} {name}"
    if kind == "2":  # renamed: the new name, a tab, the old one
        new, _, old = name.partition("\t")
        name = f"{old} -> {new}"
    return f"{words[1].replace('.', ' ')} {name}"


def project_root(chosen: str | None) -> Path:
    """The user's code: `chosen`, else the git top, else the current folder."""
    if chosen:
        return Path(chosen).resolve()
    return git.top_of(Path.cwd()) or Path.cwd()


@functools.cache
def packages() -> tuple[str, ...]:
    """The installed packages, `name==version` each. Listed once per process, since it is slow."""
    # A distribution reads its metadata file again at each access.
    metadata = (each.metadata for each in importlib.metadata.distributions())
    versions = {each["Name"] or "": each["Version"] for each in metadata}
    return tuple(f"{name}=={version}" for name, version in sorted(versions.items()) if name)
