"""Examines the ranks of a job: all measure, rank 0 judges, prints and writes doctor.json."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from omegaconf import DictConfig

from distdl.config.recipe import DOCTOR
from distdl.distributed import process_group, rank_table
from distdl.doctor import FILE, findings, links, node, rows
from distdl.ranks.environment import Environment
from distdl.runs.directory import write_json
from distdl.util.errors import Problem, UserError

if TYPE_CHECKING:
    from distdl.worker.rank_context import RankContext

log = logging.getLogger(__name__)

PASSES = 4  # what is slow in only some of them has been disturbed by another program
T = TypeVar("T")


class Unfit(UserError):
    """The job's ranks, hosts or links are not as they must be."""

    outcome = "nothing was trained"


def wanted(config: DictConfig) -> bool:
    """Whether this job is examined at its start."""
    return bool(config.get("preflight")) or config.task.get("_target_") == DOCTOR


def record_transport(context: RankContext) -> None:
    """Lets NCCL write what it uses, unless the user has told it what to write. It reads this when
    the process group is made."""
    if context.resources.accelerator == "gpu" and "NCCL_DEBUG" not in os.environ:
        log_file = context.attempt.logs / "nccl.%p.%h"
        os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET,P2P")
        os.environ.setdefault("NCCL_DEBUG_FILE", str(log_file))


def examine(config: DictConfig, context: RankContext, expect: float | None) -> dict[str, float]:
    """Measures and judges; every rank calls it, in the process group that trains.

    Args:
        expect: GB/s that a link between two hosts was promised to have; None: what the launcher
            knows of its VM size, if anything.

    Returns:
        The numbers of checks that pass, warn and fail, as `doctor/...`.

    Raises:
        Unfit: A check fails.
    """
    started, environment = time.monotonic(), context.environment
    accelerator = context.resources.accelerator
    device = torch.device("cpu")
    if accelerator == "gpu":
        device = torch.device("cuda", process_group.device_index(environment))
    promised = expect * 1e9 if expect else (context.launch.get("network_gbps") or 0) * 1e9 / 8
    judged = _measured(config, context, device, promised or None)
    counts = {
        state: sum(r.state == state for r in judged) for state in (rows.PASS, rows.WARN, rows.FAIL)
    }
    if environment.rank == 0:
        seconds = round(time.monotonic() - started, 2)
        report = {"seconds": seconds, "checks": [row._asdict() for row in judged]}
        write_json(context.attempt.path / FILE, report)
        if config.task.get("_target_") == DOCTOR:
            print(rows.table(judged), end="", flush=True)
        for row in judged if config.task.get("_target_") != DOCTOR else ():
            if row.state == rows.WARN:
                log.warning("preflight: %s", row)
    failed = [row for row in judged if row.state == rows.FAIL]
    if failed:
        raise Unfit(*(Problem(r.check, f"{r.where}: {r.measured}", r.remedy) for r in failed))
    return {f"doctor/{state}": float(count) for state, count in counts.items()}


def _measured(
    config: DictConfig, context: RankContext, device: torch.device, promised: float | None
) -> list[rows.Finding]:
    environment, accelerator = context.environment, context.resources.accelerator
    facts = node.process(environment, accelerator)
    facts["transport"] = node.transport(environment, accelerator, context.attempt.logs)
    facts["infiniband"] = bool(rank_table.interconnect())
    leader = environment.local_rank == 0
    data = config.get("data") or {}
    ranks = process_group.gather(facts)
    names = [findings.who(each) for each in ranks]
    nodes = _nodes(ranks)
    leaders = {each[0]["host"]: each[0]["rank"] for each in nodes}
    places, place_names = [[r["rank"]] for r in ranks], names
    if len(nodes) > 1:
        places, place_names = [[r["rank"] for r in each] for each in nodes], [*leaders]

    def slow_devices(speeds: dict[str, links.Speed]) -> set[str]:
        return rows.slow({k: v.flops for k, v in speeds.items()}, findings.SLOW_DEVICE)

    speeds, slow_ones = _repeated(
        lambda: dict(zip(names, process_group.gather(links.speed(device)), strict=True)),
        slow_devices,
    )
    found, slow_pairs = _repeated(
        lambda: links.measure(places, device) if len(ranks) > 1 else {},
        lambda pairs: findings.slow_links(pairs, place_names),
    )
    offsets = links.offsets([*leaders.values()][1:]) if len(nodes) > 1 else {}
    at_hosts = {rank: name for name, rank in leaders.items()}
    mine = node.host(context.attempt.path, data, environment.rank) if leader else None
    of_hosts = {r["host"]: h for r, h in zip(ranks, process_group.gather(mine), strict=True) if h}
    return [
        *findings.links(found, place_names, promised if len(nodes) > 1 else None, slow_pairs),
        *findings.transports(ranks, len(nodes)),
        *findings.devices(speeds, slow_ones),
        *findings.gpus(ranks),
        *findings.hosts(of_hosts, _shm_needed(data, environment)),
        *findings.clocks({at_hosts[rank]: each for rank, each in offsets.items()}),
        *findings.processes(ranks, any(each["infiniband"] for each in ranks)),
    ]


def _repeated(measure: Callable[[], T], slow: Callable[[T], set[str]]) -> tuple[T, set[str]]:
    """What is measured, and what was slow in each of several passes, or in one if nothing is."""
    measured = measure()
    still = slow(measured)
    for _ in range(PASSES - 1):
        if not still:
            break
        measured = measure()
        still &= slow(measured)
    return measured, still


def _nodes(ranks: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The ranks of each node."""
    nodes: dict[int, list[dict[str, Any]]] = {}
    for each in ranks:
        nodes.setdefault(each["node"], []).append(each)
    return [*nodes.values()]


def _shm_needed(data: Any, environment: Environment) -> int:
    """Bytes of /dev/shm for a host's ranks: batches in the loaders' queues, and own buffers."""
    workers, size = data.get("num_workers"), data.get("image_size")
    batch = 0
    if isinstance(size, int) and isinstance(workers, int) and workers:
        batch = (2 * workers + 1) * int(data.get("batch_size") or 1) * 3 * size**2
    return environment.local_world_size * (findings.SHM_PER_RANK + batch)
