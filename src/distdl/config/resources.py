"""The number of ranks and their devices: `trainer.num_nodes` and `trainer.devices` -> `Resources`.

They are resolved before anything is submitted, and without torch. $CUDA_VISIBLE_DEVICES and
nvidia-smi show the GPUs of this machine.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distdl.config.degrees import EACH, division_of
from distdl.job import Resources
from distdl.util.errors import UserError

if TYPE_CHECKING:
    from distdl.config.schema import Size

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus() -> int:
    return len(visible())


def visible() -> list[str]:
    """The NVIDIA GPUs that a process started here would see, in order, named as
    $CUDA_VISIBLE_DEVICES names them: "5", "GPU-8f6e...", "MIG-5c23...". A UserError if this
    variable names GPUs, but CUDA would show none."""
    gpus, migs = _installed()
    text = os.environ.get(VISIBLE)
    if text is None:
        # With MIG, CUDA shows one instance unless the others are named.
        return migs[:1] or [str(index) for index in range(len(gpus))]

    def exists(name: str) -> bool:
        if name.isdigit():
            return int(name) < len(gpus)
        return any(uuid.startswith(name) for uuid in (*gpus, *migs))  # it may be abbreviated

    names = listed(text)
    if gpus:  # one that does not exist ends the list
        names = list(itertools.takewhile(exists, names))
    if not names and re.match(r"\s*(\d|GPU-|MIG-)", text):
        raise UserError.at(
            VISIBLE,
            what=f"{text!r} names GPUs, and CUDA shows none: one is named twice, or does not exist",
            remedy=f"export {VISIBLE}=0,1 (nvidia-smi -L lists them), or unset it",
            code="ambiguous",
        )
    return names


def listed(text: str) -> list[str]:
    """The names in a $CUDA_VISIBLE_DEVICES, as CUDA reads it.

    An invalid name (`-1`) ends the list, numbers and UUIDs do not mix, and a repeated name empties
    the list (CUDA C++ Programming Guide, "CUDA Environment Variables"; torch.cuda does the same).
    """
    names: list[str] = []
    first = ""
    for part in map(str.strip, text.split(",")):
        number = re.match(r"\+?(\d+)", part)
        form = "number" if number else part[:4]
        first = first or form
        if form != first or form not in ("number", "GPU-", "MIG-"):
            break
        names.append(str(int(number[1])) if number else part)
    return names if len(set(names)) == len(names) else []


def _installed() -> tuple[list[str], list[str]]:
    """The UUIDs of this machine's GPUs and of their MIG instances, from nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return [], []
    shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    gpus = re.findall(r"^GPU .*\(UUID: (.+?)\)", shown.stdout, re.M)
    return gpus, re.findall(r"^\s+MIG .*\(UUID: (.+?)\)", shown.stdout, re.M)


def resolve(asked: Size, *, local: bool, known: tuple[int, str] | None = None) -> Resources:
    """The size of the run.

    Args:
        asked: What the `trainer` section asks for.
        local: Whether the ranks start on this machine; another machine's devices are unknown here.
        known: Devices per node and accelerator of a machine that the launcher knows by its name.

    Raises:
        UserError: This machine does not have the size, or the size cannot be known from here.
    """
    accelerator: str = asked.accelerator
    devices = asked.devices
    num_nodes = asked.num_nodes
    if not local:
        return _elsewhere(accelerator, devices, num_nodes, known)
    if num_nodes != 1:
        raise UserError.at(
            "trainer.num_nodes",
            what=f"launcher=local is this one machine, and {num_nodes} nodes are asked for",
            remedy="write trainer.num_nodes=1, or choose a launcher that starts several nodes",
            code="unsupported",
        )
    names = visible() if accelerator in ("auto", "gpu", "cuda") else []
    gpus = len(names)
    shown_by = f"{VISIBLE}={os.environ[VISIBLE]!r}" if VISIBLE in os.environ else "nvidia-smi"
    if accelerator == "auto":
        apple = platform.system() == "Darwin" and platform.machine() == "arm64"
        without_nvidia = "mps" if apple else "cpu"
        accelerator = "gpu" if gpus else without_nvidia
    accelerator = "gpu" if accelerator == "cuda" else accelerator
    if accelerator == "gpu" and not gpus:
        raise UserError.at(
            "trainer.accelerator",
            what=f"a GPU is asked for, and this machine shows none (see {shown_by})",
            remedy="write trainer.accelerator=cpu, or add debug=cpu for a short run on the CPU",
            code="not-enough",
        )
    if isinstance(devices, (list, tuple)):
        ids = _chosen(devices, names, accelerator, shown_by)
        return Resources(1, len(devices), accelerator, ids)
    if devices in ("auto", -1, None):
        devices = gpus if accelerator == "gpu" else 1
    if accelerator == "gpu" and devices > gpus:
        raise UserError.at(
            "trainer.devices",
            what=f"{devices} are asked for, and this machine shows {gpus} (see {shown_by})",
            remedy=f"write trainer.devices={gpus}",
            code="not-enough",
        )
    return Resources(1, int(devices), accelerator)


def _chosen(
    indices: Sequence[int], names: Sequence[str], accelerator: str, shown_by: str
) -> tuple[str, ...]:
    """The visible GPUs that a list in `trainer.devices` chooses by index, as Lightning does."""
    if accelerator != "gpu":
        none = f", as no GPU is visible (see {shown_by})" * (accelerator == "cpu" and not names)
        what = f"a list chooses GPUs, and trainer.accelerator is {accelerator}{none}"
        remedy = f"write trainer.devices={len(indices)}"
    elif len(set(indices)) < len(indices):
        what = f"{list(indices)} names a GPU twice"
        remedy = f"write trainer.devices=[{','.join(map(str, sorted(set(indices))))}]"
    elif not all(0 <= index < len(names) for index in indices):
        what = (
            f"{list(indices)} is asked for; ids count the {len(names)} GPUs visible "
            f"(see {shown_by}), from 0 to {len(names) - 1}"
        )
        remedy = f"write trainer.devices={len(names)} for all of them"
    else:
        return tuple(names[index] for index in indices)
    raise UserError.at("trainer.devices", what=what, remedy=remedy, code="out-of-range")


def _elsewhere(
    accelerator: str, devices: object, num_nodes: int, known: tuple[int, str] | None
) -> Resources:
    """The size of a job on other machines, which cannot be asked; see `resolve`."""
    if known and devices in ("auto", -1, None):
        devices = known[0] if accelerator != "cpu" else 1
    if known and accelerator == "auto":
        accelerator = known[1]
    if not isinstance(devices, int) or devices < 1:
        raise UserError.at(
            "trainer.devices",
            what=f"{devices!r} cannot be counted from here",
            remedy="write the number of devices per node, e.g. trainer.devices=4",
            code="unreadable",
        )
    # Never "auto" on a cluster: a missing GPU must be an error there, not a training on the CPU.
    return Resources(num_nodes, devices, "cpu" if accelerator == "cpu" else "gpu")


def cpu_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loader_workers(cores: int) -> int:
    """The default number of loader workers for a rank with this number of CPU cores: one or two
    remain for the training process, and more than 16 workers do not feed a GPU faster."""
    return min(16, max(1, cores - (1 if cores <= 8 else 2)))


def replicas(strategy: Mapping[str, Any] | None, ranks: int, nodes: int = 1) -> int:
    """The number of shares of the data: one for each rank, or one for all ranks that work on the
    same samples: a pipeline, or a tensor-parallel group."""
    return division_of(strategy).shares(strategy or {}, ranks, nodes)


def share_kind(strategy: Mapping[str, Any] | None, shares: int, ranks: int) -> str:
    """What takes one of the shares of `replicas`, in the singular."""
    division = EACH if shares == ranks else division_of(strategy)
    return division.degrees[0].one
