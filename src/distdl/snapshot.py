"""Which files leave this machine with a job: distdl as imported, and the user's own project.

Of a git repository the tracked files and the untracked ones that git does not ignore; elsewhere
every file that is neither hidden nor ignored. `.amlignore` (gitignore's syntax) takes away more, as
it does for Azure ML. Secrets stay: files that are made to hold one are left out, and a file that
holds the value of a secret variable of this shell is refused.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import distdl
from distdl.errors import Problem, UserError
from distdl.redact import secret_values

IGNORE_FILE = ".amlignore"
# Files that people keep secrets in. Their absence is told; nobody trains from them.
SECRET_FILE = re.compile(
    r"\.env(\..+)?|.*\.(pem|key|pfx|p12|kdbx|keystore|jks|ppk)|id_(rsa|dsa|ecdsa|ed25519).*|\.netrc"
    r"|_netrc|\.pypirc|\.npmrc|\.pgpass|\.git-credentials|credentials(\.json)?|secrets?\.(ya?ml|json)"
    r"|.*service[_-]?account.*\.json|kubeconfig",
    re.IGNORECASE,
)
EXAMPLE = re.compile(r".*[._-](example|sample|template|dist)$", re.IGNORECASE)
SEARCHED = 2 * 2**20  # bytes; larger files are data, not code
SKIPPED_FOLDERS = ("__pycache__", "node_modules")


@dataclass(frozen=True)
class Snapshot:
    """Files and where they go, below the bundle's `code/`."""

    files: tuple[tuple[Path, str], ...]
    left_out: tuple[str, ...]
    size: int  # bytes

    def describe(self) -> str:
        text = f"{self.size / 1e6:,.1f} MB in {len(self.files)} files"
        if self.left_out:
            shown = ", ".join(self.left_out[:5]) + (", ..." if len(self.left_out) > 5 else "")
            text += f" (left out, for they may hold secrets: {shown})"
        return text


def take(
    root: Path, exclude: Sequence[Path], limit_mb: float, secret_names: Sequence[str] = ()
) -> Snapshot:
    """Lists what a job gets; writes nothing.

    Args:
        root: The user's project.
        exclude: Folders below it that stay: where runs go.
        limit_mb: More than so many megabytes are refused.
        secret_names: Further variables whose values must not be in any file.

    Raises:
        UserError: It is too large, or a file holds a secret.
    """
    project: list[tuple[Path, str]] = []
    left_out: list[str] = []
    for path in project_files(root, exclude, limit_mb):
        name = path.relative_to(root).as_posix()
        if SECRET_FILE.fullmatch(path.name) and not EXAMPLE.fullmatch(path.name):
            left_out.append(name)
            continue
        project.append((path, f"project/{name}"))
    if size_of(project) > limit_mb * 1e6:
        raise too_large(root, project, limit_mb)
    refuse_secrets(project, secret_names)
    files = [(path, f"distdl/{name}") for path, name in own_files()] + project
    return Snapshot(tuple(files), tuple(left_out), size_of(files))


def size_of(files: Sequence[tuple[Path, str]]) -> int:
    return sum(path.stat().st_size for path, _ in files)


def own_files() -> Iterator[tuple[Path, str]]:
    """The files of distdl as it is imported here, named as in an installed package."""
    home = Path(distdl.__file__).parent
    places = [(home, "")]
    for folder in ("conf", "launchers"):  # beside src/ in a checkout, inside in a wheel
        if not (home / folder).is_dir():
            found = next(p for p in distdl.__path__ if (Path(p) / folder).is_dir())
            places.append((Path(found) / folder, f"{folder}/"))
    for place, prefix in places:
        for path in sorted(place.rglob("*")):
            if path.is_file() and not set(path.parts) & {*SKIPPED_FOLDERS}:
                yield path, prefix + path.relative_to(place).as_posix()


def project_files(root: Path, exclude: Sequence[Path], limit_mb: float) -> Iterator[Path]:
    import pathspec

    ignore = root / IGNORE_FILE
    lines = ignore.read_text().splitlines() if ignore.is_file() else []
    known = git_files(root)
    git_ignore = root / ".gitignore"
    if known is None and git_ignore.is_file():
        lines += git_ignore.read_text().splitlines()
    listed = list(known if known is not None else walked(root, limit_mb))
    exclude = [*exclude, *runs_among(listed)]
    ignored = pathspec.GitIgnoreSpec.from_lines(lines)
    for path in listed:
        inside = path.relative_to(root)
        stays = any(path.is_relative_to(folder) for folder in exclude)
        if stays or ignored.match_file(inside.as_posix()) or not path.is_file():
            continue  # git also lists what was deleted and not yet committed
        if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
            continue  # what lies outside the project is not the project
        yield path


def runs_among(files: Sequence[Path]) -> list[Path]:
    """Folders of runs, wherever they were once written: no code, and checkpoints are large."""
    configs = [path.parent for path in files if path.name == "config.yaml"]
    return [folder for folder in configs if (folder / "attempts").is_dir()]


def git_files(root: Path) -> list[Path] | None:
    """Tracked and untracked files, those of submodules too; None outside git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    try:
        done = subprocess.run(
            [*command, "--exclude-standard"], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    if done.returncode != 0:
        return None
    found: list[Path] = []
    for name in dict.fromkeys(done.stdout.split("\0")):
        path = root / name
        if name and path.is_dir() and not path.is_symlink():  # a submodule, or a clone in a clone
            found += git_files(path) or [] if (path / ".git").exists() else []
        elif name:
            found.append(path)
    return sorted(found)


def walked(root: Path, limit_mb: float) -> Iterator[Path]:
    """Every file that is not hidden. Ends early in a folder that is far too large (a home)."""
    size = 0
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            f
            for f in folders
            if not f.startswith(".")
            and f not in SKIPPED_FOLDERS
            and not (Path(folder) / f / "pyvenv.cfg").exists()
            and not (Path(folder) / f / "attempts").is_dir()
        )
        for name in sorted(names):
            path = Path(folder) / name
            if not name.startswith(".") or SECRET_FILE.fullmatch(name):
                size += path.stat().st_size if path.is_file() else 0
                yield path
        if size > 10 * limit_mb * 1e6:
            return


def too_large(root: Path, files: Sequence[tuple[Path, str]], limit_mb: float) -> UserError:
    sizes: dict[str, int] = {}
    for path, name in files:
        top = name.split("/")[1]
        sizes[top] = sizes.get(top, 0) + path.stat().st_size
    largest = sorted(sizes, key=lambda top: -sizes[top])[:3]
    shown = ", ".join(f"{top} {sizes[top] / 1e6:,.0f} MB" for top in largest)
    return UserError(
        Problem(
            "project.root",
            f"{root} has more than the {limit_mb:g} MB of code that a job takes along: {shown}",
            f"name what is no code in .gitignore or {IGNORE_FILE}, or set project.root",
        )
    )


def refuse_secrets(files: Sequence[tuple[Path, str]], names: Sequence[str]) -> None:
    secrets = {**secret_values(), **{n: v for n in names if (v := os.environ.get(n, ""))}}
    values = {name: value.encode() for name, value in secrets.items() if len(value) >= 8}
    problems = []
    for path, place in files:
        if not values or path.stat().st_size > SEARCHED:
            continue
        content = path.read_bytes()
        for name, value in values.items():
            if value in content:
                problems.append(
                    Problem(
                        place.removeprefix("project/"),
                        f"holds the value of ${name}, and would leave this machine with the job",
                        f"read it from the environment (launcher.forward_env=[{name}]), "
                        f"or name the file in {IGNORE_FILE}",
                    )
                )
    if problems:
        raise UserError(*problems)
