"""Ideas for a better recipe, as data: ideas.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from distdl.util.suggest import did_you_mean_word

FILE = Path(__file__).with_name("ideas.yaml")


@dataclass(frozen=True)
class Idea:
    """A recipe, or a change of one.

    Args:
        overrides: Of the command line of distdl.
        why: Why it may help.
        builds_on: The idea that it changes, whose overrides come first; None: it stands alone.
        against: What it is compared with; None: what it builds on.
        source: Where it helped before.
    """

    overrides: list[str]
    why: str
    builds_on: str | None = None
    against: str | None = None
    source: str = ""


def read(file: Path = FILE) -> dict[str, Idea]:
    """The ideas by name.

    Raises:
        ValueError: The file is none of ideas; the message says which line of thought is wrong.
    """
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, Mapping):
        raise ValueError(f"{file}: is not a mapping of names to ideas")
    known = {field.name for field in fields(Idea)}
    ideas = {}
    for name, node in content.items():
        if not isinstance(node, Mapping) or not {"overrides", "why"} <= node.keys() <= known:
            more = "builds_on, against and source"
            raise ValueError(f"{file}: {name} needs overrides and why, and may have {more}")
        overrides = node["overrides"]
        if not isinstance(overrides, list) or not all(isinstance(each, str) for each in overrides):
            raise ValueError(f"{file}: {name}.overrides is not a list of texts")
        ideas[name] = Idea(**node)
    for name, idea in ideas.items():
        for key, other in (("builds_on", idea.builds_on), ("against", idea.against)):
            if other is not None and other not in ideas:
                raise ValueError(f"{file}: {name}.{key} is {other}, which is no idea here")
        _chain(ideas, name, file)
    return ideas


def compared_with(ideas: Mapping[str, Idea], name: str) -> str | None:
    """The idea that this one must beat; None: it stands alone."""
    return ideas[name].against or ideas[name].builds_on


def arguments(ideas: Mapping[str, Idea], name: str) -> list[str]:
    """The overrides of an idea, after those of the ideas that it builds on.

    Raises:
        ValueError: There is no such idea.
    """
    if name not in ideas:
        near = did_you_mean_word(name, ideas) or f"there are: {', '.join(ideas)}"
        raise ValueError(f"{name} is no idea in {FILE.name}; {near}")
    return [each for part in _chain(ideas, name, FILE) for each in ideas[part].overrides]


def _chain(ideas: Mapping[str, Idea], name: str, file: Path) -> list[str]:
    chain = [name]
    while (before := ideas[chain[0]].builds_on) is not None:
        if before in chain:
            raise ValueError(f"{file}: {name} builds on itself")
        chain.insert(0, before)
    return chain
