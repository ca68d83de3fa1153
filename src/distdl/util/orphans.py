"""Ends processes whose parent has exited: a parent killed with -9 cannot end them itself."""

from __future__ import annotations

import os
import signal
import sys

from distdl.util.processes import SET_PARENT_DEATH_SIGNAL, prctl

PARENT = "DISTDL_PARENT"  # the number of the process that started this one


def die_with_parent(parent: int | None = None) -> None:
    """On Linux, ends this process with its parent, even if the parent is killed with -9. To notice
    a parent that has exited before this call, pass its number, here or in $DISTDL_PARENT."""
    if sys.platform != "linux":
        return
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    named = os.environ.pop(PARENT, None)  # this process's children have another parent
    expected = int(named or 0) if parent is None else parent
    if expected and os.getppid() != expected:  # it exited before this call
        os._exit(1)


def end_with_parent() -> None:
    """Initializer of a pool, whose worker would otherwise wait for work for ever."""
    import multiprocessing
    import threading

    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
