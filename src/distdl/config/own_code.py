"""Where the user's own code is. Standard library only: the command line imports it first."""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

# A frame in a traceback, or in a dump of faulthandler.
ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
LINE = re.compile(r'File "(.+)", line (\d+),? in (.+)')
# Who calls the user's code. What called these is not it, such as the user's own script.
CALLERS = re.compile(r"/distdl/worker/main\.py$|/torch/utils/data/_utils/worker\.py$")


def own_folders(root: str | Path) -> tuple[str, ...]:
    """The folders in which modules of the project are found, in this order.

    First the current folder, if it is in the project, then the project's root, each followed by its
    `src`, unless `src` is a package itself. Then the other entries of sys.path below the root:
    $PYTHONPATH, and packages installed in editable mode. Left out are folders outside the project,
    of which a job has no copy, and a run's folder, which may come from somebody else.
    """
    project = Path(root).resolve()
    current = Path.cwd()
    folders: list[Path] = []
    for top in [current, project] if current.is_relative_to(project) else [project]:
        folders.append(top)
        if (top / "src").is_dir() and not (top / "src" / "__init__.py").exists():
            folders.append(top / "src")
    known = [Path(entry) for entry in sys.path]
    folders += [
        f for f in known if f.is_relative_to(project) and f.is_dir() and not is_installed(f)
    ]
    return tuple(dict.fromkeys(str(folder) for folder in folders if not in_a_run(folder)))


def python_path(root: Path, folders: Sequence[str]) -> list[str]:
    """The root's `own_folders` relative to it, for launch.yaml: valid in each copy of the
    project."""
    return [Path(folder).relative_to(root.resolve()).as_posix() for folder in folders]


def make_importable(folders: Sequence[str]) -> None:
    """Puts the user's modules before everything that is installed, in this process."""
    sys.path[:] = [*folders, *(path for path in sys.path if path not in folders)]


def editable() -> Iterator[tuple[metadata.Distribution, Path]]:
    """Packages that are installed from a folder, and that folder (PEP 610)."""
    for package in metadata.distributions():
        url = json.loads(package.read_text("direct_url.json") or "{}").get("url", "")
        if url.startswith("file://"):
            yield package, Path(unquote(url.removeprefix("file://")))


def is_installed(path: Path) -> bool:
    """Whether a file belongs to Python or to an installed package that is not editable."""
    homes = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "scripts")]
    packages = {"site-packages", "dist-packages"} & {*path.parts}
    return bool(packages) or any(path.is_relative_to(home) for home in homes)


def last_user_line(trace: str) -> str:
    """The last line of the user's code in a traceback: `solar/net.py, line 12, in training_step`;
    "" if there is none. The traceback is text, because a loader's worker sends its own as text."""
    return next(filter(None, itertools.starmap(user_line, reversed(LINE.findall(trace)))), "")


def user_line(file: str, line: str | int, function: str) -> str:
    """A line of the user's code, as `last_user_line` has it; "" if it is another's code."""
    shown = _shown(file, str(Path.cwd()))
    return shown and f"{shown}, line {line}, in {function}"


def innermost(stack: Iterable[tuple[str, str | int, str]]) -> str:
    """The innermost line of the user's code in a stack (file, line, function; the innermost frame
    first), as `last_user_line` has it."""
    called = itertools.takewhile(lambda frame: not CALLERS.search(frame[0]), stack)
    return next(filter(None, itertools.starmap(user_line, called)), "")


def main_thread(dump: str) -> list[tuple[str, str, str]]:
    """The stack of the main thread, the last one in a dump of faulthandler, as for `innermost`."""
    threads = map(_frames, reversed(dump.split("(most recent call first):")))
    return next(filter(None, threads), [])


def of_dump(dump: str, ident: int) -> list[tuple[str, str, str]]:
    """The stack of a thread in a dump of faulthandler, as for `innermost`; empty if it is not
    there."""
    _, _, rest = dump.partition(f"hread 0x{ident:016x} ")
    return _frames(rest.partition("\n\n")[0])


def _frames(text: str) -> list[tuple[str, str, str]]:
    return [
        (_unescaped(file), line, _unescaped(function))
        for file, line, function in LINE.findall(text)
    ]


def _unescaped(name: str) -> str:
    """A name as it is; faulthandler writes other characters than ASCII's as escapes."""
    return ESCAPED.sub(lambda match: chr(int(match[match.lastindex or 0], 16)), name)


@functools.lru_cache(1000)
def _shown(file: str, current: str) -> str:
    path = Path(file)
    product = Path(__file__).parents[1]
    if not path.is_file() or path.is_relative_to(product) or is_installed(path):
        return ""
    return str(path.relative_to(current) if path.is_relative_to(current) else path)


def in_a_run(folder: Path) -> bool:
    """Whether a folder is a run's folder, or is inside one."""
    return any(
        (parent / "config.yaml").is_file() and (parent / "attempts").is_dir()
        for parent in (folder, *folder.parents)
    )
