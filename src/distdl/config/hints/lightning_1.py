"""What Lightning 2 removed from Lightning 1, with the replacements.

A renamed hook is the worst case: it is never called, and no message says so. The tables are in
lightning_1.yaml.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator

from distdl.config.hints.tables import LIGHTNING_1, table

TRAINER = table(LIGHTNING_1, "trainer")
HOOKS = table(LIGHTNING_1, "hooks")
IMPORTS = table(LIGHTNING_1, "imports")
ARGUMENTS = table(LIGHTNING_1, "arguments")
# The Trainer itself refuses to start with these hooks, even if other code calls them.
_REFUSED = ("training_epoch_end", "validation_epoch_end", "test_epoch_end")


def replaced(error: BaseException) -> str:
    """The new name of the object of Lightning 1 that could not be imported; "" for other errors."""
    # No module named 'a.b', cannot import name 'b' from 'a', module 'a' has no attribute 'b'
    parts = sorted(re.findall(r"'([\w.]+)'", str(error)), key=lambda part: "." not in part)
    name = re.sub(r"^(pytorch_lightning|lightning\.pytorch)\.", "", ".".join(parts))
    return f"it is now {IMPORTS[name]}; " if name in IMPORTS else ""


def problems(called: type, base: type, users: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yields each part of a class that only Lightning 1 supports, and the remedy.

    A library's hooks are reported only if the Trainer refuses them: they may be there for older
    versions. `base` is Lightning's own class; `users` says whether a name is the user's code."""
    for name in (n for n in dir(called) if not n.startswith("_") and n != "forward"):
        function = inspect.getattr_static(called, name)
        if not inspect.isfunction(function):
            continue
        shown = f"{called.__name__}.{name}"
        refused = base.__name__ == "LightningModule" and name in _REFUSED
        users_hook = name in HOOKS and users(f"{function.__module__}.x")
        if refused or (users_hook and not _is_used(called, name)):
            what = f"{shown} is a hook of Lightning 1, and nobody calls it"
            yield what, f"it is now {HOOKS[name]}"
        elif inspect.isfunction(getattr(base, name, None)):
            passed = inspect.signature(getattr(base, name)).parameters
            for key, argument in inspect.signature(function).parameters.items():
                known = key in passed or (key == "dataloader_idx" and "args" in passed)
                needed = argument.default is argument.empty and not str(argument).startswith("*")
                if key in ARGUMENTS and needed and not known:
                    what = f"{shown} takes {key}, which Lightning 2 does not pass"
                    yield what, ARGUMENTS[key]


def _is_used(called: type, name: str) -> bool:
    """Whether another method of the class refers to this one."""
    others = [f for c in called.__mro__ for n, f in vars(c).items() if n != name]
    return any(inspect.isfunction(f) and name in f.__code__.co_names for f in others)
