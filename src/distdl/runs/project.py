"""Which files are the user's project: what git would keep, what `.amlignore` adds and leaves out.

What git, a link, a permission or an ignore file withholds is returned with its reason. Nothing is
read except ignore files, and no file leaves the project through a link.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from distdl.runs import git
from distdl.util.errors import Problem, UserError
from distdl.util.safe_paths import above

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

IGNORE_FILE = ".amlignore"
SKIPPED_FOLDERS = ("__pycache__", "node_modules")
OUTSIDE = "is a link that leads out of the project"
NO_FILE = "is no regular file"
TO_NOTHING = "is a link to nothing"
AROUND = "is a link to a folder that it is in"
# No line of .amlignore sends these.
NEVER_SENT = (NO_FILE, TO_NOTHING, AROUND)


@dataclass
class Listing:
    """Names are below the project, with "/".

    Args:
        names: The files that travel; a file in a linked folder has a name through the link.
        left_out: Name and reason of what stays although the user may expect it on the nodes.
        ignored: What git or a `.gitignore` ignores, and outside git what is hidden; a folder's name
            ends with "/".
        chosen: Files and links that `.amlignore` names one by one to be sent (`!name`).
        refused: Files that `.amlignore` names one by one to be left out.
        excluded: Files and folders that the caller leaves out.
    """

    names: list[str] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    chosen: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()


def lines_of(path: Path) -> list[str]:
    """The lines of an ignore file; none if there is no file. Raises a UserError if it cannot be
    read: what it ignores would be sent."""
    if not path.is_file():
        return []
    try:
        return path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise UserError.at(
            str(path),
            what=f"cannot be read: {error.strerror}",
            remedy="it says what must not be sent",
            code="unreadable",
        ) from error


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run, which holds no code, and large checkpoints."""
    return os.path.isfile(folder / "config.yaml") and os.path.isdir(folder / "attempts")


def is_written_by_distdl(folder: Path) -> bool:
    """Whether it is the folder of a run, a job's bundle (`distdl.runs.bundle`), or of a dry run's
    files beside one. A bundle has a copy of the project: each job would take all earlier ones."""
    return is_run(folder) or is_bundle(folder) or is_bundle(folder / "bundle")


def is_bundle(folder: Path) -> bool:
    files = ("config.yaml", "launch.yaml", "provenance.json")
    has_code = os.path.isdir(folder / "code/distdl")
    return has_code and all(os.path.isfile(folder / name) for name in files)


def listing(root: Path, exclude: Sequence[Path]) -> Listing:
    """Lists the project.

    Args:
        root: Its folder, resolved.
        exclude: Folders below it that are left out.

    Raises:
        UserError: git refuses a repository, or a folder cannot be read.
    """
    return _Lister(root, exclude).list()


class _Lister:
    def __init__(self, root: Path, exclude: Sequence[Path]) -> None:
        import pathspec

        self.root = root
        self.exclude = exclude
        lines = [line.strip() for line in lines_of(root / IGNORE_FILE)]
        self.amlignore: GitIgnoreSpec = pathspec.GitIgnoreSpec.from_lines(lines)
        # Only an exact name counts: `!*.py` after `*` only says where the code is.
        chosen = frozenset(line[1:].lstrip("/") for line in lines if line.startswith("!"))
        refused = frozenset(line.lstrip("/") for line in lines) - {""}
        below = (folder for folder in exclude if folder.is_relative_to(root))
        excluded = frozenset(folder.relative_to(root).as_posix() for folder in below)
        self.found = Listing(chosen=chosen, refused=refused, excluded=excluded)
        self.files: Sequence[str] = ()  # and links, of which the project consists
        self.links: Sequence[str] = ()

    def list(self) -> Listing:
        entries = {*self.inside(self.root, "")}
        entries |= {name for name in self.found.chosen if self.is_there(name)}
        folders = {folder for name in entries for folder in above(name)}
        ours = {folder for folder in folders if is_written_by_distdl(self.root / folder)}
        # git's list has files in folders that have become links since they were added.
        moved = {folder for folder in folders if (self.root / folder).is_symlink()} - entries
        self.leave_out((folder, "is a link that git does not know") for folder in sorted(moved))
        entries = {name for name in entries if not (ours | moved | entries) & {*above(name)}}
        self.links = sorted(name for name in entries if (self.root / name).is_symlink())
        self.files = sorted(filter(self.is_file, entries.difference(self.links)))
        through_links = {name for link in self.links for name in self.linked(link, link)}
        self.found.names = sorted({*self.files, *through_links})
        self.found.left_out = sorted({*self.found.left_out})
        return self.found

    def leave_out(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.found.left_out.extend(pairs)

    def stays(self, name: str) -> bool:
        """Whether it is left out on purpose."""
        path = self.root / name
        excluded = any(path.is_relative_to(folder) for folder in self.exclude)
        return excluded or self.amlignore.match_file(name)

    def is_there(self, name: str) -> bool:
        """Whether a name in .amlignore is that of a file or a link, which git may ignore."""
        path = self.root / name
        exists = path.is_file() or path.is_symlink()
        return exists and ".." not in path.parts and not self.amlignore.match_file(name)

    def is_file(self, name: str) -> bool:
        """Whether it can be sent. git also lists deleted files."""
        path = self.root / name
        if path.exists() and not path.is_file():
            self.leave_out([(name, NO_FILE)])
        return path.is_file()

    def inside(self, folder: Path, prefix: str) -> Iterator[str]:
        """Names of the files and links in a folder; `prefix` is its own name with a "/"."""
        if git.top_of(folder) is None:
            yield from self.walked(folder, prefix, [])
            return
        names, unreadable = git.files(folder)
        self.refuse_unreadable([(prefix + name, why) for name, why in unreadable])
        self.found.ignored += [prefix + name for name in git.ignored(folder)]
        for name in names:
            if self.stays(prefix + name):
                continue
            if name.endswith("/"):
                yield from self.inside(folder / name, prefix + name)
            else:
                yield prefix + name

    def walked(
        self, folder: Path, prefix: str, ignores: Sequence[tuple[str, GitIgnoreSpec]]
    ) -> Iterator[str]:
        """As `inside`, outside git: what is neither hidden nor in a `.gitignore` on the way."""
        import pathspec

        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError as error:
            self.refuse_unreadable([(prefix.rstrip("/"), str(error.strerror))])
            return
        own = pathspec.GitIgnoreSpec.from_lines(lines_of(folder / ".gitignore"))
        ignores = [*ignores, (prefix, own)]
        for entry in entries:
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            name = f"{prefix}{entry.name}{'/' if is_folder else ''}"
            if self.stays(name) or (is_folder and is_no_code(path)):
                continue
            ignored = any(spec.match_file(name.removeprefix(at)) for at, spec in ignores)
            if ignored or entry.name.startswith("."):
                self.found.ignored.append(name)
            elif not is_folder:
                yield name
            elif git.is_repository(path):
                yield from self.inside(path, name)
            else:
                yield from self.walked(path, name, ignores)

    def refuse_unreadable(self, folders: Iterable[tuple[str, str]]) -> None:
        remedy = f"name it in {IGNORE_FILE}"
        problems = [
            Problem(name, what=f"cannot be read: {why}", remedy=remedy, code="unreadable")
            for name, why in folders
            if not self.stays(f"{name}/")
        ]
        if problems:
            raise UserError(*problems)

    def linked(self, link: str, name: str, around: Sequence[Path] = ()) -> Iterator[str]:
        """Names of what travels because of a link.

        Args:
            link: Its name.
            name: Its name through other links, if it is in a linked folder.
            around: What the links lead to through which it was reached.
        """
        try:
            target = (self.root / link).resolve(strict=True)
        except (OSError, RuntimeError):  # RuntimeError: a link to itself
            self.leave_out([(name, TO_NOTHING)])
            return
        if not target.is_relative_to(self.root):
            yield from self.from_outside(link, name, target)
            return
        at = target.relative_to(self.root).as_posix()
        below = f"{at}/"
        if target in around or (self.root / link).parent.is_relative_to(target):
            self.leave_out([(name, AROUND)])
            return
        names = [
            name + each[len(at) :] for each in self.files if each == at or each.startswith(below)
        ]
        for inner in self.links:
            if inner.startswith(below):
                names += self.linked(inner, name + inner[len(at) :], [*around, target])
        if not names:
            self.leave_out([(name, f"is a link to {at}, which is not sent")])
        yield from (each for each in names if not self.stays(each))

    def from_outside(self, link: str, name: str, target: Path) -> Iterator[str]:
        """Names of what is outside the project, which is sent only if .amlignore names the link."""
        if link not in self.found.chosen:
            self.leave_out([(name, OUTSIDE)])
        elif target.is_file():
            yield name
        else:
            for each in self.inside(target, f"{name}/"):
                if (self.root / each).is_symlink():
                    self.leave_out([(each, "is a link in a folder outside the project")])
                elif self.is_file(each):
                    yield each


def is_no_code(folder: Path) -> bool:
    """Whether a folder holds what nobody wants on the nodes: an environment, a run, a bundle of an
    earlier job, caches."""
    environment = os.path.exists(folder / "pyvenv.cfg")
    return folder.name in SKIPPED_FOLDERS or environment or is_written_by_distdl(folder)
