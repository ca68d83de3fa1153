"""Which files leave this machine with a job: distdl as imported, and the user's own project.

In a git repository these are the tracked files and the untracked ones that git does not ignore.
Elsewhere they are all files that are neither hidden nor ignored. `.amlignore` (gitignore's syntax)
excludes more, as it does for Azure ML. Secrets stay here: a file that is meant for secrets, or in
which one is found, is left out and reported. If a module contains a secret, the job is refused,
since it could fail without that module.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import distdl
from distdl.config import own_code
from distdl.util.errors import Problem, UserError
from distdl.util.redact import looks_secret, secret_values
from distdl.util.secret_shapes import find

IGNORE_FILE = ".amlignore"
# Files in which people keep secrets. No training needs them. They are left out, and reported.
SECRET_FILE = re.compile(
    r".*\.env(\..+)?|\.envrc|.*\.(pem|key|pfx|p12|kdbx|keystore|jks|ppk)"
    r"|id_(rsa|dsa|ecdsa|ed25519).*|\.netrc|_netrc|\.pypirc|\.npmrc|\.pgpass|\.htpasswd|\.s3cfg|\.boto"
    r"|\.git-credentials|\.databrickscfg|\.dockercfg|\.vault-token|(.*[_-])?credentials(\.json)?"
    r"|kaggle\.json|client_secrets?.*\.json|secrets?\.(ya?ml|json|toml|ini)"
    r"|.*service[_-]?account.*\.json|kubeconfig|.*\.tfstate",
    re.IGNORECASE,
)
EXAMPLE = re.compile(r".*[._-](example|sample|template|dist)$", re.IGNORECASE)
# Bytes of a file that are searched at once, and bytes that overlap with the next piece.
PIECE, OVERLAP = 8 * 2**20, 2**16
SHOWN = 10  # of the files left out
SKIPPED_FOLDERS = ("__pycache__", "node_modules")


@dataclass(frozen=True)
class Snapshot:
    """Files and their names below the bundle's `code/`.

    Args:
        files: The path of each file here, and its name there.
        left_out: Name and reason of each file that stays because it may hold a secret, or is a link
            that leads out of the project.
        size: Bytes.
        searched: Size and modification time of each file when it was searched for secrets.
    """

    files: tuple[tuple[Path, str], ...]
    left_out: tuple[tuple[str, str], ...]
    size: int
    searched: Mapping[Path, tuple[int, int]]

    def describe(self) -> str:
        return f"{self.size / 1e6:,.1f} MB in {len(self.files)} files"

    def lines_left_out(self) -> list[str]:
        """Messages on what is left out, and how to send it anyway."""
        lines = [f"{name}: {why}" for name, why in self.left_out[:SHOWN]]
        if (more := len(self.left_out) - SHOWN) > 0:
            lines.append(f"and {more} more")
        for name, _ in self.left_out[:1]:
            lines.append(f"(to send one anyway, name it in {IGNORE_FILE}: !{name})")
        return lines

    def refuse_changed(self, path: Path, name: str) -> None:
        """Raises a UserError if a file, just copied, was changed after it was searched."""
        if state_of(path) != self.searched[path]:
            what = "was changed while the job was being prepared"
            raise UserError.at(name.partition("/")[2], what, "start the job again")


def take(
    root: Path, exclude: Sequence[Path], limit_mb: float, secret_names: Sequence[str] = ()
) -> Snapshot:
    """Lists what a job gets; writes nothing.

    Args:
        root: The user's project.
        exclude: Folders below it that are left out: where runs are written.
        secret_names: Further variables whose values must not be in any file.

    Raises:
        UserError: The snapshot is too large, a file cannot be read, or a module holds a secret.
    """
    project = project_files(root, exclude, limit_mb)
    candidates = [(path, f"project/{path.relative_to(root).as_posix()}") for path in project]
    candidates += metadata_of(root)
    links = (path for path, _ in candidates if path.is_symlink())
    outside = {path for path in links if not path.resolve().is_relative_to(root.resolve())}
    refuse_large(root, [pair for pair in candidates if pair[0] not in outside], limit_mb)
    secrets = {**secret_values(), **{n: v for n in secret_names if (v := os.environ.get(n, ""))}}
    values = tuple((name, os.fsencode(v)) for name, v in secrets.items() if len(v) >= 8)
    # Files named one by one are sent whatever they hold. A pattern does not count: `!*.py` after
    # `*` only says where the code is.
    negated = (line[1:].strip() for line in lines_of(root / IGNORE_FILE) if line.startswith("!"))
    anyway = {name.lstrip("/") for name in negated}
    files: list[tuple[Path, str]] = []
    left_out: list[tuple[str, str]] = []
    problems: list[Problem] = []
    searched: dict[Path, tuple[int, int]] = {}
    for path, target in [*((path, f"distdl/{name}") for path, name in distdl_files()), *candidates]:
        name = target.removeprefix("project/")
        shown = name if name.isprintable() else ascii(name)
        try:
            if path in outside:
                why = "is a link that leads out of the project"
            else:
                searched[path] = state_of(path)
                # distdl's own code may contain a weak value (DB_PASSWORD=password) as a word.
                known = values if target.startswith("project/") else ()
                why = "" if name in anyway else secret_in(path, searched[path], known)
        except OSError as error:
            remedy = f"name it in {IGNORE_FILE}"
            problems.append(Problem(shown, f"cannot be read: {error.strerror}", remedy))
            continue
        if not why:
            files.append((path, target))
        elif is_module(path, name) and path not in outside:
            problems.append(secret_problem(shown, why))
        else:
            left_out.append((shown, why))
    if problems:
        raise UserError(*problems)
    return Snapshot(tuple(files), tuple(left_out), size_of(files), searched)


def state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def lines_of(path: Path) -> list[str]:
    """The lines of an ignore file; none if there is no file."""
    if not path.is_file():
        return []
    return path.read_text(encoding="utf-8-sig", errors="replace").splitlines()


def is_module(path: Path, name: str) -> bool:
    """Whether the job may import it. Secrets in tests are examples, and no job imports tests."""
    test = re.fullmatch(r"test_.*|.*_test\.py|conftest\.py", path.name)
    return path.suffix == ".py" and not (test or {"test", "tests"} & {*name.split("/")[:-1]})


@functools.cache  # the members of a sweep share a project
def secret_in(path: Path, state: tuple[int, int], values: tuple[tuple[str, bytes], ...]) -> str:
    """Why a file must stay here, by its name or its contents; "" if it may leave.

    Args:
        state: As from `state_of`: a changed file is searched again.
        values: Name and value of variables that are secret.
    """
    if path.suffix != ".py" and not EXAMPLE.fullmatch(path.name):
        plain = path.suffix in ("", ".txt") and looks_secret(path.stem)
        if SECRET_FILE.fullmatch(path.name) or plain:
            return "is a file for secrets, by its name"
    lines_of_kinds: dict[str, int] = {}
    lines, before = 0, b""
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            content = before + piece
            kinds = [*find(content)]
            for variable, value in values:
                if (start := content.find(value)) >= 0:
                    kinds.append((content.count(b"\n", 0, start) + 1, f"the value of ${variable}"))
            for line, kind in kinds:
                lines_of_kinds.setdefault(kind, lines + line)
            before = content[-OVERLAP:]
            lines += content.count(b"\n", 0, len(content) - len(before))
    in_order = sorted(lines_of_kinds.items(), key=lambda item: item[1])
    return ", ".join(f"line {line} holds {kind}" for kind, line in in_order)


def secret_problem(name: str, why: str) -> Problem:
    variable = match[1] if (match := re.search(r"\$(\w+)$", why)) else "NAME"
    return Problem(
        name,
        f"{why}, and would leave this machine with the job",
        f"read it from the environment (launcher.forward_env=[{variable}]); or write a line into "
        f"{IGNORE_FILE}: {name} leaves the file out, !{name} sends it anyway",
    )


def size_of(files: Sequence[tuple[Path, str]]) -> int:
    return sum(path.stat().st_size for path, _ in files)


def distdl_files() -> Iterator[tuple[Path, str]]:
    """The files of distdl as it is imported here, named as in an installed package."""
    home = Path(distdl.__file__).parent
    folders = [(home, "")]
    for name in ("conf", "launchers"):  # beside src/ in a checkout, inside distdl/ in a wheel
        if not (home / name).is_dir():
            folder = next(p for p in (Path(p) / name for p in distdl.__path__) if p.is_dir())
            folders.append((folder, f"{name}/"))
    for folder, prefix in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not set(path.parts) & {*SKIPPED_FOLDERS}:
                yield path, prefix + path.relative_to(folder).as_posix()


def metadata_of(root: Path) -> Iterator[tuple[Path, str]]:
    """The metadata of packages that are installed from this project in editable mode: many packages
    read their own version while they are imported (importlib.metadata)."""
    for package, folder in own_code.editable():
        if folder.is_relative_to(root.resolve()):
            for file in package.files or ():
                if file.name in ("METADATA", "entry_points.txt"):
                    yield Path(str(file.locate())), f"project/{file.parent.name}/{file.name}"


def project_files(root: Path, exclude: Sequence[Path], limit_mb: float) -> Iterator[Path]:
    import pathspec

    lines, listed = lines_of(root / IGNORE_FILE), git_files(root)
    if listed is None:
        lines += lines_of(root / ".gitignore")
        listed = list(walked(root, limit_mb))
    # Runs, wherever they were written, hold no code, and checkpoints are large.
    configs = [path.parent for path in listed if path.name == "config.yaml"]
    exclude = [*exclude, *(folder for folder in configs if (folder / "attempts").is_dir())]
    ignored = pathspec.GitIgnoreSpec.from_lines(lines)
    for path in listed:
        stays = any(path.is_relative_to(folder) for folder in exclude)
        stays = stays or ignored.match_file(path.relative_to(root).as_posix())
        if not stays and path.is_file():  # git also lists deleted, uncommitted files
            yield path


def git_files(root: Path) -> list[Path] | None:
    """Tracked and untracked files, including those of submodules; None outside git."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    try:
        done = subprocess.run([*command, "--exclude-standard"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    files: list[Path] = []
    for name in dict.fromkeys(os.fsdecode(done.stdout).split("\0")):
        path = root / name
        if name and path.is_dir() and not path.is_symlink():  # a submodule or a nested clone
            files += git_files(path) or [] if (path / ".git").exists() else []
        elif name:
            files.append(path)
    return sorted(files)


def walked(root: Path, limit_mb: float) -> Iterator[Path]:
    """Every file that is not hidden. It stops early in a folder that is far too large (a home)."""
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


def refuse_large(root: Path, files: Sequence[tuple[Path, str]], limit_mb: float) -> None:
    if size_of(files) <= limit_mb * 1e6:
        return
    sizes = Counter[str]()
    for path, name in files:
        sizes[name.split("/")[1]] += path.stat().st_size
    shown = ", ".join(f"{top} {size / 1e6:,.0f} MB" for top, size in sizes.most_common(3))
    raise UserError.at(
        "project.root",
        f"{root} has more than the {limit_mb:g} MB of code that a job may send: {shown}",
        f"list files other than code in .gitignore or {IGNORE_FILE}, or set project.root",
    )
