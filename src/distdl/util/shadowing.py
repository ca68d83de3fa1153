"""Finds a user's module that hides another module of the same name.

Imports only what Python has loaded already: any other import may be the one that failed.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder


def shadowing(error: BaseException, folders: tuple[str, ...]) -> tuple[str, str, str] | None:
    """The file of the user's `folders` that made an import fail because it hides a module of the
    same name, what is wrong, and the remedy; None if the import failed for another reason."""
    thing = getattr(error, "obj", None)
    named = thing.__name__ if isinstance(thing, type(sys)) else getattr(error, "name", None)
    name = str(named or "").partition(".")[0]
    elsewhere = [path for path in sys.path if os.path.abspath(path) not in folders]
    users = PathFinder.find_spec(name, [*folders])
    other = PathFinder.find_spec(name, elsewhere)
    if not users or not users.origin or not other or not other.origin:
        return None
    what = f"hides {other.origin}: {type(error).__name__}: {error}"
    return users.origin, what, "give it another name"
