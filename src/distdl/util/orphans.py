"""What becomes of processes whose parent is gone: one that is killed (-9) cannot tell them."""

from __future__ import annotations

import os
import signal
import sys

from distdl.util.processes import SET_PARENT_DEATH_SIGNAL, prctl

PARENT = "DISTDL_PARENT"  # the number of the process that started this one


def die_with_parent(parent: int | None = None) -> None:
    """On Linux: ends this process with its parent, also if that is killed with -9. First thing.

    Args:
        parent: Its number; None reads $DISTDL_PARENT, and knows nothing where that is not set.
    """
    if sys.platform != "linux":
        return
    prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    named = os.environ.pop(PARENT, None)  # it is nobody else's parent
    expected = int(named or 0) if parent is None else parent
    if expected and os.getppid() != expected:  # it went before this call
        os._exit(1)


def end_with_parent() -> None:
    """Ends this process with the one that spawned it: without that one it would wait for work for
    ever. For the initializer of a pool."""
    import multiprocessing
    import threading

    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
