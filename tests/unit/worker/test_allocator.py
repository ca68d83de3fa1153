"""What a step has freed is kept for the next."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# As steps do: blocks of some megabytes, several at once, all freed before the next step.
STEPS = """
import resource
from distdl.worker.allocator import keep_freed_memory
kept = keep_freed_memory()
def faults(steps):
    for _ in range(steps):
        tensors = [b"x" * (12 * 2**20 + n) for n in range(6)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = faults(6)
print(kept, faults(10) - before)
"""


PAGES = 10 * 6 * 12 * 2**20 // 4096  # that ten steps write to


THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}


MEMORY = [
    ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"}, True, 0, PAGES / 8),
    # The user's settings of malloc stay; these make glibc do what it does by default.
    (THRESHOLDS, False, PAGES / 2, 99 * PAGES),
    ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False, 0, 99 * PAGES),
]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(("variables", "kept", "least", "most"), MEMORY)
def test_memory_that_a_step_freed_is_kept_for_the_next(variables, kept, least, most):
    command = [sys.executable, "-c", STEPS]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    answer, faults = done.stdout.split()
    assert answer == str(kept)
    assert least <= int(faults) < most
