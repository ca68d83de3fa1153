"""What a job on Azure needs and costs, and what would be better: shown by `dry_run=true`.

Everything here is known offline. What only Azure knows (the tier of a registry or a storage
account) comes from optional keys of the launcher's node: `registry_sku`, `storage_sku`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from distdl.job import Resources
from distdl.launchers.azureml import vm_sizes
from distdl.launchers.azureml.needs import SPOT
from distdl.launchers.azureml.vm_sizes import VmSize

HOURS_PER_MONTH = 730
# A bigger VM at up to this share more is "a similar price".
SIMILAR = 1.25
# So many nodes pull the image at once that a registry's tier shows.
MANY_NODES = 4
# Slow to fast; a size with a weaker GPU is no replacement.
GPUS = ("K80", "P40", "T4", "P100", "A10", "V100", "A100", "H100", "H200")


@dataclass(frozen=True)
class Advice:
    """One thing that could be better.

    Args:
        topic: A short name, for tests and for those who want to sort.
        what: What to do.
        why: The reason.
    """

    topic: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}\n  because {self.why}"


def table(
    node: Mapping[str, Any],
    resources: Resources,
    walltime_hours: float | None = None,
    jobs: int = 1,
) -> str:
    """Needs, prices and advice as text.

    Args:
        node: The launcher's node: `vm_size`, `tier`, `compute`, `min_nodes`, `inputs`, `sweep`,
            `registry_sku`, `storage_sku`; all but the first may be absent.
        resources: The size of the run.
        walltime_hours: How long it may take, None where no limit is set.
        jobs: Members of the sweep that this job belongs to.
    """
    size = vm_sizes.find(node.get("vm_size") or "")
    if size is None:
        return (
            f"price and quota: unknown here, as distdl does not know {node.get('vm_size')}: "
            "azure.microsoft.com/pricing/details/machine-learning"
        )
    rows = [*_facts(size, resources), *_quota(node, size, resources, jobs)]
    rows += _prices(node, size, resources, walltime_hours, jobs)
    rows += [("note", size.note)] if size.note else []
    width = max(len(name) for name, _ in rows)
    text = [f"{name:<{width}}  {value}" for name, value in rows]
    for number, advice in enumerate(lines(node, resources, jobs=jobs), start=1):
        first, *rest = str(advice).splitlines()
        text += [f"advice {number}: {first}", *(f"  {line}" for line in rest)]
    return "\n".join(text)


def lines(node: Mapping[str, Any], resources: Resources, *, jobs: int = 1) -> list[Advice]:
    """The advice alone; arguments as of `table`."""
    size = vm_sizes.find(node.get("vm_size") or "")
    if size is None:
        return []
    return [
        *_retired(size, resources),
        *_unused(size, resources),
        *_sweep(node, resources, jobs),
        *_scale_up(size, resources),
        *_infiniband(size, resources),
        *_blob(node, resources),
        *_registry(node, resources, jobs),
        *_idle(node, size),
    ]


def _facts(size: VmSize, resources: Resources) -> Iterator[tuple[str, str]]:
    parts = [f"{size.cores} cores", f"{size.memory_gb} GB"]
    if size.gpus:
        parts.insert(0, f"{size.gpus} x {size.gpu} of {size.gpu_memory_gb} GB")
        parts.append(size.interconnect)
    if size.infiniband:
        parts.append(f"InfiniBand {size.infiniband_gbps} Gb/s")
    elif size.gpus and resources.num_nodes > 1:
        parts.append("no InfiniBand that works" if not size.sr_iov else "no InfiniBand")
    yield "nodes", f"{resources.num_nodes} x {size.name}"
    yield "each", ", ".join(parts)
    if size.gpus and resources.accelerator == "gpu":
        have = resources.num_nodes * size.gpus
        yield "GPUs", f"{resources.world_size} of {have} are used"


def _quota(
    node: Mapping[str, Any], size: VmSize, resources: Resources, jobs: int
) -> Iterator[tuple[str, str]]:
    cores = resources.num_nodes * size.cores
    name = f'"{size.quota_family}"'
    other = "spot has a quota of its own"
    if _spot(node):
        name, other = "the region's low-priority quota", f"{name} does not count"
    sweep = f" per job, {jobs * cores} for all {jobs} of the sweep at once" if jobs > 1 else ""
    yield "quota needed", f"{cores} cores of {name}{sweep}; {other}"


def _prices(
    node: Mapping[str, Any],
    size: VmSize,
    resources: Resources,
    hours: float | None,
    jobs: int,
) -> Iterator[tuple[str, str]]:
    nodes = resources.num_nodes * jobs
    if size.price_per_hour is None:
        yield "price", "not known here: azure.microsoft.com/pricing/details/machine-learning"
        return
    about = f"{nodes} nodes" if nodes > 1 else "1 node"
    if size.price_date:
        about += f", East US, prices of {size.price_date}: indicative"
    dedicated, low = size.price_per_hour * nodes, size.spot_price_per_hour
    mark = " (chosen)"
    chosen_low = mark if _spot(node) else ""
    chosen_dedicated = "" if chosen_low else mark

    def both(factor: float) -> str:
        cheap = f"spot {f'about {money(low * nodes * factor)}' if low else 'unknown'}"
        return f"{cheap}{chosen_low}, dedicated {money(dedicated * factor)}{chosen_dedicated}"

    yield "price per hour", f"{both(1)} ({about})"
    if hours:
        yield f"for {hours:g} h at most", both(hours)
    if chosen_low:
        yield "tier", "spot: nodes may be taken away; the run goes on from its checkpoint"
    elif low:
        less = f"{1 - low / size.price_per_hour:.0%}"
        yield (
            "tier",
            f"dedicated: never taken away; spot costs about {less} less, and may be",
        )


def money(amount: float) -> str:
    """USD, without cents where they do not matter."""
    return f"{amount:,.0f} USD" if amount >= 100 else f"{amount:,.2f} USD"


def _spot(node: Mapping[str, Any]) -> bool:
    return node.get("tier") in SPOT


def _today() -> list[VmSize]:
    """Sizes to propose."""
    return [
        size for size in vm_sizes.all() if not size.retired and size.gpu not in vm_sizes.TOO_OLD
    ]


def _as_good(candidate: VmSize, size: VmSize) -> bool:
    return (
        bool(candidate.gpus)
        and GPUS.index(candidate.gpu) >= GPUS.index(size.gpu)
        and candidate.gpu_memory_gb >= size.gpu_memory_gb
    )


def _cost(size: VmSize, world_size: int) -> float:
    """USD per hour of so many VMs of a size that they have `world_size` GPUs."""
    return math.ceil(world_size / size.gpus) * (size.price_per_hour or math.inf)


def _retired(size: VmSize, resources: Resources) -> Iterator[Advice]:
    if not size.retired:
        return
    ranks, devices = resources.world_size, min(resources.devices, size.gpus)
    fitting = [s for s in _today() if _as_good(s, size) and s.gpus >= devices]
    instead = min(fitting, key=lambda s: (_cost(s, ranks), s.gpus))
    yield Advice(
        "retired",
        f"choose a size of today, such as {instead.name}",
        f"Azure retired {size.series} on {size.retired}; new VMs of this size are refused",
    )


def _unused(size: VmSize, resources: Resources) -> Iterator[Advice]:
    if resources.accelerator == "cpu" and size.gpus:
        yield Advice(
            "unused",
            "choose a size without GPU, such as Standard_DS3_v2",
            f"trainer.accelerator=cpu leaves {size.gpus} x {size.gpu} per node idle, and paid",
        )
    elif 0 < resources.devices < size.gpus:
        yield Advice(
            "unused",
            f"write trainer.devices={size.gpus}, or choose a smaller size",
            f"{size.gpus - resources.devices} of {size.gpus} GPUs per node are idle, and paid",
        )


def _sweep(node: Mapping[str, Any], resources: Resources, jobs: int) -> Iterator[Advice]:
    if resources.num_nodes > 1 and (jobs > 1 or node.get("sweep") == "azureml"):
        yield Advice(
            "sweep",
            "train the configurations separately, one VM each: trainer.num_nodes=1",
            "configurations do not need each other: on one VM none waits for a network, and one "
            "that is preempted stops no other",
        )


def _scale_up(size: VmSize, resources: Resources) -> Iterator[Advice]:
    ranks, nodes, now = resources.world_size, resources.num_nodes, size.price_per_hour
    if nodes == 1 or not size.gpus or resources.accelerator == "cpu" or now is None:
        return
    bigger = [
        s
        for s in _today()
        if _as_good(s, size)
        and math.ceil(ranks / s.gpus) < nodes
        and _cost(s, ranks) <= SIMILAR * now * nodes
    ]
    if not bigger:
        return
    best = min(bigger, key=lambda s: (math.ceil(ranks / s.gpus), _cost(s, ranks)))
    fewer = math.ceil(ranks / best.gpus)
    yield Advice(
        "scale up",
        f"scale up before scaling out: {fewer} x {best.name} "
        f"({money(_cost(best, ranks))} per hour, {best.gpus} x {best.gpu} each) "
        f"instead of {nodes} x {size.name} ({money(now * nodes)})",
        f"GPUs of one VM talk by {best.interconnect or 'PCIe'}, VMs by a network: what the "
        "gradients wait for is the slower one",
    )


def _infiniband(size: VmSize, resources: Resources) -> Iterator[Advice]:
    if resources.num_nodes == 1 or not size.gpus or size.infiniband:
        return
    fast = [s for s in _today() if s.infiniband and _as_good(s, size)]
    best = min(fast, key=lambda s: (_cost(s, resources.world_size), s.name))
    if not size.sr_iov:
        why = f"the InfiniBand of {size.name} has no SR-IOV, so NCCL falls back to Ethernet"
    else:
        why = f"{size.name} has no InfiniBand (no r in its name): gradients go over Ethernet"
    price = f", {money(best.price_per_hour)} per hour" if best.price_per_hour else ""
    yield Advice(
        "infiniband",
        "where several nodes are needed, choose a size with InfiniBand, such as "
        f"{best.name} ({best.gpus} x {best.gpu}, {best.infiniband_gbps} Gb/s{price})",
        why,
    )


def _blob(node: Mapping[str, Any], resources: Resources) -> Iterator[Advice]:
    tier = str(node.get("storage_sku") or "").lower()
    if resources.num_nodes == 1 or tier.startswith("premium"):
        return
    if tier.startswith("standard"):
        what = "put the training data on premium block blob storage, results may stay"
    elif node.get("inputs"):
        what = (
            "if the data lie on standard Blob storage, move them to premium "
            "(launcher.storage_sku=premium ends this advice)"
        )
    else:
        return
    yield Advice(
        "blob",
        what,
        f"{resources.num_nodes} nodes read at once, and a standard account answers small reads "
        "slowly and limits requests per second over all readers",
    )


def _registry(node: Mapping[str, Any], resources: Resources, jobs: int) -> Iterator[Advice]:
    nodes = resources.num_nodes * jobs
    if nodes >= MANY_NODES and str(node.get("registry_sku") or "").lower() == "basic":
        # learn.microsoft.com/azure/container-registry/container-registry-skus
        yield Advice(
            "registry",
            "give the workspace a premium container registry",
            f"{nodes} nodes pull an image of gigabytes at once, and Basic is limited in requests "
            "and bandwidth: nodes are paid for while they wait",
        )


def _idle(node: Mapping[str, Any], size: VmSize) -> Iterator[Advice]:
    least = int(node.get("min_nodes") or 0)
    if least < 1 or not node.get("compute"):  # serverless keeps no nodes
        return
    low = size.spot_price_per_hour if _spot(node) else None
    price = low or size.price_per_hour
    cost = f"about {money(least * price * HOURS_PER_MONTH)} a month" if price else "money"
    yield Advice(
        "idle",
        "write launcher.min_nodes=0",
        f"{least} node{'s stay' if least > 1 else ' stays'} on when no job runs: {cost}",
    )
