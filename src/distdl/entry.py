"""The command as a process, from its first moment to its last.

Only what Python has loaded anyway is imported at the top: a module of the user's own may stand in
the place of any other, and Ctrl-C may come during any import.
"""

from __future__ import annotations

import atexit
import os
import sys
from importlib.machinery import PathFinder


def command() -> None:
    """Runs `distdl.__main__.main` and ends the process."""
    codes: list[int] = []
    if not atexit._ncallbacks():  # the first one is called last, and ends it for any before
        atexit.register(end, codes)
    try:
        folder = os.getcwd()
    except OSError:
        codes.append(refused(".", "the folder that this was typed in is gone", "cd to another one"))
        sys.exit(*codes)
    try:
        from distdl.__main__ import main

        codes.append(main())
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left to be interrupted
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        codes.append(130)
    except Exception as error:
        if (shadow := shadowing(error, (folder,))) is None:
            raise
        codes.append(refused(*shadow))
    sys.exit(*codes)


def refused(path: str, what: str, remedy: str) -> int:
    text = f"distdl: 1 problem, nothing was started\n  {path}: {what}\n      {remedy}"
    print(text, file=sys.stderr)
    return 2


def end(codes: list[int]) -> None:
    """Ends the process without taking torch and Lightning apart, which takes two seconds. Whoever
    was to be called at the end has been, and no thread is left that Python waits for."""
    if not codes:
        return  # a traceback is shown
    from contextlib import suppress

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it
            stream.flush()
    os._exit(codes[0])


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
