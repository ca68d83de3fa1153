"""Keeps memory that a step frees for the next step (training on a CPU with glibc)."""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
NEVER = -1
LARGEST_THRESHOLD = 32 * 2**20  # bytes; glibc takes no more
# Set by a user who configures malloc. GLIBC_TUNABLES is checked below: it may configure more.
VARIABLES = {f"MALLOC_{x}_" for x in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD")}


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory, so that the process stays as large as its largest step made
    it. Does nothing and returns False with another C library, or if the user configures malloc.

    After a step on a CPU, glibc returns much of the freed memory to the system. The next step then
    maps and clears every page again, which takes a fifth of a small network's step. torch
    recommends other allocators, which must be preloaded (https://docs.pytorch.org/tutorials/
    recipes/recipes/tuning_guide.html). These settings have most of the same effect: mallopt(3).
    """
    if os.environ.keys() & VARIABLES or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_THRESHOLD) and mallopt(M_TRIM_THRESHOLD, NEVER))
