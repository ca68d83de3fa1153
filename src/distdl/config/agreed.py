"""Which programs the user has started on this machine: a resume may start the same ones again.

A run's own files cannot consent to a program, since they may come from somebody else. What the user
has typed once, or has in `./conf`, is remembered by its digest in
`~/.local/state/distdl/programs/`: one empty file per program.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from distdl.config.programs import SECTION
from distdl.config.recipe import hash_of

# What was agreed to: these keys, as they are written.
KEYS = ("command", "params", "checkpoints")


def folder() -> Path:
    """Where they are remembered (XDG Base Directory Specification)."""
    named = Path(os.environ.get("XDG_STATE_HOME") or "")
    home = named if named.is_absolute() else Path("~/.local/state").expanduser()
    return home / "distdl" / "programs"


def remember(config: Mapping[str, Any]) -> None:
    """Remembers the program of a config that is being started. `config`: plain containers, before
    interpolations are resolved. A home that cannot be written only forgets it."""
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder() / digest(config)).touch(mode=0o600)


def knows(config: Mapping[str, Any]) -> bool:
    """Whether this user has started the program of a config here before."""
    file = folder() / digest(config)
    with suppress(OSError):
        places = [file.stat(), folder().stat()]
        return all(each.st_uid in (os.geteuid(), 0) and not each.st_mode & 0o022 for each in places)
    return False


def digest(config: Mapping[str, Any]) -> str:
    section = config.get(SECTION)
    node = section if isinstance(section, dict) else {}
    said = {key: node[key] for key in KEYS if node.get(key)}
    return hash_of(json.dumps(said, sort_keys=True, default=str), 64)
