"""Importing torch and Lightning: seconds of every start, and half a million objects that stay."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports of Lightning: no garbage collections meanwhile, and quick ones afterwards.

    What imports make lives as long as the process. Looking through it again and again takes a sixth
    of their time; later on, a full collection would hold up some training step for half a second.
    So it is put aside (https://docs.python.org/3/library/gc.html#gc.freeze) until the process ends.
    """
    if "lightning" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(gc.unfreeze)  # libraries count at the end what has not been collected
