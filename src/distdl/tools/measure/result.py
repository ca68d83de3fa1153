"""The numbers of a benchmark, from each rank's windows to one JSON file."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import torch
from omegaconf import DictConfig

from distdl.callbacks.metrics import memory_gib
from distdl.callbacks.progress import remedy
from distdl.config import batches
from distdl.config.recipe import plain
from distdl.config.schema import TrainerArguments
from distdl.tools.measure import COMMUNICATION, DATA, OTHER, PHASES, verdict
from distdl.tools.measure.model import Counted
from distdl.tools.measure.timing import HELD, REAL, Timing
from distdl.worker.build import Built

SCHEMA = 1
# `status.json` and the last lines on the screen show these; MLflow gets the others, too.
MAIN = ("images_per_second", "step_ms", "share_data", "share_communication", "mfu")


@dataclass(frozen=True)
class BatchSize:
    """Samples per batch, ranks (or pipelines) with different data, and batches per step."""

    batch: int
    shares: int
    accumulate: int

    @property
    def global_batch(self) -> int:
        return self.batch * self.shares * self.accumulate


def batch_size(context: Built, timing: Timing) -> BatchSize:
    """The run's batch size; if the config has none, that of the measured batches."""
    resources = context.run.last_attempt().resources()  # type: ignore[union-attr]
    batch, shares, accumulate = batches.factors(context.config, resources)
    return BatchSize(batch or timing.batch_size or 1, shares, accumulate)


def of_rank(timing: Timing, device: torch.device) -> dict[str, Any]:
    """What this rank measured, in plain values."""
    threads = torch.get_num_threads()
    name = f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"
    # The process's peak resident size; replaced below on a GPU.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    memory = peak / (2**30 if sys.platform == "darwin" else 2**20)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = memory_gib(device)
    windows = [
        {
            "input": window.input,
            "seconds": window.seconds,
            "steps": [step.seconds for step in window.steps],
            "phases": {p: fmean(step.phases[p] for step in window.steps) for p in PHASES},
            "host_paced": fmean(step.host_paced for step in window.steps),
        }
        for window in timing.windows
    ]
    exposed = asdict(timing.exposed) if timing.exposed else None
    return {"device": name, "windows": windows, "memory_gib": memory, "exposed": exposed}


def assemble(
    context: Built,
    timing: Timing,
    ranks: Sequence[dict[str, Any]],
    link: Mapping[str, float] | None,
    counted: tuple[Counted | None, str],
) -> dict[str, Any]:
    """The contents of the JSON file. Times are in seconds, sizes in bytes, and shares from 0 to 1,
    unless a name says otherwise.

    Args:
        timing: Of this rank.
        ranks: What `of_rank` returns on each rank, with `limits`.
        link: See `limits.measure_link`.
        counted: The model's counts, or why it could not be counted.
    """
    config = context.config
    sizes = batch_size(context, timing)
    exposed = communication(ranks)
    attempt = context.run.last_attempt()
    assert attempt is not None
    resources = attempt.resources()
    real, held = (side(ranks, kind, sizes, exposed) for kind in (REAL, HELD))
    limits = ranks[0]["limits"] | {
        key: fmean(r["limits"][key] for r in ranks) for key in ("matrix_flops", "copy_bytes")
    }
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "attempt": attempt.number,
        "time": time.time(),
        "device": ranks[0]["device"],
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "setting": {
            "strategy": strategy_name(config, resources.world_size),
            "accelerator": resources.accelerator,
            "nodes": resources.num_nodes,
            "devices_per_node": resources.devices,
            "world_size": resources.world_size,
            "precision": TrainerArguments.of(config.trainer).precision_name,
            "data": context.data,
            **asdict(sizes),
            "global_batch": sizes.global_batch,
            "comm_hook": (config.get("strategy") or {}).get("comm_hook"),
            "strategy_node": plain(config.strategy),
        },
        "epoch_samples": timing.epoch_batches and timing.epoch_batches * sizes.batch * sizes.shares,
        "real": real,
        "held": held,
        "communication": exposed,
        "memory_gib": max(r["memory_gib"] for r in ranks),
        "limits": limits,
        "link": link,
        "model": device_use(counted, held["images_per_second"] / resources.world_size, limits),
    }
    result["verdict"] = asdict(judged(result, context))
    result["ranks"] = list(ranks)
    return result


def strategy_name(config: DictConfig, world_size: int) -> str:
    """The option of the group `strategy`, derived from its node; `auto` is resolved."""
    node = plain(config.strategy)
    name = str(node.get("_target_", "")).split(".")[-1]
    known = {
        **dict.fromkeys(("auto", "single"), "ddp" if world_size > 1 else "single"),
        "DDPStrategy": "ddp",
        "FSDPStrategy": "fsdp",
        "PipelineStrategy": "pipeline",
        "LocalSGDStrategy": "local_sgd",
        "DeepSpeedStrategy": f"deepspeed_zero{node.get('stage', 2)}",
    }
    return known.get(name, name)


def side(
    ranks: Sequence[dict[str, Any]],
    kind: str,
    sizes: BatchSize,
    exposed: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One kind of input over all ranks: a step lasts as long as on its slowest rank.

    Args:
        exposed: See `communication`; it is subtracted from the phases in which it occurred.
    """
    each = [[w for w in rank["windows"] if w["input"] == kind] for rank in ranks]
    windows = list(zip(*each, strict=True))  # the ranks of each window
    lists = [zip(*(w["steps"] for w in window), strict=True) for window in windows]
    steps = sorted(max(step) for window in lists for step in window)
    samples = sizes.global_batch * len(windows[0][0]["steps"])
    rates = [samples / max(w["seconds"] for w in window) for window in windows]
    split = {p: fmean(w["phases"][p] for window in windows for w in window) for p in PHASES}
    for phase, seconds in (exposed["exposed"] if exposed else {}).items():
        if phase != COMMUNICATION:
            # The traced steps were slower, so never move more than the phase has.
            moved = min(seconds, split[phase])
            split[phase] -= moved
            split[COMMUNICATION] += moved
    paced = fmean(w["host_paced"] for window in windows for w in window)
    p95 = steps[min(len(steps) - 1, int(0.95 * len(steps)))]
    seconds = {"median": median(steps), "p95": p95, "mean": fmean(steps), "count": len(steps)}
    rate = median(rates)
    return {
        "images_per_second": rate,
        "windows": rates,
        "step_seconds": seconds,
        "split": split,
        "host_paced": paced,
    }


def communication(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What the traces show, averaged over the ranks."""
    parts = [rank["exposed"] for rank in ranks]
    if None in parts:
        return None
    busy, calls = (fmean(part[key] for part in parts) for key in ("busy", "calls"))
    exposed = {name: fmean(part["phases"].get(name, 0.0) for part in parts) for name in PHASES}
    return {"busy_seconds": busy, "calls": calls, "exposed": exposed}


def device_use(
    counted: tuple[Counted | None, str], rate: float, limits: dict[str, Any]
) -> dict[str, Any]:
    """How well the model uses the device, at `rate` samples per second on each device.

    `mfu`: model FLOPs over the measured matrix rate (Chowdhery et al. 2022, "PaLM", appendix B,
    https://arxiv.org/abs/2204.02311, with a measured rate instead of the advertised one).
    """
    model, note = counted
    if model is None:
        return {"note": f"not counted: {note}", "mfu": None, "bandwidth_use": None}
    least = model.least_bytes_per_sample
    return {
        **asdict(model),
        "note": note,
        "mfu": model.flops_per_sample * rate / limits["matrix_flops"],
        "bandwidth_use": least and least * rate / limits["copy_bytes"],
    }


def judged(result: dict[str, Any], context: Built) -> verdict.Verdict:
    real, held, model = (result[key] for key in ("real", "held", "model"))
    total = sum(held["split"].values())
    data = context.config.get("data") or {}
    return verdict.judge(
        # Medians, so that one disturbed step does not change the verdict.
        lost_to_data=1 - held["step_seconds"]["median"] / real["step_seconds"]["median"],
        waiting=real["split"][DATA] / sum(real["split"].values()),
        communication=held["split"][COMMUNICATION] / total if verdict.traced(result) else None,
        other=(held["split"][OTHER] + held["split"][DATA]) / total,
        host_paced=held["host_paced"] / total,
        mfu=model["mfu"],
        bandwidth_use=model["bandwidth_use"],
        setting={
            **result["setting"],
            "data_batch": data.get("batch_size"),
            "workers": data.get("num_workers"),
            "compile": context.config.model.get("compile", "unknown"),
        },
        data_remedy=remedy(context.datamodule),
    )


def metrics(result: dict[str, Any], names: Iterable[str] | None = None) -> dict[str, float]:
    """For MLflow: the numbers to compare between runs; only those in `names`, if given."""
    real, held = result["real"], result["held"]
    total = sum(real["split"].values())
    shares = {f"share_{phase}": real["split"][phase] / total for phase in PHASES}
    if not verdict.traced(result):
        del shares[f"share_{COMMUNICATION}"]
    rate = real["images_per_second"]
    values = {
        "images_per_second": rate,
        "images_per_second_per_device": rate / result["setting"]["world_size"],
        "images_per_second_held": held["images_per_second"],
        "step_ms": 1000 * real["step_seconds"]["median"],
        "step_ms_p95": 1000 * real["step_seconds"]["p95"],
        **shares,
        "memory_gib": result["memory_gib"],
        "matrix_tflops": result["limits"]["matrix_flops"] / 1e12,
        "copy_gb_per_second": result["limits"]["copy_bytes"] / 1e9,
        "mfu": result["model"]["mfu"],
    }
    return {
        f"benchmark/{name}": float(value)
        for name, value in values.items()
        if value is not None and (names is None or name in names)
    }
