"""Where a thread of this process is, as another of its threads sees it."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterable
from types import FrameType

from distdl.health.heartbeat import Frame


def of_thread(ident: int) -> list[Frame]:
    """The stack of a thread that runs, the innermost frame first.

    Python 3.11 holds a lock of the interpreter while it makes the frames, and may collect garbage
    meanwhile. A finalizer then lets another thread run, which starts a thread and blocks the whole
    process, or forks a loader worker, which never begins
    (https://github.com/python/cpython/issues/106883). The outer frames are made as they are walked,
    and the thread that is looked at may return meanwhile. So nothing is collected in this call.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return listed(traceback.walk_stack(sys._current_frames()[ident]))
    finally:
        if enabled:
            gc.enable()


def listed(stack: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    """The frames of `traceback.walk_stack` or `walk_tb`, in their order."""
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack]
