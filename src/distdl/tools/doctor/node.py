"""What a rank finds out about its own process and host, as plain values for JSON."""

from __future__ import annotations

import os
import platform
import re
import resource
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from hydra.utils import get_object

from distdl.distributed import process_group, rank_table
from distdl.health import machine
from distdl.images import decoding
from distdl.ranks.environment import Environment
from distdl.stores import Store, StoreError, is_remote, open_store
from distdl.stores.remote import PART, RemoteStore, in_parallel
from distdl.util.errors import UserError

PACKAGES = ("torch", "lightning", "distdl", "numpy", "torchvision")
CHUNK = 4 << 20  # bytes
DISK_S = 0.7  # seconds of writing
STORE_S = 1.5  # seconds of reading
LIMITS = {"nofile": "RLIMIT_NOFILE", "nproc": "RLIMIT_NPROC", "memlock": "RLIMIT_MEMLOCK"}


def process(environment: Environment, accelerator: str) -> dict[str, Any]:
    """The facts of each rank."""
    facts: dict[str, Any] = {"host": socket.gethostname(), "rank": environment.rank}
    facts["node"] = environment.node_rank
    facts["versions"] = versions(accelerator)
    facts["limits"] = {k: resource.getrlimit(getattr(resource, v))[0] for k, v in LIMITS.items()}
    if accelerator == "gpu":
        facts["gpu"] = gpu(process_group.device_index(environment))
    return facts


def versions(accelerator: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    found["torch"] = torch.__version__  # with its build, such as +cu130
    if accelerator == "gpu":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def host(run: Path, data: Mapping[str, Any] | None, rank: int) -> dict[str, Any]:
    """The facts of a host, found out by one of its ranks: `run` is the run's folder, `data` the
    config's section."""
    facts: dict[str, Any] = {**machine.disk(run)}
    if "decoder" in (data or {}):
        kind = get_object(str((data or {}).get("_target_")))
        crops = bool(getattr(kind, "crops", False))
        facts["decoder"] = decoding.used(str((data or {})["decoder"]), crops)
    root = str((data or {}).get("root") or "")
    reads: dict[str, Callable[[], float]] = {
        "write": lambda: write_rate(run / f".doctor-{rank}.part")
    }
    if is_remote(root):
        reads["read"] = lambda: read_rate(open_store(root, patience=5))
    for name, read in reads.items():
        try:
            facts[name] = read()
        except (OSError, StoreError, UserError) as error:
            facts[name] = str(error)
    return facts


def write_rate(file: Path) -> float:
    """Bytes per second that reach the disk, in the fastest of several parts."""
    data = os.urandom(CHUNK)
    best = 0.0
    end = time.perf_counter() + DISK_S
    try:
        with file.open("wb", buffering=0) as target:
            while not best or time.perf_counter() < end:
                started = time.perf_counter()
                target.write(data)
                os.fsync(target.fileno())
                best = max(best, CHUNK / (time.perf_counter() - started))
    finally:
        file.unlink(missing_ok=True)
    return best


def read_rate(store: Store) -> float:
    """Bytes per second of the largest of a few files, with parallel requests."""
    assert isinstance(store, RemoteStore)
    names = [name for name in store.names() if name.endswith(".tar")] or [*store.names()]
    sizes = {name: store.size(name) or 0 for name in names[:8]}
    name = max(sizes, key=lambda name: sizes[name], default="")
    if not name or not sizes[name]:
        raise StoreError(f"{store.uri} holds no data")
    part = min(PART, sizes[name])
    read = []
    started = time.perf_counter()

    def fetch(number: int) -> None:
        if time.perf_counter() - started < STORE_S:
            start = number * part % max(sizes[name] - part + 1, 1)
            read.append(len(store.read_part(name, start, part)))

    fetch(0)  # connects, and may be all that a slow store gives in this time
    first = time.perf_counter() - started
    if first < STORE_S:
        read = []
        started = time.perf_counter()
        in_parallel(fetch, range(10_000))
        first = time.perf_counter() - started
    return sum(read) / first


def gpu(index: int) -> dict[str, Any]:
    """What NVIDIA's driver tells of this rank's GPU; a value that it does not tell is left out."""
    import pynvml

    facts: dict[str, Any] = {"cuda": torch.version.cuda}
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        )
    except pynvml.NVMLError as error:
        return facts | {"error": str(error)}
    bus = pynvml.nvmlDeviceGetPciInfo(handle).busId
    reads = {
        "name": lambda: pynvml.nvmlDeviceGetName(handle),
        "driver": pynvml.nvmlSystemGetDriverVersion,
        "driver_cuda": pynvml.nvmlSystemGetCudaDriverVersion_v2,
        "ecc": lambda: pynvml.nvmlDeviceGetTotalEccErrors(
            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        "remapped": lambda: pynvml.nvmlDeviceGetRemappedRows(handle)[2:],
        "clocks": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
        "xid": lambda: xids(bus.decode() if isinstance(bus, bytes) else bus),
    }
    for name, read in reads.items():
        with suppress(pynvml.NVMLError, OSError):
            facts[name] = read()
    return facts


def xids(bus: str) -> list[str]:
    """The driver's errors of this GPU in the kernel's log, which only root may read in many places.
    Source: https://docs.nvidia.com/deploy/xid-errors/"""
    lines = []
    number = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with suppress(BlockingIOError):
            while record := os.read(number, 1 << 13):
                lines.append(record.decode(errors="replace"))
    finally:
        os.close(number)
    here = bus.lower().removeprefix("0000")[:-2].lstrip(":")
    found = (re.search(r"NVRM: Xid \(PCI:([0-9a-f:]+)\): (\d+)", line, re.I) for line in lines)
    return [each[2] for each in found if each and each[1].lower().endswith(here)]


def transport(environment: Environment, accelerator: str, logs: Path) -> dict[str, Any]:
    """What the gradients really go by: NCCL's own words in its log, or gloo's interface."""
    if accelerator == "gpu":
        files = logs.glob(f"nccl.{os.getpid()}.{socket.gethostname().split('.')[0]}*")
        text = "".join(file.read_text(errors="replace") for file in files)
        return {"nccl": nccl_transports(text), "adapters": rank_table.interconnect()}
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not name:
        address = local_address(environment)
        known = psutil.net_if_addrs().items()
        name = next((k for k, v in known if address in {a.address for a in v}), "")
    speed = getattr(psutil.net_if_stats().get(name), "speed", 0)
    return {"interface": name, "gbits": speed / 1000}


def nccl_transports(text: str) -> list[str]:
    """The ways between the ranks that NCCL's debug output (NCCL_DEBUG=INFO) names, such as
    `via NET/IB/0/GDRDMA`, `via P2P/CUMEM` and `via SHM/direct/direct`."""
    return sorted(
        {m.split("/CUMEM")[0] for m in re.findall(r" via ((?:NET/[A-Za-z]+|P2P|SHM)\S*)", text)}
    )


def local_address(environment: Environment) -> str:
    """The address by which this host reaches rank 0's; nothing is sent."""
    infos = socket.getaddrinfo(
        environment.main_address, environment.main_port, type=socket.SOCK_DGRAM
    )
    family, kind, protocol, _, address = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
