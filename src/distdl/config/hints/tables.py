"""Reads the tables of this package, which are data: `NAME OTHER_NAME: what to write instead`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.resources import files

import yaml

try:
    from yaml import CSafeLoader as Loader
except ImportError:  # a PyYAML without its C library; it reads the same, in 10 ms
    from yaml import SafeLoader as Loader  # type: ignore[assignment]

OTHER_TOOLS = "other_tools.yaml"
LIGHTNING_1 = "lightning_1.yaml"


@functools.cache
def _sections(file: str) -> Mapping[str, Mapping[str, str]]:
    text = files("distdl.config.hints").joinpath(file).read_text(encoding="utf-8")
    sections: Mapping[str, Mapping[str, str]] = yaml.load(text, Loader)
    return sections


def table(file: str, section: str) -> dict[str, str]:
    """What to write instead of each name of a section."""
    rows = _sections(file)[section].items()
    return {name: instead for names, instead in rows for name in names.split()}


def patterns(file: str, section: str) -> dict[str, str]:
    """As `table`, of a section whose keys are regular expressions."""
    return {**_sections(file)[section]}
