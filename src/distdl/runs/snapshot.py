"""Which files leave this machine with a job: distdl as imported, and the user's own project.

`distdl.runs.project` lists the project: in a git repository the tracked files and the
untracked ones that git does not ignore, elsewhere all files that are neither hidden nor ignored.
`.amlignore` (gitignore's syntax) excludes more, as it does for Azure ML. Secrets stay here: a file
that is meant for secrets, or in which one is found, is left out and reported. A job that could fail
is refused: a module holds a secret, or was imported here and is left out.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import distdl
from distdl.config import own_code
from distdl.runs.project import (
    IGNORE_FILE,
    NEVER_SENT,
    OUTSIDE,
    SKIPPED_FOLDERS,
    Listing,
    listing,
)
from distdl.util import archives, secret_free, secret_search
from distdl.util.errors import Problem, UserError
from distdl.util.redact import secret_values
from distdl.util.safe_paths import above
from distdl.util.secret_names import looks_secret

# Files in which people keep secrets. No training needs them. They are left out, and reported.
SECRET_FILE = re.compile(
    r".*\.env(\..+)?|\.envrc|.*\.(pem|key|pfx|p12|kdbx|keystore|jks|ppk)"
    r"|id_(rsa|dsa|ecdsa|ed25519).*|\.netrc|_netrc|\.pypirc|\.npmrc|\.pgpass|\.htpasswd|\.s3cfg|\.boto"
    r"|\.git-credentials|\.databrickscfg|\.dockercfg|\.vault-token|(.*[_-])?credentials(\.json)?"
    r"|kaggle\.json|(chap|pap)-secrets|ipsec\.secrets|sasl_passwd|logins\.json|key[34]\.db|client_secrets?.*\.json|secrets?\.(ya?ml|json|toml|ini)"
    r"|.*service[_-]?account.*\.json|kubeconfig|.*\.tfstate",
    re.IGNORECASE,
)
EXAMPLE = re.compile(r".*[._-](example|sample|template|dist)$", re.IGNORECASE)
# Bytes of a file that are searched at once, and bytes that overlap with the next piece.
PIECE = 8 * 2**20
OVERLAP = 2**16
SHOWN = 10  # of the files left out
SHOWN_IGNORED = 5  # of the ignored ones


@dataclass(frozen=True)
class Snapshot:
    """Files and their names below the bundle's `code/`.

    Args:
        files: The path of each file here, and its name there.
        left_out: Name and reason of each file that stays because it may hold a secret, or that
            cannot travel as it is: a link that leads out of the project.
        ignored: Names of what git ignores, and outside git also of what is hidden.
        size: Bytes.
        searched: Size and modification time of each file when it was searched for secrets.
    """

    files: tuple[tuple[Path, str], ...]
    left_out: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]
    size: int
    searched: Mapping[Path, tuple[int, int]]

    def describe(self) -> str:
        return f"{self.size / 1e6:,.1f} MB in {len(self.files)} files"

    def lines_left_out(self) -> list[str]:
        """Messages on what is left out, and how to send it anyway."""
        lines = [f"{name}: {why}" for name, why in self.left_out[:SHOWN]]
        more = len(self.left_out) - SHOWN
        if more > 0:
            lines.append(f"and {more} more")
        if self.ignored:
            lines.append(f"ignored by git, or hidden: {in_short(self.ignored)}")
        names = [name for name, why in self.left_out if why not in NEVER_SENT]
        names += self.ignored
        for name in [name for name in names if not name.endswith("/")][:1]:
            lines.append(f"(to send one anyway, name it in {IGNORE_FILE}: !{name})")
        return lines

    def refuse_changed(self, path: Path, name: str) -> None:
        """Raises a UserError if a file, just copied, was changed after it was searched."""
        if state_of(path) != self.searched[path]:
            raise UserError.at(
                name.partition("/")[2],
                what="was changed while the job was being prepared",
                remedy="start the job again",
                code="mismatch",
            )


def in_short(names: Sequence[str]) -> str:
    more = f", and {len(names) - SHOWN_IGNORED} more"
    shown = ", ".join(map(printable, names[:SHOWN_IGNORED]))
    return shown + (more if len(names) > SHOWN_IGNORED else "")


def printable(name: str) -> str:
    return name if name.isprintable() else ascii(name)


def take(
    root: Path,
    exclude: Sequence[Path],
    limit_mb: float,
    secret_names: Sequence[str] = (),
    imported: Iterable[str] = (),
    started: Iterable[str] = (),
) -> Snapshot:
    """Lists what a job gets; writes nothing.

    Args:
        root: The user's project.
        exclude: Folders below it that are left out: where runs are written.
        secret_names: Further variables whose values must not be in any file.
        imported: Files of the modules that the config's targets import here.
        started: Files that the command of a program starts.

    Raises:
        UserError: The snapshot is too large, git or the system refuses to read something, a module
            holds a secret, or what the job imports or starts would not be sent.
    """
    root = root.resolve()
    started = {*started}
    project = listing(root, exclude)
    candidates = [(root / name, f"project/{name}") for name in project.names]
    candidates += metadata_of(root)
    refuse_large(root, candidates, limit_mb)
    secrets = dict(secret_values())
    for name in secret_names:
        if value := os.environ.get(name, ""):
            secrets[name] = value
    values = tuple((name, os.fsencode(v)) for name, v in secrets.items() if len(v) >= 8)
    files: list[tuple[Path, str]] = []
    left_out = [(printable(name), why) for name, why in project.left_out]
    problems: list[Problem] = []
    searched: dict[Path, tuple[int, int]] = {}
    for path, target in [*((path, f"distdl/{name}") for path, name in distdl_files()), *candidates]:
        name = target.removeprefix("project/")
        shown = printable(name)
        try:
            searched[path] = state_of(path)
            # distdl's own code may contain a weak value (DB_PASSWORD=password) as a word.
            known = values if target.startswith("project/") else ()
            why = "" if name in project.chosen else secret_in(path, searched[path], known)
        except OSError as error:
            problems.append(
                Problem(
                    shown,
                    what=f"cannot be read: {error.strerror}",
                    remedy=f"name it in {IGNORE_FILE}",
                    code="unreadable",
                )
            )
            continue
        if not why:
            files.append((path, target))
        elif is_module(path, name) or str(path) in started:
            problems.append(secret_problem(shown, why))
        else:
            left_out.append((shown, why))
    problems += missing(root, project, imported, "is imported here")
    problems += missing(root, project, started, "is what the command starts")
    if problems:
        raise UserError(*problems)
    # os.path.exists is False of a link to nothing.
    ignored = tuple(
        name for name in project.ignored if not is_clutter(name) and os.path.exists(root / name)
    )
    return Snapshot(tuple(files), tuple(left_out), ignored, size_of(files), searched)


def is_clutter(name: str) -> bool:
    """Whether nobody wonders why an ignored file or folder is not sent: caches, packages' data."""
    last = name.rstrip("/").rpartition("/")[2]
    cache = last in SKIPPED_FOLDERS or last.startswith(".") or last.endswith((".egg-info", ".pyc"))
    return cache and not SECRET_FILE.fullmatch(last)


def missing(root: Path, project: Listing, files: Iterable[str], needed: str) -> list[Problem]:
    """Files that the job needs and that are not sent, unless .amlignore names them one by one.
    `needed` says for what."""
    sent = {*project.names, *project.refused}
    below = [Path(file).relative_to(root) for file in files if Path(file).is_relative_to(root)]
    names = sorted({path.as_posix() for path in below} - sent)
    problems = [missing_problem(project, name, needed) for name in names[:SHOWN]]
    more = len(names) - SHOWN
    if more > 0:
        problems.append(
            Problem(
                "",
                what=f"and {more} more modules are imported here and not sent",
                code="incomplete",
            )
        )
    return problems


def missing_problem(project: Listing, name: str, needed: str) -> Problem:
    folders = above(name)
    reasons = dict(project.left_out)
    links = (folder for folder in folders if folder in reasons)
    ignored = {name, *(f"{folder}/" for folder in folders)} & {*project.ignored}
    excluded = {name, *folders} & project.excluded
    why = f"{IGNORE_FILE} leaves it out"
    if excluded:
        why = f"runs are written to {min(excluded)}"
    if ignored:
        why = f"git ignores {min(ignored)}"
    remedy = f"write a line into {IGNORE_FILE}: !{name} sends it, {name} says that no job needs it"
    for link in links:
        why = f"{link} {reasons[link]}"
        if reasons[link] == OUTSIDE:
            remedy = (
                "choose a project.root that contains both, or pip install it here and on the nodes "
                f"and remove the link; or write a line into {IGNORE_FILE}: !{link} sends all of it"
            )
    return Problem(
        printable(name),
        what=f"{needed}, and the job would be without it: {why}",
        remedy=printable(remedy),
        code="incomplete",
    )


def state_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


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
    named = path.suffix != ".py" and is_for_secrets(path.name)
    with path.open("rb") as file:
        if named and not secret_free.shows_no_secret(file.read(secret_free.SMALL + 1), path.name):
            return "is a file for secrets, by its name"
        file.seek(0)
        start = file.read(512)
        file.seek(0)
        if why := secret_within(pieces_of(file), path.name, values):
            return why
    return secret_in_archive(path, values) if archives.is_archive(start) else ""


def is_for_secrets(name: str) -> bool:
    if EXAMPLE.fullmatch(name) or name.endswith(".pub"):
        return False
    stem, _, ending = name.rpartition(".")
    plain = looks_secret(name) if not stem else ending == "txt" and looks_secret(stem)
    return plain or SECRET_FILE.fullmatch(name) is not None


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


def secret_within(pieces: Iterable[bytes], name: str, values: tuple[tuple[str, bytes], ...]) -> str:
    """Why a file with these contents must stay here; "" if it may leave."""
    lines_of_kinds: dict[str, int] = {}
    lines = 0
    before = b""
    for piece in pieces:
        content = before + piece
        kinds = [*secret_search.search(content, name)]
        for variable, value in values:
            start = content.find(value)
            if start >= 0:
                kinds.append((content.count(b"\n", 0, start) + 1, f"the value of ${variable}"))
        for line, kind in kinds:
            lines_of_kinds.setdefault(kind, lines + line)
        before = content[-OVERLAP:]
        lines += content.count(b"\n", 0, len(content) - len(before))
    in_order = sorted(lines_of_kinds.items(), key=lambda item: item[1])
    return ", ".join(f"line {line} holds {kind}" for kind, line in in_order)


def secret_in_archive(path: Path, values: tuple[tuple[str, bytes], ...]) -> str:
    """As `secret_in`, for the files in an archive. Archives in it are not opened."""
    try:
        for name, pieces in itertools.groupby(archives.members(path), key=lambda item: item[0]):
            last = name.rpartition("/")[2]
            why = secret_within((piece for _, piece in pieces), last or path.stem, values)
            if name and not why and is_for_secrets(last):
                why = "is a file for secrets, by its name"
            if why:
                return f"{printable(name)} in it: {why}" if name else f"unpacked, {why}"
    except archives.Unsearched as unsearched:
        return f"is an archive that was not searched: {unsearched}"
    return ""


def secret_problem(name: str, why: str) -> Problem:
    match = re.search(r"\$(\w+)$", why)
    variable = match[1] if match else "NAME"
    return Problem(
        name,
        what=f"{why}, and would leave this machine with the job",
        remedy=(
            f"read it from the environment (launcher.forward_env=[{variable}]); or write a line "
            f"into {IGNORE_FILE}: {name} leaves the file out, !{name} sends it anyway"
        ),
        code="private",
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


def refuse_large(root: Path, files: Sequence[tuple[Path, str]], limit_mb: float) -> None:
    if size_of(files) <= limit_mb * 1e6:
        return
    sizes = Counter[str]()
    for path, name in files:
        sizes[name.split("/")[1]] += path.stat().st_size
    shown = ", ".join(f"{top} {size / 1e6:,.0f} MB" for top, size in sizes.most_common(3))
    raise UserError.at(
        "project.root",
        what=f"{root} has more than the {limit_mb:g} MB of code that a job may send: {shown}",
        remedy=f"list files other than code in .gitignore or {IGNORE_FILE}, or set project.root",
        code="not-enough",
    )
