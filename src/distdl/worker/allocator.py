"""Keeps memory that a step frees for the next step (training on a CPU with glibc)."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
NEVER = -1
LARGEST_THRESHOLD = 32 * 2**20  # bytes; glibc takes no more
# The user's own settings. GLIBC_TUNABLES may be about something else.
VARIABLES = {
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "MALLOC_TOP_PAD_",
}


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory; the process stays as large as its largest step made it.

    A step on a CPU frees every activation and gradient. glibc returns much of that to the system,
    and the next step has every page mapped and cleared again. That costs a fifth of a small
    network's step. torch recommends other allocators for this, which must be preloaded
    (https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html, "Switch Memory
    allocator"); these settings have most of their effect. See mallopt(3) for the two thresholds.

    Returns:
        Whether it was done. It is not done with another C library, or if the user's environment
        configures malloc.
    """
    if os.environ.keys() & VARIABLES or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, NEVER))
