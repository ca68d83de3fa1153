"""The user's own `./conf` (or $DISTDL_CONF): its options come before distdl's and may shadow them.

The search path is changed by a plugin that is registered in this process only. A `hydra_plugins`
package would change every Hydra application of the environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml

from distdl.config.own_code import in_a_run
from distdl.util.errors import Problem, UserError
from distdl.util.screen import say

VARIABLE = "DISTDL_CONF"
# The directories of --config-dir: their options come after distdl's and cannot shadow them.
_further: list[Path] = []


def folder() -> Path | None:
    """The user's folder of configs, if there is one that is not distdl's own.

    Raises:
        UserError: $DISTDL_CONF is not a folder, or the folder would replace the primary config.
    """
    named = os.environ.get(VARIABLE)
    path = Path(named or "conf").resolve()
    if named and not path.is_dir():
        raise UserError.at(VARIABLE, what=f"{named!r} is not a folder", code="wrong-kind")
    # A run's folder may come from somebody else.
    if not path.is_dir() or (not named and in_a_run(path)) or path.samefile(_shipped()):
        return None
    if (path / "distdl.yaml").exists():
        raise UserError.at(
            f"{path.name}/distdl.yaml",
            what="would replace distdl's primary config; a folder of yours adds options to groups",
            remedy=f"rename it, or point {VARIABLE} to another folder",
            code="reserved",
        )
    return path


def _shipped() -> Path:
    import distdl.conf

    return Path(distdl.conf.__file__).parent


def folders() -> list[Path]:
    """The user's folders: `./conf`, and those of --config-dir."""
    first = folder()
    return [first, *_further] if first else list(_further)


def shadowed() -> list[str]:
    """distdl's options that the user's folder replaces, such as `model/resnet50`."""
    path = folder()
    files = [f.relative_to(path) for f in sorted(path.glob("*/**/*.yaml"))] if path else []
    return [str(file.with_suffix("")) for file in files if (_shipped() / file).exists()]


def parent_with(group: str, option: str) -> Path | None:
    """A parent folder whose `conf` has the option: the command should be typed there."""
    above = (parent for parent in Path.cwd().parents if folder() != parent / "conf")
    return next((p for p in above if (p / "conf" / group / f"{option}.yaml").is_file()), None)


def why_not_read(group: str, option: str) -> str:
    """Why an existing option is not found: its folder or its file has the wrong name."""
    for misnamed in (path / group / f"{option}.yml" for path in folders()):
        if misnamed.is_file():
            return f"rename {os.path.relpath(misnamed)} to {option}.yaml; "
    if folders() or in_a_run(Path.cwd()):
        return ""
    other = next((name for name in ("configs", "config") if Path(name, group).is_dir()), "")
    hint = f" (there is ./{other}: --config-dir {other})" if other else ""
    here = "./conf here is distdl's own" if Path("conf").is_dir() else "there is no ./conf here"
    return f"{here}{hint}; "


def _read(file: Path) -> dict[str, Any]:
    """A config file; empty if it is unreadable or not a mapping. Raises if it is not UTF-8."""
    with suppress(OSError, yaml.YAMLError):
        text = file.read_text(encoding="utf-8")
        with suppress(ValueError):  # a date that does not exist
            written = yaml.safe_load(text)
            return written if isinstance(written, dict) else {}
    return {}


def own_folder() -> Path | None:
    """The folder of configs whose words are the user's own: `./conf`. One that $DISTDL_CONF names
    is so only in the place of `./conf`, since elsewhere it may be somebody else's."""
    path = folder()
    beside = path is not None and path.parent == Path.cwd() and not in_a_run(path)
    return path if beside or not os.environ.get(VARIABLE) else None


def contents() -> list[dict[str, Any]]:
    """What the files of the user's own folder say: each by itself, and below its group, where Hydra
    puts it unless the file has another `@package`."""
    path = own_folder()
    said = list[dict[str, Any]]()
    if path is None:
        return said
    for file in sorted(path.rglob("*.yaml")):
        with suppress(UnicodeDecodeError):
            group = file.parent.relative_to(path).as_posix().replace("/", ".")
            content = _read(file)
            said += [content, {group: content}]
    return said


def allowed() -> tuple[str, ...]:
    """The entries of `project.allow` in the user's own files: this user trusts them here."""
    projects = [content.get("project") for content in contents()]
    lists = [project.get("allow") for project in projects if isinstance(project, dict)]
    names = [name for each in lists if isinstance(each, list) for name in each]
    return tuple(dict.fromkeys(name for name in names if isinstance(name, str)))


def broken() -> list[Problem]:
    """The user's files that Hydra cannot read: not UTF-8, or with a cycle under `defaults`."""
    problems: list[Problem] = []
    names: dict[str, list[str]] = {}
    for top in folders():
        for file in sorted(top.rglob("*.yaml")):
            try:
                defaults = _read(file).get("defaults")
            except UnicodeDecodeError as error:
                line = error.object.count(b"\n", 0, error.start) + 1
                problems.append(
                    Problem(
                        str(file),
                        what=f"is not UTF-8: {error.reason}, line {line}",
                        remedy="save it as UTF-8",
                        code="damaged-file",
                    )
                )
                continue
            group = file.parent.relative_to(top)
            names[str(group / file.stem)] = [
                text[1:] if text[:1] == "/" else os.path.normpath(group / text)
                for text in map(_entry, defaults if isinstance(defaults, list) else ())
            ]
    while True:  # each pass finds one cycle
        try:
            TopologicalSorter(names).prepare()
            return problems
        except CycleError as error:
            ring = error.args[1][::-1]  # from a file to the one it names
            problems.append(
                Problem(
                    f"{ring[0]}.yaml",
                    what=f"names itself under defaults: {' -> '.join(ring)}",
                    remedy="remove that line",
                    code="ambiguous",
                )
            )
            names = {name: after for name, after in names.items() if name not in ring}


def _entry(written: object) -> str:
    """What an entry of a defaults list names: `/model/net` for `/model: net`."""
    if isinstance(written, dict):
        written = "/".join(str(part) for part in next(iter(written.items()), ()))
    return str(written).removeprefix("override ")


def print_shadowed() -> None:
    for option in shadowed():  # the documentation describes distdl's own option
        say(f"note: {folder()}/{option}.yaml replaces distdl's own", to=sys.stderr)


def register(config_dirs: Sequence[str] = ()) -> None:
    """Makes Hydra search the user's folder first; each search determines the folder anew."""
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    _further[:] = [Path(directory).resolve() for directory in config_dirs]
    absent = [
        Problem("--config-dir", what=f"{d} is not a folder", code="wrong-kind")
        for d in _further
        if not d.is_dir()
    ]
    if absent:
        raise UserError(*absent)

    class UserConf(SearchPathPlugin):
        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            # Another Hydra application in this process must not search it.
            if any(e.path == "pkg://distdl.conf" for e in search_path.get_path()):
                if (conf := folder()) is not None:
                    search_path.prepend("distdl-user", f"file://{conf}")
                for directory in _further:
                    search_path.append("command-line", f"file://{directory}")

    plugins = Plugins.instance()
    if not any(p.__name__ == UserConf.__name__ for p in plugins.discover(SearchPathPlugin)):
        plugins.register(UserConf)
