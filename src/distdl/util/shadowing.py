"""A module of the user's that has the name of another one, which others then fail to import.

Only what Python has loaded anyway is imported here: any other import may be the one that failed.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder


def shadowing(error: BaseException, folders: tuple[str, ...]) -> tuple[str, str, str] | None:
    """The user's file that an import failed of since it has the name of a module that others need.

    Args:
        error: With which the import failed.
        folders: Where the user's own modules are.

    Returns:
        The file, what is wrong with it, and the remedy; None if it is not that.
    """
    thing = getattr(error, "obj", None)
    named = thing.__name__ if isinstance(thing, type(sys)) else getattr(error, "name", None)
    name = str(named or "").partition(".")[0]
    elsewhere = [path for path in sys.path if os.path.abspath(path) not in folders]
    users, other = PathFinder.find_spec(name, [*folders]), PathFinder.find_spec(name, elsewhere)
    if not users or not users.origin or not other or not other.origin:
        return None
    what = f"stands in the place of {other.origin}: {type(error).__name__}: {error}"
    return users.origin, what, "give it another name"
