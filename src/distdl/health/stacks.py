"""Where a thread of this process is, as another of its threads sees it."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import sys
import tempfile
import threading
from collections.abc import Iterable
from types import FrameType
from typing import IO

from distdl.config.own_code import main_thread, of_dump
from distdl.health.heartbeat import Frame

# Threads are listed before they are complete: CPython's new_threadstate() until 3.11.
LISTS_UNFINISHED = sys.version_info < (3, 12)


class ThreadStack:
    """The stack of the thread that makes this object, for other threads to read while it runs.

    By CPython's own dump, which reads the interpreter's frames in one go. Objects for the frames of
    another thread (`sys._current_frames`, `f_back`) are not safe in Python 3.11: to make them can
    block the process (https://github.com/python/cpython/issues/106883) or end it
    (https://github.com/python/cpython/issues/111363, as sampling profilers found).

    Nor is a dump of all threads safe there. gloo frees tensors in threads of its own, which Python
    lists before their frames are set: a dump at that moment ends the process by SIGSEGV. So only
    this thread is dumped.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        self._state = _own_state()

    def read(self) -> list[Frame]:
        """The innermost frame first; at most 100 frames. From Python 3.12 on, none if there are
        more than 100 threads and this is one of the oldest."""
        with _unnamed_file() as file:
            if LISTS_UNFINISHED:
                ctypes.pythonapi._Py_DumpTraceback(file.fileno(), self._state)
                frames = main_thread(_text(file))  # the only one
            else:
                faulthandler.dump_traceback(file, all_threads=True)
                frames = of_dump(_text(file), self._ident)
        return [(name, int(line), function) for name, line, function in frames]


def _own_state() -> ctypes.c_void_p:
    """What the interpreter keeps of this thread, as long as the thread runs."""
    get = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_Get", ctypes.pythonapi))
    return ctypes.c_void_p(get())


def _text(dump: IO[bytes]) -> str:
    dump.seek(0)
    return dump.read().decode("ascii", "replace")


def _unnamed_file() -> IO[bytes]:
    """In memory on Linux: the folder of temporary files may be on a store that hangs."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stacks"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def listed(stack: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    """The frames of `traceback.walk_tb`, in their order."""
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack]
