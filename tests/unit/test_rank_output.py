"""What ranks print, and what their allocator keeps; tests/cli/test_secrets.py shows redaction."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from distdl.worker import allocator
from distdl.worker.rank_output import RankOutput


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_stops_no_rank(tmp_path) -> None:
    """Its pipe, and those of the others, are still emptied."""
    with RankOutput(tmp_path, 2) as output:
        full, other = (
            os.open(output.pipe_to(str(path)), os.O_WRONLY)
            for path in ("/dev/full", tmp_path / "there")
        )
        for number in range(2000):  # more than a pipe holds
            os.write(full, b"x" * 99 + b"\n")
            os.write(other, b"%d\n" % number)
        os.close(full)
        os.close(other)
    assert (tmp_path / "there").read_text().split()[-1] == "1999"


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


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize(
    ("variables", "kept", "least", "most"),
    [
        ({"GLIBC_TUNABLES": "glibc.cpu.x86_ibt=off"}, True, 0, PAGES / 8),
        # The user's settings of malloc stay; these make glibc do what it does by default.
        (THRESHOLDS, False, PAGES / 2, 99 * PAGES),
        ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, False, 0, 99 * PAGES),
    ],
)
def test_memory_that_a_step_freed_is_kept_for_the_next(variables, kept, least, most) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=variables, capture_output=True, text=True, check=True
    )
    answer, faults = done.stdout.split()
    assert answer == str(kept) and least <= int(faults) < most


def test_without_glibc_nothing_is_done(monkeypatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert allocator.keep_freed_memory() is False
