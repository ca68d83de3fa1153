"""Examines the ranks of a job: all measure, rank 0 judges, prints and writes doctor.json."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from omegaconf import DictConfig

from distdl.distributed import process_group
from distdl.ranks.environment import Environment
from distdl.runs.directory import write_json
from distdl.tools.doctor import FILE, findings, links, node, rows
from distdl.util.errors import Problem, Unfit

if TYPE_CHECKING:
    from distdl.worker.rank_context import RankContext

log = logging.getLogger(__name__)

PASSES = 4  # what is slow in only some of them has been disturbed by another program
T = TypeVar("T")


def record_transport(context: RankContext) -> None:
    """Lets NCCL write what it uses, unless the user has told it what to write. It reads this when
    the process group is made."""
    if context.resources.accelerator == "gpu" and "NCCL_DEBUG" not in os.environ:
        log_file = context.attempt.logs / "nccl.%p.%h"
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,P2P")
        os.environ.setdefault("NCCL_DEBUG_FILE", str(log_file))


def examine(
    config: DictConfig, context: RankContext, expect: float | None, *, alone: bool = False
) -> dict[str, float]:
    """Measures and judges; every rank calls it, in the process group that trains.

    Args:
        expect: GB/s that a link between two hosts (on one host: of two ranks) should have; None:
            what the launcher knows of its VM size, if anything.
        alone: True: the examination is all that the job does, and the table of all checks is
            printed. False: a training follows, and only warnings are logged.

    Returns:
        The numbers of checks that pass and warn, as `doctor/...`.

    Raises:
        Unfit: A check fails.
    """
    started = time.monotonic()
    rank = context.environment.rank
    judged = _measured(config, context, expect)
    report = {"seconds": time.monotonic() - started, "checks": [row._asdict() for row in judged]}
    if rank == 0:
        write_json(context.attempt.path / FILE, report)
    if rank == 0 and alone:
        print(rows.table(judged), end="", flush=True)
    for row in judged:
        if rank == 0 and row.state == rows.WARN and not alone:
            log.warning("preflight: %s", row)
    if failed := [row for row in judged if row.state == rows.FAIL]:
        raise Unfit(
            *(Problem(r.check, what=f"{r.where}: {r.measured}", remedy=r.remedy) for r in failed)
        )
    states = Counter(row.state for row in judged)
    return {f"doctor/{state}": float(states[state]) for state in (rows.PASS, rows.WARN)}


def _measured(config: DictConfig, context: RankContext, expect: float | None) -> list[rows.Finding]:
    environment = context.environment
    accelerator = context.resources.accelerator
    device = torch.device("cpu")
    data = config.get("data") or {}
    leaders = dict[str, int]()
    if accelerator == "gpu":
        device = torch.device("cuda", process_group.device_index(environment))
    facts = node.process(environment, accelerator)
    ranks = process_group.gather(facts)
    names = [findings.who(each) for each in ranks]
    places = dict[str, list[int]]()
    for each in ranks:
        leaders.setdefault(each["host"], each["rank"])
        places.setdefault(each["host"], []).append(each["rank"])
    several = len(leaders) > 1
    if not several:
        places = {name: [rank] for rank, name in enumerate(names)}
    speeds, slow_devices = _repeated(
        lambda: dict(zip(names, process_group.gather(links.speed(device)), strict=True)),
        lambda speeds: rows.slow({k: v.flops for k, v in speeds.items()}, findings.SLOW_DEVICE),
    )
    between, slow_links = _repeated(lambda: links.measure(places, device), findings.slow_links)
    # NCCL has chosen by now.
    ways = process_group.gather(node.transport(environment, accelerator, context.attempt.logs))
    offsets = links.offsets([*leaders.values()][1:]) if several else {}
    leads = leaders[facts["host"]] == environment.rank
    of_host = node.host(context.attempt.path, data, environment.rank) if leads else {}
    every = process_group.gather(of_host)
    of_hosts = {host: every[rank] for host, rank in leaders.items()}
    needed = _shm_needed(data, environment)
    gigabits = context.launch.get("network_gbps") if several else None  # of a VM, between hosts
    gigabytes = expect or (gigabits and gigabits / 8)
    return [
        *findings.links(between, len(places), gigabytes and gigabytes * 1e9, slow_links),
        *findings.transports(dict(zip(names, ways, strict=True)), len(leaders)),
        *findings.devices(speeds, slow_devices),
        *findings.gpus(ranks),
        *findings.hosts(of_hosts, needed),
        *findings.decoders(of_hosts),
        *findings.clocks({ranks[rank]["host"]: each for rank, each in offsets.items()}),
        *findings.processes(ranks, any(way.get("adapters") for way in ways)),
    ]


def _repeated(measure: Callable[[], T], slow: Callable[[T], set[str]]) -> tuple[T, set[str]]:
    """What is measured, and what was slow in each of several passes, or in one if nothing is."""
    measured = measure()
    still = slow(measured)
    for _ in range(PASSES - 1):
        if still:
            measured = measure()
            still &= slow(measured)
    return measured, still


def _shm_needed(data: Mapping[str, Any], environment: Environment) -> int:
    """Bytes of /dev/shm for a host's ranks: batches in the loaders' queues, and own buffers."""
    workers = data.get("num_workers")
    size = data.get("image_size")
    samples = data.get("batch_size") or 1
    batch = 0
    # A batch that is still to be chosen (auto) is not known.
    if isinstance(size, int) and isinstance(workers, int) and workers and samples != "auto":
        batch = (2 * workers + 1) * int(samples) * 3 * size**2
    return environment.local_world_size * (findings.SHM_PER_RANK + batch)
