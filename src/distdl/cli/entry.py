"""The command as a process: its start and its exit.

Only modules that Python has loaded already are imported at the top: a user's module may hide any
other module, and Ctrl-C may come during any import.
"""

from __future__ import annotations

import atexit
import os
import sys

from distdl.util.exit_codes import EXIT_CANCELLED, EXIT_REFUSED
from distdl.util.shadowing import shadowing


def command() -> None:
    """Runs `distdl.cli.main.main` and ends the process."""
    if "_ARGCOMPLETE" in os.environ and "COMP_LINE" in os.environ:  # a shell, at the TAB key
        from distdl.cli import completing

        completing.complete_and_exit()
    codes: list[int] = []
    if not atexit._ncallbacks():  # `end` must be the last callback, which is registered first
        atexit.register(end, codes)
    try:
        folder = os.getcwd()
    except OSError:
        missing = "the current folder no longer exists [not-found]"
        codes.append(refused(".", missing, "cd to another one"))
        sys.exit(*codes)
    try:
        from distdl.cli.main import main

        codes.append(main())
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # from here on Ctrl-C just ends the process
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        codes.append(EXIT_CANCELLED)
    except Exception as error:  # a file that shadows a module raises anything
        if (shadow := shadowing(error, (folder,))) is None:
            raise
        path, what, remedy = shadow
        codes.append(refused(path, f"{what} [hidden-module]", remedy))
    sys.exit(*codes)


def refused(path: str, what: str, remedy: str) -> int:
    text = f"distdl: 1 problem, nothing was started\n  {path}: {what}\n      {remedy}"
    print(text, file=sys.stderr)
    return EXIT_REFUSED


def end(codes: list[int]) -> None:
    """Exits without unloading torch and Lightning, which would take two seconds. All other exit
    handlers have run, and all non-daemon threads have ended."""
    if not codes:
        return  # Python exits with a traceback
    from contextlib import suppress

    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the stream's reader has exited
            stream.flush()
    os._exit(codes[0])
