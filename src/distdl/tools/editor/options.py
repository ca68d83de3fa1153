"""The option files of all groups, distdl's and the user's, as they are written; not composed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from distdl.config import user_conf
from distdl.config.paths import path_text
from distdl.validation.targets import nodes

_PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.MULTILINE)
SELF = "_self_"


@dataclass(frozen=True)
class OptionFile:
    """A file of a group.

    Args:
        group: `model`, or `model/net`.
        content: Without its defaults list.
        defaults: Its entries, as they are written.
        package: Where Hydra puts the content: `_global_`, `model`, `model.net`.
        about: The comments of its keys, by dotted path.
        own: Whether it is a file of the user's.
    """

    group: str
    name: str
    content: Mapping[str, Any]
    defaults: tuple[Any, ...] = ()
    package: str = ""
    about: Mapping[str, str] = field(default_factory=dict)
    own: bool = False


@dataclass(frozen=True)
class Options:
    """All of them, by group and name, and the files that are no YAML."""

    by_group: Mapping[str, Mapping[str, OptionFile]]
    unreadable: tuple[Path, ...] = ()

    def all(self) -> Iterator[OptionFile]:
        return itertools.chain.from_iterable(group.values() for group in self.by_group.values())

    def merged(self, option: OptionFile, seen: tuple[str, ...] = ()) -> dict[str, Any]:
        """The content of an option over that of the options of its own group which it builds on."""
        merged: dict[str, Any] = {}
        for entry in option.defaults if SELF in option.defaults else (*option.defaults, SELF):
            base = self._named(option.group, entry)
            if entry == SELF:
                _merge(merged, option.content)
            elif base is not None and base.name not in seen:
                _merge(merged, self.merged(base, (*seen, option.name)))
        return merged

    def comments(self, option: OptionFile, seen: tuple[str, ...] = ()) -> dict[str, str]:
        """The comments of an option, and of those that it builds on."""
        texts: dict[str, str] = {}
        for entry in option.defaults:
            base = self._named(option.group, entry)
            if base is not None and base.name not in seen:
                texts |= self.comments(base, (*seen, option.name))
        return {**texts, **option.about}

    def _named(self, group: str, entry: object) -> OptionFile | None:
        """The option of the same group that an entry of a defaults list names."""
        if not isinstance(entry, str):
            return None
        return self.by_group[group].get(entry.removeprefix(f"/{group}/"))


def read() -> Options:
    """Reads distdl's files, and those of the user's folder, which may replace them."""
    groups: dict[str, dict[str, OptionFile]] = {}
    unreadable = list[Path]()
    own = user_conf.folder()
    for root in (Path(str(files("distdl.conf"))), *([own] if own else [])):
        for file in sorted(root.glob("[!_.]*/**/*.yaml")):
            group = file.parent.relative_to(root).as_posix()
            option = _read(file, group, own=root == own)
            if option is None:
                unreadable.append(file)
            else:
                groups.setdefault(group, {})[file.stem] = option
    return Options(groups, tuple(unreadable))


def primary_comments() -> dict[str, str]:
    """The comments of distdl's primary config, by dotted path."""
    text = files("distdl.conf").joinpath("distdl.yaml").read_text(encoding="utf-8")
    return _comments(text)


def targets_in(content: object) -> Iterator[str]:
    """The `_target_`s of some content, at any depth."""
    for _, node in nodes(content):
        if isinstance(node["_target_"], str) and "$" not in node["_target_"]:
            yield node["_target_"]


def _read(file: Path, group: str, *, own: bool) -> OptionFile | None:
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        about = _comments(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None
    if not isinstance(content, dict | None):
        return None
    content = {str(key): value for key, value in (content or {}).items()}
    defaults = content.pop("defaults", None)
    package = _PACKAGE.search(text)
    return OptionFile(
        group,
        file.stem,
        content,
        tuple(defaults) if isinstance(defaults, list) else (),
        package[1] if package else group.replace("/", "."),
        about,
        own,
    )


def _comments(text: str) -> dict[str, str]:
    """What stands above each key, or behind its value, by dotted path."""
    lines = text.splitlines()
    return dict(_comments_below(yaml.compose(text), lines, ()))


def _comments_below(
    node: object, lines: list[str], path: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        inner = (*path, str(key.value))
        first = key.start_mark.line
        above = itertools.takewhile(
            lambda line: line.strip().startswith("#"), reversed(lines[:first])
        )
        written = [line.strip().lstrip("#").strip() for line in [*above][::-1]]
        # What stands above the first key of a file is about the file.
        words = written if first and (path or _follows_a_key(lines, first, len(written))) else []
        if isinstance(value, yaml.ScalarNode):
            _, mark, behind = lines[value.end_mark.line][value.end_mark.column :].partition("# ")
            words = [*words, behind.strip()] if mark else words
        if words:
            yield path_text(inner), " ".join(words)
        yield from _comments_below(value, lines, inner)


def _follows_a_key(lines: list[str], first: int, comments: int) -> bool:
    before = lines[: first - comments]
    return any(line.strip() and not line.startswith("#") for line in before)


def _merge(into: dict[str, Any], content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, dict) else value
