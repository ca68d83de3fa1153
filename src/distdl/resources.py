"""How many ranks, and on what: `trainer.num_nodes` and `trainer.devices` -> `Resources`.

Resolved before anything is submitted, without torch: here by $CUDA_VISIBLE_DEVICES and nvidia-smi.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from distdl.errors import Problem, UserError
from distdl.job import Resources


def visible_gpus() -> int:
    """NVIDIA GPUs that a process started here would see."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([d for d in listed.split(",") if d.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in shown.stdout.splitlines())


def resolve(
    trainer: Mapping[str, Any], *, local: bool, known: tuple[int, str] | None = None
) -> Resources:
    """The size of the run.

    Args:
        trainer: The composed `trainer` node.
        local: Whether the ranks are born on this machine; elsewhere nothing can be counted here.
        known: Devices per node and accelerator of a machine that the launcher knows by its name.

    Raises:
        UserError: A size that this machine does not have, or that cannot be known from here.
    """
    accelerator = str(trainer.get("accelerator") or "auto")
    devices = trainer.get("devices", "auto")
    num_nodes = trainer.get("num_nodes", 1)
    if not local:
        return _elsewhere(accelerator, devices, num_nodes, known)
    if num_nodes != 1:
        raise UserError(
            Problem(
                "trainer.num_nodes",
                f"launcher=local is this one machine, and {num_nodes} nodes are asked for",
                "write trainer.num_nodes=1, or choose a launcher that starts several nodes",
            )
        )
    gpus = visible_gpus()
    if accelerator == "auto":
        apple = platform.system() == "Darwin" and platform.machine() == "arm64"
        accelerator = "gpu" if gpus else "mps" if apple else "cpu"
    accelerator = "gpu" if accelerator == "cuda" else accelerator
    if accelerator == "gpu" and not gpus:
        raise UserError(
            Problem(
                "trainer.accelerator",
                "a GPU is asked for, and this machine shows none (by nvidia-smi)",
                "write trainer.accelerator=cpu, or add debug=cpu for a short run on the CPU",
            )
        )
    ids: tuple[int, ...] | None = None
    if isinstance(devices, (list, tuple)):
        ids = tuple(int(d) for d in devices)
        devices = len(ids)
    elif devices in ("auto", -1, None):
        devices = gpus if accelerator == "gpu" else 1
    largest = max(ids) + 1 if ids else devices
    if accelerator == "gpu" and largest > gpus:
        raise UserError(
            Problem(
                "trainer.devices",
                f"{trainer.get('devices')} is asked for, and this machine shows {gpus} GPUs",
                f"write trainer.devices={gpus}",
            )
        )
    if accelerator != "gpu" and ids is not None:
        raise UserError(
            Problem(
                "trainer.devices",
                f"a list chooses GPUs, and trainer.accelerator is {accelerator}",
                f"write trainer.devices={len(ids)}",
            )
        )
    return Resources(1, int(devices), accelerator, ids)


def _elsewhere(
    accelerator: str, devices: Any, num_nodes: int, known: tuple[int, str] | None
) -> Resources:
    if known and devices in ("auto", -1, None):
        devices = known[0] if accelerator != "cpu" else 1
    if known and accelerator == "auto":
        accelerator = known[1]
    if not isinstance(devices, int) or devices < 1:
        raise UserError(
            Problem(
                "trainer.devices",
                f"{devices!r} cannot be counted from here",
                "write the number of devices per node, e.g. trainer.devices=4",
            )
        )
    # On a cluster a missing GPU must be an error there, never a silent night on the CPU.
    return Resources(num_nodes, devices, "cpu" if accelerator == "cpu" else "gpu")


def replicas(strategy: Mapping[str, Any] | None, ranks: int) -> int:
    """How many of the ranks take different data.

    All of them, but for a strategy that has `stages`: those of one pipeline share a batch.

    Args:
        strategy: The config's node.
        ranks: The world size.
    """
    if not strategy or "stages" not in strategy:
        return ranks
    stages = strategy["stages"] or ranks
    # Whether it divides is for validation to say.
    return max(1, ranks // stages) if isinstance(stages, int) and stages > 0 else ranks
