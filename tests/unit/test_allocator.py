"""Memory kept from step to step on a CPU, counted in the page faults of a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from distdl import allocator, birth, worker

# As steps do: blocks of some megabytes, several at once, all freed before the next step.
STEPS = """
import resource
from distdl.allocator import keep_freed_memory
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


def steps(**variables: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", STEPS], env=variables, capture_output=True, text=True, check=True
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_a_step_freed_is_there_for_the_next() -> None:
    kept, faults = steps()
    assert kept == "True" and faults < PAGES / 8
    # What the user says about malloc holds; this is what glibc does if it is told to.
    kept, faults = steps(MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072")
    assert kept == "False" and faults > PAGES / 2
    assert steps(GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0] == "False"
    assert steps(GLIBC_TUNABLES="glibc.cpu.x86_ibt=off")[0] == "True"


def test_without_glibc_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert allocator.keep_freed_memory() is False


@pytest.mark.parametrize(("accelerator", "calls"), [("cpu", 1), ("gpu", 0)])
def test_a_rank_on_a_cpu_keeps_it(
    monkeypatch: pytest.MonkeyPatch, accelerator: str, calls: int
) -> None:
    """A GPU has an allocator of its own, and its host's memory may be wanted elsewhere."""

    class Far(Exception):
        pass

    def far(*arguments: Any) -> None:
        raise Far

    called: list[int] = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: called.append(1))
    monkeypatch.setattr(birth, "refuse_missing_device", lambda *_: None)
    monkeypatch.setattr("distdl.cluster.connect", far)
    monkeypatch.setattr(worker, "effective_config", lambda *_: OmegaConf.create({}))
    attempt: Any = SimpleNamespace(
        launch=dict, resources=lambda: SimpleNamespace(accelerator=accelerator)
    )
    bundle: Any = SimpleNamespace(python_path=lambda _: [])
    stop: Any = SimpleNamespace(check=lambda: None)
    nothing: Any = None
    with pytest.raises(Far):
        worker.perform(bundle, nothing, attempt, nothing, stop)
    assert len(called) == calls
