"""Where a value of a config is: its path, as a tuple and as a user writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distdl.util.typed import Path


def path_text(path: Path) -> str:
    """Writes a path as the user would: `callbacks.ema.layers[0]`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


def lies_below(path: str, top: str) -> bool:
    """Whether a path is `top` or leads into it."""
    return path == top or path.startswith((f"{top}.", f"{top}["))


def walk(value: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value of nested containers with its path, the outermost first."""
    yield path, value
    if isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, (*path, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from walk(item, (*path, index))
