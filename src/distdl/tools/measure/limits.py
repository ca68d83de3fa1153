"""The device's peak rates, measured in the same run: matrix product, copy, link.

All ranks measure at the same time, as they train at the same time. So ranks that share a CPU, a
power budget or a network share it in the measurement, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from distdl.distributed import process_group
from distdl.tools.measure.clock import DeviceClock

SECONDS = 0.5  # for each measurement, at least
REPEATS = 5
DTYPES = {"16": torch.float16, "bf": torch.bfloat16, "64": torch.float64}
DTYPES["tr"] = torch.bfloat16  # transformer-engine


@dataclass(frozen=True)
class Limits:
    """The limits of one device."""

    dtype: str  # of the matrices
    matrix_flops: float  # operations per second of a matrix product: 2 n^3 for n x n
    matrix_size: int  # n
    copy_bytes: float  # per second, read and written bytes added


def measure(device: torch.device, precision: str) -> Limits:
    """Measures for a few seconds; on a CPU, with as many threads as this process has.

    Args:
        precision: `trainer.precision`, which gives the type of the matrices. Float32 on a GPU uses
            torch's current setting (TF32 or not), as the training does.
    """
    dtype = DTYPES.get(str(precision)[:2], torch.float32)
    clock = DeviceClock(device)
    big = device.type in ("cuda", "mps")
    rates = {}
    for size in (4096, 8192) if big else (512, 1024):
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        seconds = best(clock, lambda a=a, b=b, out=out: torch.mm(a, b, out=out))  # type: ignore[misc]
        rates[size] = 2 * size**3 / seconds
    del a, b, out
    size = max(rates, key=rates.__getitem__)
    # Far larger than any cache.
    source = torch.ones((1 << 28) if big else (1 << 27), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = best(clock, lambda: target.copy_(source))
    return Limits(str(dtype).split(".")[1], rates[size], size, 2 * len(source) / seconds)


def best(clock: DeviceClock, call: Callable[[], object]) -> float:
    """Seconds of a call in the fastest of `REPEATS` rounds: a disturbance only makes it slower."""
    call()
    clock.finish()
    started = time.perf_counter()
    call()
    once = max(clock.finish() - started, 1e-6)
    times = max(1, round(SECONDS / REPEATS / once))
    rounds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(times):
            call()
        rounds.append((clock.finish() - started) / times)
    return min(rounds)


def measure_link(device: torch.device, nodes: int) -> dict[str, float] | None:
    """The link between the ranks, derived from a large and a tiny all-reduce over all of them.

    It uses the ring's formula, seconds = 2 (n - 1) (latency + bytes / n / bandwidth) (Patarasuk and
    Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", section 3,
    https://doi.org/10.1016/j.jpdc.2008.09.002), whatever algorithm the backend uses.

    Returns:
        None for one rank. `bandwidth` is in bytes per second that each rank sends, `latency` in
        seconds per message; `bytes` and `seconds` are the large all-reduce's.
    """
    ranks = process_group.world_size()
    if ranks == 1:
        return None
    size = 64 << 20 if device.type == "cuda" else 16 << 20
    large = _all_reduce(torch.ones(size // 4, device=device), 10)
    small = _all_reduce(torch.ones(1, device=device), 50)
    messages = 2 * (ranks - 1)
    return {
        "ranks": ranks,
        "nodes": nodes,
        "bandwidth": messages * size / ranks / max(large - small, 1e-9),
        "latency": small / messages,
        "bytes": size,
        "seconds": large,
    }


def _all_reduce(tensor: torch.Tensor, times: int) -> float:
    clock = DeviceClock(tensor.device)
    for _ in range(3):
        dist.all_reduce(tensor)
    seconds = []
    for _ in range(times):
        tensor.fill_(1)
        dist.barrier()
        started = clock.finish()
        dist.all_reduce(tensor)
        seconds.append(clock.finish() - started)
    # The all-reduce ends when its slowest rank is done.
    return max(process_group.gather(median(seconds)))
