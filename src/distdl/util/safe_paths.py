"""Converts untrusted names (of blobs, objects, archive members) into paths below a folder."""

from __future__ import annotations

import itertools
import os
import re
import sys
import uuid
from collections.abc import Iterable
from pathlib import Path

LONGEST = 200  # bytes of one part of a path; systems allow 255, but temporary names are longer
# Files of a run that a remote store must not overwrite: its recipe, where its attempts run, and the
# handles of its jobs.
PROTECTED = re.compile(
    r"config\.yaml|provenance\.json|inputs/.*|attempts/\d+/(launch\.yaml|job\.json)"
)


def odd(name: str) -> str:
    """Why a name is not a valid path below a folder; "" if it is valid on every system."""
    parts = name.split("/")
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "is absolute"
    if ".." in parts:
        return "leads out of the folder"
    if "" in parts or "." in parts:
        return "has an empty part"
    if "\\" in name or any(ord(c) < 32 or ord(c) == 127 or "\ud800" <= c <= "\udfff" for c in name):
        return "has a character that file names should not have"
    if max(len(part.encode()) for part in parts) > LONGEST:
        return f"has a part longer than {LONGEST} bytes"
    return ""


def obstacle(folder: Path, name: str) -> str:
    """What blocks the path on this disk: a link, or a file instead of a folder; "" if none."""
    for path in (folder / part for part in (*above(name), name)):
        if path.is_symlink():
            return f"{path} is a link here"
        if path.exists() and path.is_dir() == (path == folder / name):
            return f"{path} is a {'folder' if path.is_dir() else 'file'} here"
    return ""


def local_paths(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """The local path of each file that a store lists, below a folder that may be absent. A name
    without a valid path is skipped, with a message."""
    names = list(dict.fromkeys(names))
    folders = {parent for name in names for parent in above(name)}
    seen: dict[str, str] = {}
    paths: dict[str, Path] = {}
    case_ignored = None  # whether the disk ignores case; tested only if it matters
    for name in names:
        why = odd(name) or obstacle(folder, name)
        if not why and name in folders:
            why = "is both a file and a folder in the store"
        if not why and (other := seen.setdefault(name.casefold(), name)) != name:
            case_ignored = ignores_case(folder) if case_ignored is None else case_ignored
            why = f"is {other!r} on this disk, which ignores case" if case_ignored else ""
        if why:
            print(f"left out   {name!a}: {why}", file=sys.stderr, flush=True)
        elif not (PROTECTED.fullmatch(name) and (folder / name).exists()):
            paths[name] = folder / name
    return paths


def above(name: str) -> list[str]:
    """`a` and `a/b` of `a/b/c`."""
    return [*itertools.accumulate(name.split("/")[:-1], lambda path, part: f"{path}/{part}")]


def ignores_case(folder: Path) -> bool:
    """Whether the folder's file system ignores case (macOS, Windows)."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".distdl-{uuid.uuid4().hex}"
    probe.touch()
    try:
        return os.path.exists(probe.with_name(probe.name.upper()))
    finally:
        probe.unlink()
