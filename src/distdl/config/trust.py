"""`~/.config/distdl/trust.yaml`: what the user allows any config to ask for, on this machine.

    project.allow: [lightly]
    checkpoint.trust_pickle: true
    launcher.mpirun: [/opt/openmpi/bin/mpirun, /opt/intel/bin/mpiexec.hydra]
    launcher.env.LD_LIBRARY_PATH: /opt/openmpi/lib
    credentials.to: [https://mlflow.example.com]

`credentials.to` lists servers that may get the user's credentials (`distdl.config.credentials`).
Any other key is one of those that execute something (`distdl.config.doors`), its value one that a
config may give it, or a list of such values. The file sets nothing: what no config asks for is not
done.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import yaml

from distdl.config import doors
from distdl.config.recipe import flat_paths, values_at
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean


def file() -> Path:
    """Where the file is, whether or not it exists."""
    named = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    # A relative path is invalid and ignored (XDG Base Directory Specification).
    home = named if named.is_absolute() else Path("~/.config").expanduser()
    return home / "distdl" / "trust.yaml"


def read() -> list[dict[str, Any]]:
    """The content, as one mapping whose keys may be dotted; empty if there is no such file.

    Raises:
        UserError: Somebody else may write the file, it is not YAML, or a key is unknown.
    """
    path = file()
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.at(str(path), what=f"cannot be read: {error}", code="unreadable") from None
    for each in (path.resolve(), path.resolve().parent):
        _refuse_others(each)
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        what = " ".join(str(error).split())
        raise UserError.at(str(path), what=f"is not YAML: {what}", code="damaged-file") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise UserError.at(
            str(path), what="is not a mapping", remedy="project.allow: [package]", code="wrong-type"
        )
    problems = [
        Problem(
            str(path),
            what=f"{key} is not a key that needs trust",
            remedy=_remedy(key),
            code="wrong-kind",
        )
        for key in flat_paths(content)
        if key != "credentials.to" and not doors.names(key)
    ]
    if problems:
        raise UserError(*problems)
    return [content]


def allowed() -> tuple[str, ...]:
    """The entries of `project.allow`."""
    said = [names for each in read() for names in values_at(each, "project.allow")]
    names = [name for each in said for name in (each if isinstance(each, list) else [each])]
    return tuple(name for name in names if isinstance(name, str))


def _refuse_others(path: Path) -> None:
    """Refuses a file or folder that another user owns or may write."""
    status = path.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise UserError.at(
            "trust.yaml",
            what=f"{path} belongs to another user (uid {status.st_uid})",
            remedy=f"chown {os.geteuid()} {path}",
            code="private",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError.at(
            "trust.yaml",
            what=f"others may write {path}, and so trust in your name",
            remedy=f"chmod go-w {path}",
            code="private",
        )


def _remedy(key: str) -> str:
    return did_you_mean(key, doors.DOORS) or f"one of {', '.join(doors.DOORS)}"
