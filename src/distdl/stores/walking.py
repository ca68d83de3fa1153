"""Walks subfolders through links: each folder once, and for one class only."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from distdl.util.errors import UserError

# Device and inode of a folder: independent of the path or link that leads to it.
Identity = tuple[int, int]


def identity(folder: Path | str) -> Identity:
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino


def reraise(error: OSError) -> None:
    """An `onerror` for os.walk, which otherwise skips a folder that it cannot read."""
    raise error


def walk_once(
    top: Path, left_out: Container[Identity] = (), kind: Callable[[str], object] = lambda path: None
) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` through links, in the order of names, that enters each folder once.

    It enters neither the folders `left_out` nor a parent of `top`: a link to a parent leads back to
    `top`. A folder is entered once for each `kind` of its paths. Raises OSError if a folder cannot
    be read.
    """
    holders = set(map(identity, top.resolve().parents))
    seen = set[tuple[Identity, object]]()
    for inner, folders, names in os.walk(top, onerror=reraise, followlinks=True):
        this = identity(inner)
        if this in holders or this in left_out or (this, kind(inner)) in seen:
            folders.clear()
            continue
        seen.add((this, kind(inner)))
        folders.sort()
        yield inner, folders, names


def class_names(folder: Path) -> list[str]:
    """Names of the class folders, sorted: a class's index in the list is its label.

    Raises:
        OSError: The folder, or a link without an ending in it, leads nowhere: it may be a class.
    """
    names = []
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_symlink() and "." not in entry.name:
            os.stat(entry.path)
        if entry.is_dir():
            names.append(entry.name)
    return sorted(names)


class ClassFolders:
    """Walks the class folders of `root`'s splits; refuses a folder that belongs to two classes.

    `where` is the `path` of the Problem.
    """

    def __init__(self, root: Path, where: str) -> None:
        self.root = root
        self.where = where
        self._class: dict[Identity, tuple[str, str]] = {}

    def walk(self, split: Path, name: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """Like `walk_once` below `split/name`, but skips hidden folders and links to parents.

        Raises:
            UserError: A folder belongs to two classes, so its images would have two labels.
        """
        holders = (split, self.root, *split.resolve().parents, *self.root.resolve().parents)
        for inner, folders, names in walk_once(split / name, set(map(identity, holders))):
            known, path = self._class.setdefault(identity(inner), (name, inner))
            if known != name:
                raise UserError.at(
                    self.where,
                    what=(
                        f"{path} and {inner} are the same folder: its images would have two labels"
                    ),
                    remedy="remove the link",
                    code="ambiguous",
                )
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            yield inner, folders, names
