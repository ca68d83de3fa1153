"""Folders below a folder, through links: each once, and of one class only."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from pathlib import Path

from distdl.stores.files import raised
from distdl.util.errors import UserError

# Of a folder, whatever path or link leads to it: device and inode.
Identity = tuple[int, int]


def identity(folder: Path | str) -> Identity:
    stat = os.stat(folder)
    return stat.st_dev, stat.st_ino


def walk_once(
    top: Path,
    left_out: Container[Identity] = (),
    kind: Callable[[str], object] = lambda path: None,
) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` through links, in the order of names, which enters each folder once.

    It never enters a folder that holds `top`: a link to one leads back to `top`.

    Args:
        top: Where to begin.
        left_out: Other folders that are not entered.
        kind: What a folder's path says about what is in it: of each kind it is entered once.

    Raises:
        OSError: A folder cannot be read.
    """
    holders = set(map(identity, top.resolve().parents))
    seen = set[tuple[Identity, object]]()
    for inner, folders, names in os.walk(top, onerror=raised, followlinks=True):
        this = identity(inner)
        if this in holders or this in left_out or (this, kind(inner)) in seen:
            folders.clear()
            continue
        seen.add((this, kind(inner)))
        folders.sort()
        yield inner, folders, names


def class_names(folder: Path) -> list[str]:
    """Names of the class folders, sorted: a class's place in the list is its label."""
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.is_dir() and not entry.name.startswith(".")
    )


class ClassFolders:
    """The files below class folders, whose names are labels.

    Args:
        root: Holds the splits.
        where: The `path` of the Problem.
    """

    def __init__(self, root: Path, where: str) -> None:
        self.root, self.where = root, where
        self._class: dict[Identity, tuple[str, str]] = {}

    def walk(self, split: Path, name: str) -> Iterator[tuple[str, list[str], list[str]]]:
        """As `walk_once`, below `split/name`; not into hidden folders, nor into what holds it.

        Raises:
            UserError: A folder was of another class before: its images would have two labels.
            OSError: A folder cannot be read.
        """
        holders = (split, self.root, *split.resolve().parents, *self.root.resolve().parents)
        for inner, folders, names in walk_once(split / name, set(map(identity, holders))):
            known, path = self._class.setdefault(identity(inner), (name, inner))
            if known != name:
                what = f"{path} and {inner} are the same folder: its images would have two labels"
                raise UserError.at(self.where, what, "remove the link")
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            yield inner, folders, names
