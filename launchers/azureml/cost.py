"""Quota, prices and advice for a job on Azure, shown by `dry_run=true`.

It works offline. Only Azure knows the tiers of the registry and the storage account, so the
settings `registry_sku` and `storage_sku` name them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from distdl.job import Resources
from distdl.launchers.azureml import prices, vm_sizes
from distdl.launchers.azureml.settings import AzureSettings
from distdl.launchers.azureml.vm_sizes import VmSize

PRICES = "azure.microsoft.com/pricing/details/machine-learning"
HOURS_PER_MONTH = 730
# Fewer, bigger VMs are suggested up to this factor of the price.
SIMILAR = 1.25
# With at least this many nodes, which pull the image at the same time, a registry's tier matters.
MANY_NODES = 4
# From slow to fast. A size with a slower GPU is not a replacement.
GPUS = ("K80", "P40", "T4", "P100", "A10", "V100", "A100", "H100", "H200", "MI300X", "GB200")


class CostAdvice(NamedTuple):
    """One piece of advice; `topic` is a short name for tests."""

    topic: str
    what: str
    why: str


Text = tuple[str, str] | None  # what to do, and why


def table(settings: AzureSettings, resources: Resources, jobs: int = 1) -> str:
    """Quota, prices and advice as text, for a run of this size, or `jobs` runs of a sweep."""
    if settings.on_kubernetes:
        return "price and quota: those of your own Kubernetes cluster"
    if not (size := vm_sizes.find(settings.vm_size)):
        return f"price and quota: unknown, as distdl does not know {settings.vm_size}: {PRICES}"
    job = _sized(settings, resources, jobs, size)
    rows = [*job.facts(), job.quota(), *job.prices()]
    rows += [("note", size.note)] if size.note else []
    width = max(len(name) for name, _ in rows)
    text = [f"{name:<{width}}  {value}" for name, value in rows]
    for number, each in enumerate(job.advice(), start=1):
        text += [f"advice {number}: {each.what}", f"    because {each.why}"]
    return "\n".join(text)


def advice(settings: AzureSettings, resources: Resources, jobs: int = 1) -> list[CostAdvice]:
    size = vm_sizes.find(settings.vm_size)
    return list(_sized(settings, resources, jobs, size).advice()) if size else []


def _sized(settings: AzureSettings, run: Resources, jobs: int, size: VmSize) -> _SizedJob:
    """The job, with the prices that were read last (`prices`), else those of vm_sizes.yaml."""
    known = tuple(map(prices.current, vm_sizes.known()))
    return _SizedJob(settings, run, jobs, prices.current(size), known)


@dataclass(frozen=True)
class _SizedJob:
    """A job on VMs of a known size."""

    settings: AzureSettings
    run: Resources
    jobs: int
    size: VmSize
    known: tuple[VmSize, ...]  # all sizes, with the same prices

    def facts(self) -> Iterator[tuple[str, str]]:
        size = self.size
        nodes = self.run.num_nodes
        parts = [f"{size.cores} cores", f"{size.memory_gb} GB"]
        if size.gpus:
            gpus = f"{size.gpus} x {size.gpu} of {size.gpu_memory_gb} GB"
            parts = [gpus, *parts, size.interconnect]
        if size.infiniband:
            parts.append(f"InfiniBand {size.infiniband_gbps} Gb/s")
        elif size.gpus and nodes > 1:
            parts.append("no InfiniBand that works" if not size.sr_iov else "no InfiniBand")
        yield "nodes", f"{nodes} x {size.name}"
        yield "each", ", ".join(parts)
        if size.gpus and self.run.accelerator == "gpu":
            yield "GPUs", f"{self.run.world_size} of {nodes * size.gpus} are used"

    def quota(self) -> tuple[str, str]:
        cores = self.run.num_nodes * self.size.cores
        jobs = self.jobs
        name = f'"{self.size.quota_family}"'
        other = "spot has a quota of its own"
        if self.settings.spot:
            name, other = "the region's low-priority quota", f"{name} does not count"
        sweep = f" per job, {jobs * cores} for all {jobs} of the sweep at once" if jobs > 1 else ""
        return "quota needed", f"{cores} cores of {name}{sweep}; {other}"

    def prices(self) -> Iterator[tuple[str, str]]:
        one, one_spot = self.size.price_per_hour, self.size.spot_price_per_hour
        nodes = self.run.num_nodes * self.jobs
        spot = self.settings.spot
        if one is None:
            yield "price", f"not known here: python -m distdl provision azureml prices, or {PRICES}"
            return

        def both(hours: float) -> str:
            cheap = f"about {money(one_spot * nodes * hours)}" if one_spot else "unknown"
            first, second = (" (chosen)", "") if spot else ("", " (chosen)")
            return f"spot {cheap}{first}, dedicated {money(one * nodes * hours)}{second}"

        about = f"{nodes} node{'s' if nodes > 1 else ''}"
        about += f", {self.size.priced}: indicative" if self.size.price_date else ""
        yield "price per hour", f"{both(1)} ({about})"
        if limit := self.settings.walltime:
            yield f"for {limit / 3600:g} h at most", both(limit / 3600)
        if spot:
            yield "tier", "spot: nodes may be taken away; the run resumes from its checkpoint"
        elif one_spot:
            less = f"spot costs about {1 - one_spot / one:.0%} less, and may be"
            yield "tier", f"dedicated: never taken away; {less}"

    def advice(self) -> Iterator[CostAdvice]:
        parts = {
            "retired": self._retired,
            "unused": self._unused,
            "sweep": self._sweep,
            "scale up": self._scale_up,
            "infiniband": self._infiniband,
            "blob": self._blob,
            "registry": self._registry,
            "idle": self._idle,
        }
        for topic, part in parts.items():
            if text := part():
                yield CostAdvice(topic, *text)

    def _replacements(self) -> list[VmSize]:
        """Current sizes whose GPUs are at least as fast and have at least as much memory."""
        fast = set(GPUS[GPUS.index(self.size.gpu) :]) - {*vm_sizes.TOO_OLD, *vm_sizes.OTHER_IMAGE}
        current = [size for size in self.known if not size.retired and size.gpu in fast]
        return [size for size in current if size.gpu_memory_gb >= self.size.gpu_memory_gb]

    def _nodes(self, size: VmSize) -> int:
        """The number of VMs of a size that gives each rank a GPU."""
        return math.ceil(self.run.world_size / size.gpus)

    def _cost(self, size: VmSize) -> float:
        """USD per hour for that number of VMs."""
        return self._nodes(size) * (size.price_per_hour or math.inf)

    def _retired(self) -> Text:
        if not self.size.retired:
            return None
        devices = min(self.run.devices, self.size.gpus)
        fitting = [s for s in self._replacements() if s.gpus >= devices]
        best = min(fitting, key=lambda s: (self._cost(s), s.gpus))
        why = f"Azure retired {self.size.series} on {self.size.retired} and refuses new VMs of it"
        return f"choose a current size, such as {best.name}", why

    def _unused(self) -> Text:
        gpus = self.size.gpus
        idle = self.size.gpus - self.run.devices
        if self.run.accelerator == "cpu" and gpus:
            why = (
                f"you pay for {gpus} x {self.size.gpu} per node, idle with trainer.accelerator=cpu"
            )
            return "choose a size without GPUs, such as Standard_DS3_v2", why
        if 0 < idle < gpus:
            what = f"write trainer.devices={gpus}, or choose a smaller size"
            return what, f"you pay for {idle} idle GPUs of {gpus} per node"
        return None

    def _sweep(self) -> Text:
        if self.run.num_nodes == 1 or self.jobs == 1:
            return None
        what = "train the configurations separately, one VM each: trainer.num_nodes=1"
        why = "on one VM a configuration does not wait for a network, and when one is preempted, "
        return what, f"{why}the others continue"

    def _scale_up(self) -> Text:
        size = self.size
        nodes = self.run.num_nodes
        price = self.size.price_per_hour
        if nodes == 1 or not size.gpus or self.run.accelerator == "cpu" or price is None:
            return None
        fewer = [s for s in self._replacements() if self._nodes(s) < nodes]
        similar = [s for s in fewer if self._cost(s) <= SIMILAR * price * nodes]
        if not similar:
            return None
        best = min(similar, key=lambda s: (self._nodes(s), self._cost(s)))
        cost = f"{money(self._cost(best))} per hour, {best.priced}; {best.gpus} x {best.gpu} each"
        what = (
            f"scale up before scaling out: {self._nodes(best)} x {best.name} ({cost}) "
            f"instead of {nodes} x {size.name} ({money(price * nodes)}, {size.priced})"
        )
        why = f"{best.interconnect or 'PCIe'} in a VM is faster than a network between VMs, and "
        return what, f"{why}gradients wait for the slowest connection"

    def _infiniband(self) -> Text:
        size = self.size
        if self.run.num_nodes == 1 or not size.gpus or size.infiniband:
            return None
        fast = [s for s in self._replacements() if s.infiniband]
        best = min(fast, key=lambda s: (self._cost(s), s.name))
        price = ""
        if best.price_per_hour:
            price = f", {money(best.price_per_hour)} per hour, {best.priced}"
        what = (
            "if several nodes are needed, choose a size with InfiniBand, such as "
            f"{best.name} ({best.gpus} x {best.gpu}, {best.infiniband_gbps} Gb/s{price})"
        )
        if size.sr_iov:
            why = "has no InfiniBand (no r in its name), so gradients are sent over Ethernet"
            return what, f"{size.name} {why}"
        return what, f"the InfiniBand of {size.name} has no SR-IOV, so NCCL falls back to Ethernet"

    def _blob(self) -> Text:
        nodes, sku = self.run.num_nodes, self.settings.storage_sku
        if nodes == 1 or sku == "premium" or not (sku or self.settings.inputs):
            return None
        what = "move the training data, but not the results, to premium block blob storage"
        if not sku:
            what = (
                "if the data is on standard Blob storage, move it to premium "
                "(launcher.storage_sku=premium ends this advice)"
            )
        why = f"{nodes} nodes read at the same time, and a standard account answers small reads "
        return what, f"{why}slowly and limits the requests per second of all readers"

    def _registry(self) -> Text:
        nodes = self.run.num_nodes * self.jobs
        if nodes < MANY_NODES or self.settings.registry_sku != "basic":
            return None
        # learn.microsoft.com/azure/container-registry/container-registry-skus
        why = (
            f"{nodes} nodes pull an image of gigabytes at once. Basic limits requests and "
            "bandwidth, and you pay for the nodes while they wait"
        )
        return "give the workspace a premium container registry", why

    def _idle(self) -> Text:
        least = self.settings.min_nodes
        if not least or not self.settings.compute:  # serverless keeps no nodes
            return None
        price = self.size.price_per_hour
        if self.settings.spot and self.size.spot_price_per_hour:
            price = self.size.spot_price_per_hour
        cost = "money"
        if price:
            cost = f"about {money(least * price * HOURS_PER_MONTH)} a month ({self.size.priced})"
        stay = "nodes stay" if least > 1 else "node stays"
        return "write launcher.min_nodes=0", f"{least} {stay} on without a job, for {cost}"


def money(amount: float) -> str:
    """An amount in USD, without cents from 100 USD on."""
    return f"{amount:,.0f} USD" if amount >= 100 else f"{amount:,.2f} USD"
