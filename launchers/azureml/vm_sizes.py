"""The VM sizes of Azure that distdl knows. vm_sizes.yaml has the facts and their sources."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

# The torch wheels of distdl's image are built with CUDA 13, which supports Turing and newer GPUs.
# https://docs.nvidia.com/cuda/archive/13.0.0/cuda-toolkit-release-notes/
TOO_OLD = ("K80", "P40", "P100", "V100")
# GPUs for which distdl's image has no torch at all, and why.
OTHER_IMAGE = {"MI300X": "it needs ROCm", "GB200": "its processor is an Arm (aarch64)"}
# Azure retired low-priority VMs on 2026-03-31. Its API keeps the name low_priority, which now means
# spot VMs. https://github.com/MicrosoftDocs/azure-ai-docs/pull/806
SPOT = ("spot", "low_priority")
# https://learn.microsoft.com/azure/virtual-machines/vm-naming-conventions
NAME = re.compile(r"(Standard|Basic)_[A-Z]{1,3}\d+[A-Z\d-]*(_[A-Z\d]+)*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class VmSize:
    """One VM size. Prices are indicative, in USD; None means unknown."""

    name: str  # as Azure spells it
    series: str  # with its GPU, for people
    gpus: int = 0
    gpu: str = ""  # the model, such as A100
    gpu_memory_gb: int = 0  # of one GPU
    cores: int  # vCPUs, the unit of quotas
    memory_gb: int
    infiniband_gbps: int = 0  # per VM, of InfiniBand that NCCL can use
    sr_iov: bool = True  # False: the VM has InfiniBand hardware, but NCCL cannot use it
    interconnect: str = ""  # between the GPUs of one VM
    price_per_hour: float | None = None  # dedicated
    spot_price_per_hour: float | None = None
    price_date: str = ""
    price_location: str = "East US"
    quota_family: str  # the name of the quota that its cores count against
    retired: str | None = None  # the date (YYYY-MM-DD) since which Azure refuses new VMs
    note: str = ""

    @property
    def priced(self) -> str:
        """Where and when its prices were read."""
        return f"{self.price_location}, {self.price_date}"

    @property
    def infiniband(self) -> bool:
        """Whether NCCL can use an InfiniBand network between VMs of this size."""
        return bool(self.infiniband_gbps)


# Short keys in the file -> field names.
SHORT = {"price": "price_per_hour", "spot": "spot_price_per_hour"}


@functools.cache
def known() -> tuple[VmSize, ...]:
    """Every size in the order of the file, which has old series first."""
    from importlib.resources import files

    import yaml

    text = files(__package__).joinpath("vm_sizes.yaml").read_text(encoding="utf-8")
    return tuple(
        VmSize(name=name, **{SHORT.get(key, key): value for key, value in (series | facts).items()})
        for series in yaml.safe_load(text)["series"]
        for name, facts in series.pop("sizes").items()
    )


def find(name: str) -> VmSize | None:
    """The size of this name (case-insensitive); None if it is not in the file."""
    return next((size for size in known() if size.name.lower() == str(name).lower()), None)


def unknown_note(name: str) -> str:
    """A note about a valid name that is not in the file, since Azure may have it; else ""."""
    if not NAME.fullmatch(name) or find(name):
        return ""
    near = did_you_mean(name)
    hint = f" ({near})" if near else ""
    return f"distdl does not know the VM size {name}{hint}: its GPUs and price cannot be checked"


def did_you_mean(name: str) -> str:
    """`did you mean Standard_NC24rs_v3?`; "" if no name is close."""
    from distdl.util.suggest import closest

    short = {size.name.lower().removeprefix("standard_"): size.name for size in known()}
    word = name.lower().removeprefix("standard_")
    near = word if word in short else closest(word, short)
    return f"did you mean {short[near]}?" if near else ""


def suggest(name: str) -> str:
    """The closest known name, else the list of current sizes."""
    current = ", ".join(size.name for size in known() if not size.retired)
    return did_you_mean(name) or f"known sizes: {current}"
