"""Where a thread of this process is, as another of its threads sees it."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from collections.abc import Iterable
from types import FrameType
from typing import IO

from distdl.config.own_code import of_dump
from distdl.health.heartbeat import Frame


def of_thread(ident: int) -> list[Frame]:
    """The stack of a thread that runs, the innermost frame first; at most 100 frames, and
    none if there are more than 100 threads and this is one of the oldest.

    By faulthandler, which reads the interpreter's own frames in one go. Objects for the frames of
    another thread (`sys._current_frames`, `f_back`) are not safe in Python 3.11: to make them can
    block the process (https://github.com/python/cpython/issues/106883) or end it
    (https://github.com/python/cpython/issues/111363, as sampling profilers found).
    """
    with _unnamed_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        dump = file.read().decode("ascii", "replace")
    return [(name, int(line), function) for name, line, function in of_dump(dump, ident)]


def _unnamed_file() -> IO[bytes]:
    """In memory on Linux: the folder of temporary files may be on a store that hangs."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("stacks"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def listed(stack: Iterable[tuple[FrameType, int]]) -> list[Frame]:
    """The frames of `traceback.walk_tb`, in their order."""
    return [(frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in stack]
