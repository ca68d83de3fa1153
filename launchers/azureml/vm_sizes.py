"""What distdl knows about Azure's VM sizes; the facts and their sources are in vm_sizes.yaml."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

# CUDA 13, with which torch's wheels of the image are built, knows nothing older than Turing.
# https://docs.nvidia.com/cuda/archive/13.0.0/cuda-toolkit-release-notes/
TOO_OLD = ("K80", "P40", "P100", "V100")
# Azure retired low-priority VMs on 2026-03-31, and gives spot VMs to those who ask for them: by the
# second name, which its API keeps. https://github.com/MicrosoftDocs/azure-ai-docs/pull/806
SPOT = ("spot", "low_priority")
# https://learn.microsoft.com/azure/virtual-machines/vm-naming-conventions
NAME = re.compile(r"(Standard|Basic)_[A-Z]{1,3}\d+[A-Z\d-]*(_[A-Z\d]+)*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class VmSize:
    """One size.

    Args:
        name: As Azure spells it.
        series: The series and its GPU, for people.
        gpus: GPUs of one VM; 0 for a size without.
        gpu: Their model (`A100`), empty for a size without.
        gpu_memory_gb: Memory of one GPU.
        cores: vCPUs, which is what quotas count.
        memory_gb: Memory of the VM.
        infiniband_gbps: How fast the InfiniBand network is that NCCL can use, per VM; 0: none.
        sr_iov: False where there is InfiniBand hardware that NCCL cannot use.
        interconnect: Between the GPUs of one VM.
        price_per_hour: Dedicated, USD, East US, indicative; None where unknown.
        spot_price_per_hour: The same of a spot VM.
        price_date: When the two were read.
        quota_family: The name of the quota that its cores count against.
        retired: Since when it cannot be used (YYYY-MM-DD), None for a size of today.
        note: What else to know.
    """

    name: str
    series: str
    gpus: int = 0
    gpu: str = ""
    gpu_memory_gb: int = 0
    cores: int
    memory_gb: int
    infiniband_gbps: int = 0
    sr_iov: bool = True
    interconnect: str = ""
    price_per_hour: float | None = None
    spot_price_per_hour: float | None = None
    price_date: str = ""
    quota_family: str
    retired: str | None = None
    note: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def infiniband(self) -> bool:
        """Whether NCCL can use an InfiniBand network between VMs of this size."""
        return bool(self.infiniband_gbps)


# What the file calls shorter.
SHORT = {"price": "price_per_hour", "spot": "spot_price_per_hour"}


@functools.cache
def all() -> tuple[VmSize, ...]:
    """Every size, in the order of the file: old series first."""
    from importlib.resources import files

    import yaml

    text = files(__package__).joinpath("vm_sizes.yaml").read_text(encoding="utf-8")
    found = []
    for series in yaml.safe_load(text)["series"]:
        for name, own in series.pop("sizes").items():
            facts = {SHORT.get(key, key): value for key, value in {**series, **own}.items()}
            found.append(VmSize(name=name, **facts))
    return tuple(found)


def find(name: str) -> VmSize | None:
    """The size of this name, in capitals or not, None for one that is not in the file."""
    return next((size for size in all() if size.name.lower() == str(name).lower()), None)


def unknown(name: str) -> str:
    """Of a size that Azure may have and the table has not: what is not known; "" for any other."""
    if not NAME.fullmatch(name) or find(name):
        return ""
    near = nearest(name)
    meant = f" (did you mean {near}?)" if near else ""
    return f"distdl does not know the VM size {name}{meant}: its GPUs and price cannot be checked"


def nearest(name: str) -> str:
    """The size that may have been meant; "" where none is close."""
    from distdl.suggest import closest

    short = {size.name.lower().removeprefix("standard_"): size.name for size in all()}
    word = str(name).lower().removeprefix("standard_")
    return short.get(word) or short.get(closest(word, short)) or ""


def suggest(name: str) -> str:
    """What may have been meant by a name that `find` does not know.

    Returns:
        "did you mean Standard_NC24rs_v3?", or the names of today's sizes where none is close.
    """
    if near := nearest(name):
        return f"did you mean {near}?"
    return f"known sizes: {', '.join(size.name for size in all() if not size.retired)}"
