"""The links between nodes and the speed of devices, measured on the ranks that will train.

Each function is called by every rank at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from distdl.distributed import process_group

BYTES = {"cuda": 256 << 20, "cpu": 8 << 20}  # of a large message
ROUNDS = 5  # of each measurement: a disturbance only makes it slower
BUDGET_S = 5.0  # for all pairs; those that are left are not measured
WORK_S = 0.15  # longer than a control group's period, in which its share of the CPU is spent

T = TypeVar("T")
Pair = tuple[str, str]


class Exchange(NamedTuple):
    """An exchange of two ranks, each of which sends and receives at the same time: what an
    all-reduce of two is, without the sum.

    Args:
        rate: Bytes per second in each direction.
        latency: Seconds of an exchange of 8 bytes.
    """

    rate: float
    latency: float


def rounds(places: Sequence[T]) -> Iterator[list[tuple[T, T]]]:
    """All pairs of places, in rounds in which each place has at most one partner."""
    ring = [*range(len(places) + len(places) % 2)]
    for _ in ring[1:]:
        pairs = [sorted((ring[i], ring[-1 - i])) for i in range(len(ring) // 2)]
        yield [(places[a], places[b]) for a, b in pairs if b < len(places)]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def measure(places: Mapping[str, list[int]], device: torch.device) -> dict[Pair, Exchange]:
    """Every pair of places (name -> ranks), as far as the time allows. All ranks of one exchange
    with those of the other at once, and their rates are added."""
    if len(places) == 1:
        return {}
    rank = dist.get_rank()
    started = time.monotonic()
    mine = dict[Pair, Exchange]()
    for pairs in rounds([*places]):
        dist.barrier()
        for one, other in pairs:
            for a, b in zip(places[one], places[other], strict=False):
                if rank in (a, b):
                    mine[one, other] = exchange(a + b - rank, device)
        if process_group.broadcast(time.monotonic() - started > BUDGET_S):
            break
    lanes: dict[Pair, list[Exchange]] = {}
    for of_rank, each in enumerate(process_group.gather(mine)):
        for pair, measured in each.items():
            if of_rank in places[pair[0]]:
                lanes.setdefault(pair, []).append(measured)
    return {
        pair: Exchange(sum(e.rate for e in each), max(e.latency for e in each))
        for pair, each in lanes.items()
    }


def exchange(other: int, device: torch.device) -> Exchange:
    """This rank's exchange with one other rank."""
    small = torch.zeros(8, dtype=torch.uint8, device=device)
    large = torch.zeros(BYTES[device.type], dtype=torch.uint8, device=device)
    latency = min(_exchange(small, other)[0] for _ in range(4 * ROUNDS))
    first, _ = _exchange(large, other)
    # Both do the same: one message tells enough of a slow link.
    _, theirs = _exchange(torch.tensor([first], dtype=torch.float64, device=device), other)
    more = 0 if max(first, theirs.item()) > WORK_S else ROUNDS
    seconds = min([first, *(_exchange(large, other)[0] for _ in range(more))])
    return Exchange(len(large) / seconds, latency)


def _exchange(tensor: torch.Tensor, other: int) -> tuple[float, torch.Tensor]:
    """The seconds that it took, and what the other has sent."""
    received = torch.empty_like(tensor)
    _finish(tensor.device)
    started = time.perf_counter()
    operations = [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, received, other)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    _finish(tensor.device)
    return time.perf_counter() - started, received


def offsets(leaders: list[int]) -> dict[int, tuple[float, float]]:
    """By how many seconds the clock of each leader is ahead of rank 0's, and the uncertainty: half
    of the fastest round trip. NTP's formula, https://www.rfc-editor.org/rfc/rfc5905#section-8"""
    rank = dist.get_rank()
    results = {}
    for other in leaders:
        trips = []
        for _ in range(8 if rank in (0, other) else 0):
            times = torch.zeros(2, dtype=torch.float64)
            if rank == 0:
                sent = time.time()
                dist.send(times, other)
                dist.recv(times, other)
                back = time.time()
                ahead = ((times[0] - sent) + (times[1] - back)).item() / 2
                trips.append((back - sent, ahead))
            else:
                dist.recv(times, 0)
                times[0] = time.time()
                times[1] = time.time()
                dist.send(times, 0)
        if trips:
            trip, ahead = min(trips)
            results[other] = ahead, max(trip, 0) / 2
    return process_group.broadcast(results)


class Speed(NamedTuple):
    """Of a device: operations per second of a matrix product; on a CPU also the share of the time
    in which this process had it."""

    flops: float
    cpu_share: float | None


def speed(device: torch.device) -> Speed:
    """The matrix products of this device, while all others multiply too."""
    size = 8192 if device.type == "cuda" else 512
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch.mm(a, b)
    if dist.is_initialized():
        dist.barrier()
    results = []
    for _ in range(2):
        _finish(device)
        count = 0
        started = time.perf_counter()
        used = time.thread_time()
        while (passed := time.perf_counter() - started) < WORK_S:
            torch.mm(a, b)
            _finish(device)
            count += 1
        share = (time.thread_time() - used) / passed
        results.append(Speed(2 * size**3 * count / passed, share))
    best = max(results)
    return best if device.type == "cpu" else best._replace(cpu_share=None)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
