"""The rank table, which each job logs first: where every rank runs, and on which device."""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from distdl.config.resources import VISIBLE, listed
from distdl.distributed import process_group
from distdl.ranks.environment import Environment
from distdl.util import table as tables
from distdl.util.errors import UserError
from distdl.util.processes import start_time
from distdl.util.redact import redact

log = logging.getLogger("distdl.distributed.rank_table")

# Settings of the libraries that send the gradients, which often cause hangs.
PREFIXES = ("GLOO_", "UCX_", "FI_", "OMPI_MCA_btl")
# A linear layer in bf16 that takes more than this share of float32's time is slow.
SLOW = 1.2
GPU_PREFIXES = (*PREFIXES, "NCCL_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES")


def refuse_missing_device(environment: Environment, accelerator: str) -> None:
    """Refuses a rank without its GPU before the other ranks wait for it.

    Raises:
        UserError: This node shows fewer GPUs than it has ranks, or its driver is too old.
    """
    if accelerator != "gpu":
        return
    seen = listed(os.environ.get(VISIBLE, ""))
    if seen and seen[0].startswith("MIG-") and environment.local_rank < len(seen):
        # CUDA shows only the first MIG instance of a list, so each rank names its own.
        os.environ[VISIBLE] = seen[environment.local_rank]
    elif seen and seen[0].startswith("MIG-") and len(seen) > 1:
        raise _missing(environment, len(seen))
    if torch.cuda.device_count() <= process_group.device_index(environment):
        raise _missing(environment, torch.cuda.device_count())
    try:
        torch.cuda.init()
    except RuntimeError as error:  # GPUs are visible, but the driver cannot run this torch
        reason = str(error).strip().splitlines()[0]
        raise UserError.at(
            "trainer.accelerator",
            what=(
                f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPUs of "
                f"{socket.gethostname()}: {reason}"
            ),
            remedy=(
                "update NVIDIA's driver, or install a torch that is built for the CUDA version "
                "that nvidia-smi shows, or write trainer.accelerator=cpu"
            ),
            code="failed",
        ) from error


def _missing(environment: Environment, count: int) -> UserError:
    named = f" ({VISIBLE}={os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
    remedy = "ask for as many devices as a node has, or write trainer.accelerator=cpu"
    if torch.version.cuda is None and torch.version.hip is None:
        remedy = "this torch is built for CPUs: install one for CUDA; or trainer.accelerator=cpu"
    return UserError.at(
        "trainer.devices",
        what=(
            f"rank {environment.rank} on {socket.gethostname()} is number "
            f"{environment.local_rank} of its node, and torch sees {count} GPUs there{named}"
        ),
        remedy=remedy,
        code="not-enough",
    )


def warn_of_slow_bf16(accelerator: str, precision: str | int | None) -> None:
    """Warns where bf16 is slow: a T4, a V100 and most processors of laptops have none, and torch
    imitates it, if at all; other processors have it, but compute faster in float32."""
    if not str(precision).startswith("bf16"):
        return
    if accelerator == "cpu":
        ratio = bf16_by_float32()
        if ratio > SLOW:
            log.warning(
                "trainer.precision=%s: this processor is slow in bf16, and takes %.1f times as "
                "long as in float32 for a linear layer; trainer.precision=32-true is faster here",
                precision,
                ratio,
            )
    elif accelerator == "gpu" and not torch.cuda.is_bf16_supported(including_emulation=False):
        log.warning(
            "trainer.precision=%s: a %s has no bf16 arithmetic (GPUs from 2020 on have), so steps "
            "will be slow or fail; write trainer.precision=16-mixed, or 32-true with "
            "strategy=fsdp, local_sgd and pipeline",
            precision,
            torch.cuda.get_device_name(),
        )


def bf16_by_float32() -> float:
    """The time of a linear layer in bf16, as a share of its time in float32, on this processor:
    0.3 with AMX. A Xeon whose libraries may use AVX512_BF16, but not AMX, takes 1.6, one with
    AVX-512 alone 2.5 to 4.5, with AVX2 5 to 12. It takes 10 to 100 ms.

    It is measured because no list of processors' features says what torch's libraries make of them.
    """
    rows, weights = torch.ones(128, 512), torch.ones(512, 512)  # draws no random numbers
    operands = {kind: (rows.to(kind), weights.to(kind)) for kind in (torch.float32, torch.bfloat16)}
    shortest = dict.fromkeys(operands, float("inf"))
    for _ in range(6):  # in turn; the first of each prepares the kernel
        for kind, (left, right) in operands.items():
            started = time.perf_counter()
            functional.linear(left, right)
            shortest[kind] = min(shortest[kind], time.perf_counter() - started)
    return shortest[torch.bfloat16] / shortest[torch.float32]


def announce(environment: Environment, accelerator: str) -> list[dict[str, Any]]:
    """Rank 0 prints the table of all ranks; a single rank writes it only to its log file. Returns
    the facts about each rank."""
    ranks = process_group.gather(facts(environment, accelerator))
    if environment.rank == 0:
        log.log(logging.INFO if len(ranks) > 1 else logging.DEBUG, "%s", table(ranks))
    return ranks


def facts(environment: Environment, accelerator: str) -> dict[str, Any]:
    device, adapters = "cpu", ""
    # A single rank runs in the process that was started.
    agent = os.getpid() if environment.launcher == "single" else os.getppid()
    prefixes = GPU_PREFIXES if accelerator == "gpu" else PREFIXES
    if accelerator == "gpu":
        adapters = ", ".join(interconnect()) or "no InfiniBand"
        index = process_group.device_index(environment)
        device = f"cuda:{index} {torch.cuda.get_device_name(index)}"
    return {
        "rank": environment.rank,
        "node": environment.node_rank,
        "local": environment.local_rank,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process": f"{os.getpid()}:{start_time(os.getpid())}",
        "agent": f"{agent}:{start_time(agent)}",
        "device": device,
        "interconnect": adapters,
        "main": f"{environment.main_address}:{environment.main_port}",
        "launcher": environment.launcher,
        "sources": dict(environment.sources),
        "settings": {k: redact(v) for k, v in sorted(os.environ.items()) if k.startswith(prefixes)},
    }


def interconnect() -> list[str]:
    """InfiniBand (and RoCE) adapters of this node with their rates, such as `mlx5_0 200 Gb/sec`.

    Source: https://docs.kernel.org/infiniband/sysfs.html
    """
    adapters = []
    for adapter in sorted(Path("/sys/class/infiniband").glob("*")):
        try:
            rate = (adapter / "ports" / "1" / "rate").read_text().split("(")[0].strip()
        except OSError:
            rate = "rate unknown"
        adapters.append(f"{adapter.name} {rate}")
    return adapters


def table(ranks: list[dict[str, Any]]) -> str:
    """One line per rank, followed by the values that all ranks share."""
    columns = ["rank", "node", "local", "host", "pid", "device"]
    columns += ["interconnect"] if any(rank["interconnect"] for rank in ranks) else []
    rows = [[str(rank[column]) for column in columns] for rank in ranks]
    lines = tables.text(columns, rows).splitlines()
    first = ranks[0]
    sources = ", ".join(f"{name} by {source}" for name, source in first["sources"].items())
    lines += [f"launcher {first['launcher']}, rank 0 at {first['main']}: {sources}"]
    lines += [f"{k}={v}" for k, v in first["settings"].items()]
    for other in ranks[1:]:
        if other["settings"] != first["settings"]:
            differs = dict(set(other["settings"].items()) ^ set(first["settings"].items()))
            names = ", ".join(sorted(differs))
            lines.append(f"rank {other['rank']} differs from rank 0 in {names}")
    return "\n".join(line.rstrip() for line in lines) + "\n"
