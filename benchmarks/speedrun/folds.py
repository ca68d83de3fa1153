"""Folds of the training photographs, as folders of links that `data.root` may name.

A fold holds a fifth of each class out. Choices between recipes are made on held-out folds, so that
the photographs of the final measure take part in no choice.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from distdl.util.digests import sha256_of

SPLITS = ("train", "val")
FOLDS = 5
# Which photographs are trained on (1,800) and which the records are measured on (2,000): names of
# fast.ai's imagenette, which are those of ImageNet.
LISTS = Path(__file__).with_name("photographs")

Listing = Mapping[str, list[Path]]


def add_photographs(parser: argparse.ArgumentParser) -> None:
    """The arguments that say where the photographs are, and which ones count."""
    where = "folders below which the photographs lie, each in a folder of its class"
    parser.allow_abbrev = False
    parser.add_argument("--photographs", type=Path, nargs="+", default=[], help=where)
    lists = "the folder of train.txt and val.txt"
    parser.add_argument("--lists", type=Path, default=LISTS, help=lists)


def require_photographs(args: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: No folder is given.
    """
    if not args.photographs:
        raise ValueError("--photographs says below which folders the photographs are")


def measured(lists: Path, roots: Sequence[Path]) -> dict[str, dict[str, list[Path]]]:
    """The photographs that a record is trained and measured on, by `train` and `val`.

    Raises:
        ValueError: As `found`.
    """
    return {split: found(lists / f"{split}.txt", roots) for split in SPLITS}


def of_the_records(splits: Mapping[str, str], file: Path = LISTS / "sha256.txt") -> bool:
    """Whether photographs with these digests are those of the records: `file` has the digest of
    each split."""
    lines = file.read_text(encoding="utf-8").splitlines()
    known = {split: digest for digest, split in (line.split() for line in lines)}
    return all(known[split] == digest for split, digest in splits.items())


def digests(splits: Mapping[str, Listing]) -> dict[str, str]:
    """By split, the sha256 of its photographs, each after its class and name, in their order. Reads
    all of them."""
    return {split: _digest(split, listing) for split, listing in splits.items()}


def _digest(split: str, listing: Listing) -> str:
    whole = hashlib.sha256()
    for name, files in sorted(listing.items()):
        for file in sorted(files, key=lambda file: file.name):
            whole.update(f"{split}/{name}/{file.name}\n{sha256_of(file)}\n".encode())
    return whole.hexdigest()


def together(splits: Mapping[str, str]) -> str:
    """One digest of those of all splits, for a result."""
    lines = (f"{splits[split]}  {split}\n" for split in SPLITS)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def listed(file: Path) -> dict[str, list[str]]:
    """The photographs of train.txt or val.txt, by class: a line is <class>/<name>.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        needed = "--lists names a folder that has train.txt and val.txt"
        raise ValueError(f"{file}: {why}; {needed}") from None
    names: dict[str, list[str]] = {}
    for line in text.splitlines():
        folder, _, name = line.partition("/")
        names.setdefault(folder, []).append(name)
    return names


def found(file: Path, roots: Iterable[Path]) -> dict[str, list[Path]]:
    """The photographs of a list, wherever they lie below `roots` in a folder named by their class.

    Raises:
        ValueError: A root is no folder, a photograph is missing, or two files of one class and
            name differ.
    """
    wanted = {(folder, name) for folder, names in listed(file).items() for name in names}
    places: dict[tuple[str, str], Path] = {}
    for root in roots:
        if not root.is_dir():
            raise ValueError(f"{root} is no folder")
        for inner, _, names in os.walk(root):
            folder = os.path.basename(inner)
            for name in names:
                if (folder, name) in wanted:
                    at = Path(inner, name)
                    first = places.setdefault((folder, name), at)
                    if first != at and first.read_bytes() != at.read_bytes():
                        raise ValueError(f"{first} and {at} differ: leave one of them out")
    missing = sorted("/".join(each) for each in wanted - places.keys())
    if missing:
        what = f"{len(missing)} of the {len(wanted)} photographs of {file}"
        raise ValueError(
            f"{what} are in none of the folders, first {missing[0]}; name each folder that has some"
        )
    listing: dict[str, list[Path]] = {}
    for each in sorted(places):
        listing.setdefault(each[0], []).append(places[each])
    return listing


def fold_of(listing: Listing, number: int) -> tuple[dict[str, list[Path]], dict[str, list[Path]]]:
    """What is trained on and what is held out; the same on every machine.

    A class's files are put in the order of the sha256 of their names, and every `FOLDS`-th of them,
    from `number` on, is held out.

    Args:
        number: From 0 to `FOLDS` - 1.

    Returns:
        The listings of both, by class.
    """
    train: dict[str, list[Path]] = {}
    held_out: dict[str, list[Path]] = {}
    for name, files in listing.items():
        order = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).hexdigest())
        held_out[name] = order[number::FOLDS]
        kept = set(held_out[name])
        train[name] = [file for file in order if file not in kept]
    return train, held_out


def link(root: Path, splits: Mapping[str, Listing]) -> Path:
    """Makes `root/<split>/<class>/` with a link to each photograph, or checks that it is there.

    Nothing is removed or replaced.

    Returns:
        `root`.

    Raises:
        ValueError: `root` holds something else, for instance another fold.
    """
    wanted = {
        root / split / name / file.name: file.resolve()
        for split, listing in splits.items()
        for name, files in listing.items()
        for file in files
    }
    for at, file in wanted.items():
        at.parent.mkdir(parents=True, exist_ok=True)
        if not at.is_symlink():
            if at.exists():
                raise ValueError(f"{at} is a file, not a link: remove or rename {root}")
            at.symlink_to(file)
        if at.readlink() != file:
            raise ValueError(f"{at} leads to {at.readlink()}, not to {file}: remove {root}")
    for at in root.rglob("*"):
        if not at.is_dir() and at not in wanted:
            raise ValueError(f"{at} does not belong there: remove or rename {root}")
    return root
