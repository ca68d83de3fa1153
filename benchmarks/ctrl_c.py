"""Ctrl-C ends a benchmark with one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # as a shell says it of SIGINT


@contextmanager
def one_line(program: str, kept: str = "nothing of it is kept") -> Iterator[None]:
    """Ends this process on Ctrl-C, with `INTERRUPTED`.

    Args:
        kept: What becomes of the work so far.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted, and {kept}", file=sys.stderr)
        sys.exit(INTERRUPTED)
