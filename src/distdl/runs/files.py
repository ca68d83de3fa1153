"""Writes a run's files completely or not at all, and checks them when they are read.

Disks, copies and editors can truncate or change a file, and half of a YAML file is valid YAML too,
so the frozen files carry a checksum. An absent file is not an error here. A damaged one is always
reported.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from distdl.util import strict_json
from distdl.util.atomic_files import write_bytes
from distdl.util.errors import Damaged

# The first line of a stamped file: the hash of everything after it.
STAMP = "# sha256 "
RETRY_SECONDS = 0.2  # without an atomic rename, half a file may be visible for a moment

Shape = Mapping[str, type | tuple[type, ...]]


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Writes a file completely or not at all. With `durable`, it is on the disk on return."""
    write_bytes(path, text.encode(), durable=durable)


def write_json(path: Path, value: object, *, durable: bool = False) -> None:
    text = strict_json.dumps(value, indent=2, default=str) + "\n"
    write_text(path, text, durable=durable)


def write_stamped(path: Path, text: str) -> None:
    """Writes a text file whose first line shows whether the rest is intact."""
    write_text(path, f"{STAMP}{digest(text)}\n{text}")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """For optional files: empty if the file is absent, incomplete, or not a mapping."""
    with suppress(OSError, ValueError, RecursionError):
        loaded = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(loaded, dict):
            return loaded
    return {}


def load_json(path: Path, shape: Shape, remedy: str) -> dict[str, Any]:
    """The contents of a JSON file, empty if it is absent.

    Args:
        shape: The type of each key that has one; a key may be missing or null.
        remedy: What to do about a damaged file.

    Raises:
        Damaged: It is not JSON, not a mapping, or a key has another type.
    """
    for again in (True, False):
        try:
            text = path.read_bytes().decode()
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise Damaged(path, f"it cannot be read ({error})", remedy) from None
        try:
            return _shaped(path, json.loads(text), shape, remedy)
        except (ValueError, RecursionError) as error:
            if not again:
                what = f"it is not JSON ({error})" if text.strip() else "it is empty"
                raise Damaged(path, what, remedy) from None
            time.sleep(RETRY_SECONDS)
    raise AssertionError


def load_yaml(path: Path, shape: Shape, remedy: str, sha256: str | None = None) -> dict[str, Any]:
    """As `load_json`, for a YAML file that must exist, have all keys of `shape`, and match its
    checksum: `sha256` if that is kept in another file, else the one in the first line."""
    text = _as_written(path, remedy, sha256)
    try:
        if sha256 or text.startswith(STAMP):  # intact, so the fast loader suffices
            loaded = yaml.load(text, _loader())
        else:
            loaded = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False)
    except (yaml.YAMLError, OSError, ValueError, RecursionError, OmegaConfBaseException) as error:
        raise Damaged(path, f"it is not YAML ({' '.join(str(error).split())})", remedy) from None
    shaped = _shaped(path, loaded, shape, remedy)
    if missing := [key for key in shape if key not in shaped]:
        raise Damaged(path, f"it lacks {', '.join(missing)}", remedy)
    return shaped


@functools.cache
def _loader() -> type[yaml.SafeLoader]:
    """libyaml's loader, ten times as fast, with OmegaConf's rules (YAML reads 1e-3 as text)."""
    rules = get_yaml_loader()
    names = ("yaml_implicit_resolvers", "yaml_constructors")
    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return type("Loader", (base,), {name: getattr(rules, name) for name in names})


def check_yaml(path: Path, shape: Shape, remedy: str, sha256: str | None = None) -> None:
    """Raises `Damaged` if `load_yaml` would. If there is a checksum, only that is compared."""
    text = _as_written(path, remedy, sha256)
    if not sha256 and not text.startswith(STAMP):
        load_yaml(path, shape, remedy)


def _as_written(path: Path, remedy: str, sha256: str | None) -> str:
    """The text of a file, checked against the checksums that exist."""
    try:
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise Damaged(path, f"it cannot be read ({error})", remedy) from None
    if not text.strip():
        raise Damaged(path, "it is empty", remedy)
    stamp, _, rest = text.partition("\n")
    if stamped := text.startswith(STAMP):
        remedy += "; if you changed it on purpose: remove its first line"
    differs = stamped and stamp.removeprefix(STAMP).strip() != digest(rest)
    if differs or (sha256 and digest(text) != sha256):
        raise Damaged(path, "it was cut or changed after it was written", remedy)
    return text


def _shaped(path: Path, value: object, shape: Shape, remedy: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Damaged(path, f"it holds a {type(value).__name__}, not a mapping", remedy)
    for key, kind in shape.items():
        if value.get(key) is not None and not isinstance(value[key], kind):
            raise Damaged(path, f"{key} is {str(value[key])[:40]!r}", remedy)
    return value
