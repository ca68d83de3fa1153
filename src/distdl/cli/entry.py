"""The command as a process, from its first moment to its last.

Only what Python has loaded anyway is imported at the top: a module of the user's own may stand in
the place of any other, and Ctrl-C may come during any import.
"""

from __future__ import annotations

import atexit
import os
import sys

from distdl.util.shadowing import shadowing


def command() -> None:
    """Runs `distdl.cli.main.main` and ends the process."""
    codes: list[int] = []
    if not atexit._ncallbacks():  # the first one is called last, and ends it for any before
        atexit.register(end, codes)
    try:
        folder = os.getcwd()
    except OSError:
        codes.append(refused(".", "the folder that this was typed in is gone", "cd to another one"))
        sys.exit(*codes)
    try:
        from distdl.cli.main import main

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
