"""What the TAB key needs to know of config files: the keys of each, kept in an index as long as the
file's time stays. Standard library only; PyYAML is imported if a file has changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import distdl.conf
from distdl.util.cache_folder import default_root

VERSION = 2
_SHIPPED = os.path.dirname(distdl.conf.__file__)
# What the part of the index that no config file gives is made of.
_SOURCES = ("cli", "config/schema.py", "util/refusal_codes.py")
_OVERRIDE = re.compile(r"^(?:override\s+)?/?([\w/]+)$")
_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
_LAYERS = ("experiment", "debug")


def index() -> dict[str, Any]:
    """The index, in which every config file is as it is now. What else has changed is read in a
    process of its own: at once the first time, later in the background."""
    path = _path()
    known = _read(path)
    if known is None:
        _make(wait=True)
        known = _read(path) or empty()
    elif known["sources"] != sources():
        _make(wait=False)
    if refresh(known):
        write(known)
    return known


def empty() -> dict[str, Any]:
    """An index without an entry."""
    none: dict[str, Any] = {"options": {}, "words": []}
    return {
        "version": VERSION,
        "sources": sources(),
        "verbs": {"": none},
        "keys": [],
        "values": {},
        "runs": "outputs",
        "defaults": {},
        "files": {},
    }


def sources() -> float:
    """The time of distdl's own newest source that the index depends on."""
    package = Path(__file__).resolve().parents[1]
    files = [file for each in _SOURCES for file in _files_of(package / each)]
    return max(os.stat(file).st_mtime for file in files)


def _files_of(path: Path) -> Iterable[Path]:
    return [*path.glob("*.py")] if path.is_dir() else [path]


def refresh(known: dict[str, Any]) -> bool:
    """Reads the config files that have changed; returns whether any has."""
    now = {path: [stamp.st_mtime_ns, stamp.st_size] for path, stamp in _config_files()}
    files = known["files"]
    changed = [path for path, stamp in now.items() if files.get(path, {}).get("stamp") != stamp]
    gone = [path for path in files if path not in now]
    for path in gone:
        del files[path]
    for path in changed:
        files[path] = {"stamp": now[path], **_content(path)}
    return bool(changed or gone)


def write(known: Mapping[str, Any]) -> None:
    """Keeps the index, if it can be kept."""
    path = _path()
    part = f"{path}.{os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "w", encoding="utf-8") as file:
            json.dump(known, file)
        os.replace(part, path)
    except OSError:
        return


def _path() -> Path:
    """One for each installation and folder of configs."""
    own = _own_folder() or ""
    number = zlib.crc32(f"{_SHIPPED}\n{own}".encode())
    return default_root() / f"completion-{number:08x}.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        known = json.loads(path.read_bytes())
        return known if known["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _make(*, wait: bool) -> None:
    command = [sys.executable, "-P", "-m", "distdl.cli.completion_index"]
    silent: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    variables = {name: v for name, v in os.environ.items() if not name.startswith("_ARGCOMPLETE")}
    process = subprocess.Popen(command, start_new_session=True, env=variables, **silent)
    if wait:
        process.wait()


def _own_folder() -> str | None:
    """The user's folder of configs, as `config.user_conf` has it."""
    path = os.path.abspath(os.environ.get("DISTDL_CONF") or "conf")
    return path if os.path.isdir(path) and path != _SHIPPED else None


@cache
def _config_files() -> list[tuple[str, os.stat_result]]:
    """The option files, distdl's own before the user's."""
    found = list[tuple[str, os.stat_result]]()
    for top in filter(None, (_SHIPPED, _own_folder())):
        for folder, folders, names in os.walk(top):
            folders[:] = sorted(name for name in folders if not name.startswith(("_", ".")))
            files = [os.path.join(folder, name) for name in sorted(names)]
            found += [(path, os.stat(path)) for path in files if path.endswith(".yaml")]
    return found


def _content(path: str) -> dict[str, Any]:
    """What the index has of a file: its keys, its defaults list, where Hydra puts it."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        content = yaml.load(text, loader)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {"keys": [], "defaults": [], "package": ""}
    package = _PACKAGE.search(text)
    content = content if isinstance(content, dict) else {}
    defaults = content.pop("defaults", None)
    return {
        "keys": [*_dotted(content, "")],
        "defaults": [entry for entry in map(_entry, defaults or ()) if entry],
        "package": package[1] if package else "",
    }


def _dotted(node: object, above: str) -> Iterable[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        if not str(key).startswith("_"):
            yield f"{above}{key}"
            yield from _dotted(value, f"{above}{key}.")


def _entry(entry: object) -> list[Any] | None:
    """An entry of a defaults list: the group ("" for the file's own), and the options."""
    if isinstance(entry, str):
        return ["", [entry]] if entry != "_self_" else None
    if isinstance(entry, dict) and len(entry) == 1:
        ((key, options),) = entry.items()
        group = _OVERRIDE.match(str(key))
        listed = options if isinstance(options, list) else [options]
        return [group[1], [str(each) for each in listed if each is not None]] if group else None
    return None


# ------------------------------------------------------------ what the index says


def groups(known: Mapping[str, Any]) -> dict[str, list[str]]:
    """The options of each group."""
    found: dict[str, list[str]] = {}
    for path in known["files"]:
        group, name = _place(path)
        if group:
            found.setdefault(group, []).append(name)
            layer, _, inner = group.partition("/")
            if inner and layer in _LAYERS:  # experiment=folder/name
                found.setdefault(layer, []).append(f"{inner}/{name}")
    return {group: sorted({*names}) for group, names in found.items()}


def _place(path: str) -> tuple[str, str]:
    """The group and the name of an option file."""
    top = next(
        top for top in (_own_folder(), _SHIPPED) if top and path.startswith(f"{top}{os.sep}")
    )
    group, name = os.path.split(os.path.relpath(path, top))
    return group.replace(os.sep, "/"), name.removesuffix(".yaml")


def _file(group: str, option: str, known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for top in (_own_folder(), _SHIPPED):
        path = os.path.join(top, *group.split("/"), *f"{option}.yaml".split("/")) if top else ""
        if path in known["files"]:
            return known["files"][path]
    return None


def chosen(words: Sequence[str], known: Mapping[str, Any]) -> dict[str, list[str]]:
    """The options of each group that a command line has: by default, by an experiment, typed."""
    found = {group: [*options] for group, options in known["defaults"].items()}
    typed = dict[str, list[str]]()
    for word in words:
        key, given, value = word.lstrip("+~").partition("=")
        if given:
            typed[key] = [each for each in value.strip("[]").split(",") if each]
    for layer in _LAYERS:
        for option in typed.get(layer, ()):
            _choose(layer, option, known, found, ())
    return found | typed


def _choose(
    layer: str,
    option: str,
    known: Mapping[str, Any],
    found: dict[str, list[str]],
    seen: tuple[str, ...],
) -> None:
    file = _file(layer, option, known)
    if file is None or option in seen:
        return
    for group, options in file["defaults"]:
        if group:
            found[group] = options
        else:
            _choose(layer, options[0], known, found, (*seen, option))
    found[layer] = [*found.get(layer, ()), option]


def keys(options: Mapping[str, Sequence[str]], known: Mapping[str, Any]) -> set[str]:
    """The keys of these options, of those that they build on among them."""
    return {
        key for group, names in options.items() for name in names for key in _of(group, name, known)
    }


def _of(group: str, name: str, known: Mapping[str, Any], seen: tuple[str, ...] = ()) -> set[str]:
    file = _file(group, name, known)
    if file is None or name in seen:
        return set()
    package = file["package"] or ("_global_" if group in _LAYERS else group.replace("/", "."))
    above = "" if package == "_global_" else f"{package}."
    found = {f"{above}{key}" for key in file["keys"]}
    for other, options in file["defaults"]:
        if not other:
            found |= _of(group, options[0], known, (*seen, name))
    return found
