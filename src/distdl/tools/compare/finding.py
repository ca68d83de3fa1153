"""The runs that a user named: folders of runs or of sweeps, here or in a store."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from distdl.launch.jobs import runs_below
from distdl.runs.directory import shown
from distdl.runs.records import find_run
from distdl.stores import Store, StoreError, is_remote, open_store
from distdl.util.answering import refuse_silent
from distdl.util.errors import UserError
from distdl.util.safe_paths import local_paths

# What a comparison reads of a run, which may be a member of a sweep. No checkpoint is fetched.
READ = re.compile(
    r"([^/]+/){0,3}(config\.yaml|provenance\.json|attempts/\d+/(launch\.yaml|status\.json)"
    r"|logs/metrics[\w-]*\.jsonl|checkpoints/best\.ckpt\.manifest\.json)"
)
MOST_BYTES = 1 << 28  # of one of these files in a store
LEAST = 2  # runs of a comparison


@dataclass(frozen=True)
class FoundRun:
    """A run, and its name as the user would type it."""

    name: str
    path: Path


@contextmanager
def found(names: Sequence[str]) -> Iterator[list[FoundRun]]:
    """The runs of all names, each once. What is read of a run in a store lies in a temporary
    folder, which is removed at the end.

    Raises:
        UserError: A name is no run and holds none, its store does not answer, or there is only one
            run.
    """
    with ExitStack() as stack:
        runs: dict[Path, FoundRun] = {}
        for name in names:
            if is_remote(name):
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="distdl-compare-")))
                listed = _in_store(name, folder)
            else:
                listed = _here(name)
            for run in listed:
                runs.setdefault(run.path.resolve(), run)
        if len(runs) < LEAST:
            only = next(iter(runs.values()))
            remedy = "name another run as well"
            if not is_remote(only.name):
                remedy += f"; the page of one run: python -m distdl report {only.name}"
            raise UserError.at(
                only.name,
                what="is one run: there is nothing to compare it with",
                remedy=remedy,
                code="incomplete",
            )
        yield list(runs.values())


def of_one_sweep(names: Sequence[str]) -> Path | None:
    """The folder of the only sweep that is named; None: runs are named, or several sweeps."""
    first, *others = names
    folder = Path(first).expanduser()
    is_sweep = not others and not is_remote(first) and not (folder / "config.yaml").exists()
    return folder if is_sweep else None


def _here(name: str) -> list[FoundRun]:
    folder = Path(name).expanduser()
    refuse_silent(folder)
    is_run = (folder / "config.yaml").is_file()
    below = [] if is_run or not folder.is_dir() else runs_below(folder)
    if below:
        return [FoundRun(shown(run.path), run.path) for run in reversed(below)]
    run = find_run(name)
    return [FoundRun(shown(run.absolute()), run)]


def _in_store(uri: str, folder: Path) -> list[FoundRun]:
    """The runs at an address, after their small files are fetched into the folder."""
    store = open_store(uri, patience=20.0)
    try:
        paths = local_paths(folder, filter(READ.fullmatch, store.names()))
        for name, path in paths.items():
            _fetch(store, name, path)
    except StoreError as error:
        raise UserError.at(
            store.uri, what=str(error), remedy=error.remedy, code=error.code
        ) from None
    runs = sorted(path.parent for path in folder.glob("**/config.yaml"))
    if not runs:
        raise UserError.at(
            store.uri,
            what="holds no config.yaml of a run",
            remedy="name the folder of a run, or of a sweep",
            code="not-found",
        )
    address = store.uri.rstrip("/")
    within = {run: run.relative_to(folder).as_posix() for run in runs}
    return [FoundRun(f"{address}/{within[run]}".removesuffix("/."), run) for run in runs]


def _fetch(store: Store, name: str, path: Path) -> None:
    size = store.size(name)
    if size is not None and size > MOST_BYTES:
        raise UserError.at(
            f"{store.uri}/{name}",
            what=f"has {size:,} bytes, and {MOST_BYTES:,} are read at most",
            code="out-of-range",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    store.download(name, path)
