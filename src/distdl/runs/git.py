"""Asks git about a folder: the one place that starts it.

An answer that git refuses is an error, never an empty answer: that would be taken for "git ignores
nothing", or "there is no repository".
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from distdl.util.errors import GitRefuses
from distdl.util.safe_paths import above

# Set by git for its hooks: they would make every repository the one of the hook.
ONE_REPOSITORY = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
UNREADABLE = re.compile(r"could not open directory '(.+?)/?': (.+)")


def top_of(folder: Path) -> Path | None:
    """The nearest folder at or above `folder` that has a `.git`, whether or not git can read it;
    None if there is none."""
    return next((f for f in (folder, *folder.parents) if os.path.lexists(f / ".git")), None)


def is_repository(folder: Path) -> bool:
    """Whether a folder that is no link has a `.git`, whether or not git can read it."""
    return os.path.lexists(folder / ".git") and not folder.is_symlink()


def output(folder: Path, *arguments: str) -> str:
    """What git prints, run in `folder`. File names are decoded as Python decodes them.

    Raises:
        GitRefuses: git is not installed, or refuses: a repository of another owner, a damaged one.
    """
    return _run(folder, *arguments)[0]


def _run(folder: Path, *arguments: str) -> tuple[str, str]:
    """What git prints to stdout and to stderr; raises as `output`."""
    environment = {k: v for k, v in os.environ.items() if k not in ONE_REPOSITORY}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
    if (top := top_of(folder)) is not None:
        # If its .git is damaged, git must refuse it, and not take it for a part of a repository
        # around it.
        environment["GIT_CEILING_DIRECTORIES"] = str(top.resolve().parent)
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=environment, check=True)
    except FileNotFoundError:
        raise GitRefuses.at(
            "project.root",
            what=f"{top_of(folder) or folder} is a git repository, and git is not installed here",
            remedy="install git: it knows what to ignore",
            code="not-installed",
        ) from None
    except subprocess.CalledProcessError as error:
        raise _refusal(folder, os.fsdecode(error.stderr)) from None
    return os.fsdecode(done.stdout), os.fsdecode(done.stderr)


def _refusal(folder: Path, message: str) -> GitRefuses:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    fatal = (line.removeprefix("fatal: ") for line in lines if line.startswith("fatal: "))
    why = next(fatal, "it gives no reason")
    if why.startswith("not a git repository (or any of the parent directories)"):
        why = "its own .git is damaged"
    top = top_of(folder) or folder
    remedy = next((line for line in lines if line.startswith("git config --global --add ")), "")
    if not remedy and "filesystem boundary" in message:
        remedy = "export GIT_DISCOVERY_ACROSS_FILESYSTEM=1"
    remedy = remedy or f"repair it, or remove {top / '.git'} if this is no repository any more"
    return GitRefuses.at(
        "project.root",
        what=f"git refuses the repository {top}: {why}",
        remedy=remedy,
        code="failed",
    )


def check(folder: Path) -> None:
    """Raises GitRefuses if `folder` is in a repository that git does not read."""
    if top_of(folder) is not None:
        output(folder, "rev-parse", "--git-dir")


def files(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """What a repository holds below `folder`: tracked files, also deleted ones, and those that git
    does not ignore. A submodule or a nested repository is one name that ends with "/".

    Returns:
        The names, relative to `folder`; and name and reason of each folder that git cannot read.

    Raises:
        GitRefuses: As `output`; also for a nested repository that git does not take for one.
    """
    arguments = ("ls-files", "-z", "--cached", "--others", "--exclude-standard")
    listed, warnings = _run(folder, *arguments)
    names = [name for name in dict.fromkeys(listed.split("\0")) if name]
    # A nested repository that git cannot read is listed file by file, also what it ignores itself.
    for within in sorted({within for name in names for within in above(name)}):
        if is_repository(folder / within):
            check(folder / within)
    named = [f"{name.rstrip('/')}/" if is_repository(folder / name) else name for name in names]
    return named, [(match[1], match[2]) for match in UNREADABLE.finditer(warnings)]


def ignored(folder: Path) -> list[str]:
    """Names of what git ignores below `folder`; of an ignored folder only its own, with a "/"."""
    top = top_of(folder) or folder
    here = folder.resolve()
    prefix = "" if here == top.resolve() else f"{here.relative_to(top.resolve()).as_posix()}/"
    state = output(
        folder,
        "status",
        "--porcelain",
        "-z",
        "--ignored=matching",
        "--untracked-files=all",
        "--ignore-submodules=all",
        "--",
        ".",
    )
    lines = (line for line in state.split("\0") if line.startswith("!! "))
    return [line.removeprefix("!! ").removeprefix(prefix) for line in lines]
