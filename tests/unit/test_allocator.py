"""Memory kept from step to step on a CPU, counted in the page faults of a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from distdl.worker import allocator

# As steps do: blocks of some megabytes, several at once, all freed before the next step.
STEPS = """
import resource
from distdl.worker.allocator import keep_freed_memory
kept = keep_freed_memory()
def step():
    tensors = [b"x" * (12 * 2**20 + n) for n in range(6)]
for _ in range(6):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 10 * 6 * 12 * 2**20 // 4096  # that ten steps write to


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(
    ("variables", "kept", "least", "most"),
    [
        ({}, True, 0, PAGES / 8),
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"}, True, 0, PAGES / 8),
        # What the user says about malloc holds; this is what glibc does if it is told to.
        (
            {"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"},
            *(False, PAGES / 2, 99 * PAGES),
        ),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False, 0, 99 * PAGES),
    ],
)
def test_what_a_step_freed_is_there_for_the_next(variables, kept, least, most) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=variables, capture_output=True, text=True, check=True
    )
    answer, faults = done.stdout.split()
    assert answer == str(kept) and least <= int(faults) < most


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert allocator.keep_freed_memory() is False
