"""The numbers of a benchmark: from each rank's windows to one JSON file."""

from __future__ import annotations

import platform
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from distdl import batches
from distdl.benchmark import verdict
from distdl.benchmark.clock import COMMUNICATION, DATA, OTHER, PHASES
from distdl.benchmark.model import Counted
from distdl.build import Built
from distdl.callbacks.metrics import memory_gib
from distdl.callbacks.progress import remedy
from distdl.callbacks.timing import HELD, REAL, Timing
from distdl.config import plain

FILE = "benchmark.json"
SCHEMA = 1


@dataclass(frozen=True)
class Size:
    """Samples of a batch, how many ranks (or pipelines) take different ones, batches of a step."""

    batch: int
    shares: int
    accumulate: int

    @property
    def global_batch(self) -> int:
        return self.batch * self.shares * self.accumulate


def size(context: Built, timing: Timing) -> Size:
    """Of the run; a batch is measured where the data does not say how large it is."""
    resources = context.run.last_attempt().resources()  # type: ignore[union-attr]
    batch, shares, accumulate = batches.factors(context.config, resources)
    return Size(batch or timing.batch_size or 1, shares, accumulate)


def of_rank(timing: Timing, device: torch.device) -> dict[str, Any]:
    """What this rank measured, in plain values."""
    return {
        "device": device_name(device),
        "windows": [
            {
                "input": w.input,
                "seconds": w.seconds,
                "steps": [s.seconds for s in w.steps],
                "phases": {p: statistics.fmean(s.phases[p] for s in w.steps) for p in PHASES},
            }
            for w in timing.windows
        ],
        "memory_gib": peak_gib(device),
        "exposed": asdict(timing.exposed) if timing.exposed else None,
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''}"


def peak_gib(device: torch.device) -> float:
    """The most memory of the device so far; on the CPU, of this process."""
    if device.type == "cuda":
        return memory_gib(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20


def assemble(
    context: Built,
    timing: Timing,
    ranks: Sequence[dict[str, Any]],
    link: Mapping[str, float] | None,
    counted: tuple[Counted | None, str],
) -> dict[str, Any]:
    """The JSON file. Times are seconds, sizes bytes, shares 0 to 1 where a name says nothing else.

    Args:
        context: The built run.
        timing: Of this rank.
        ranks: What `of_rank` says on each, with `limits`.
        link: See `limits.measure_link`.
        counted: The model, or why it could not be counted.
    """
    config, sizes = context.config, size(context, timing)
    attempt = context.run.last_attempt()
    assert attempt is not None
    resources = attempt.resources()
    real, held = (side(ranks, kind, sizes) for kind in (REAL, HELD))
    exposed = communication(ranks)
    for one in (real, held):
        one["split"] = apart(one["split"], exposed)
    limits = {k: _mean(r["limits"][k] for r in ranks) for k in ("matrix_flops", "copy_bytes")}
    limits |= {k: ranks[0]["limits"][k] for k in ("dtype", "matrix_size")}
    found: dict[str, Any] = {
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
            "precision": str(config.trainer.get("precision") or "32-true"),
            "data": context.data,
            "batch": sizes.batch,
            "accumulate": sizes.accumulate,
            "global_batch": sizes.global_batch,
            "shares": sizes.shares,
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
        "model": use(counted, held, resources.world_size, limits),
    }
    found["verdict"] = asdict(judged(found, context))
    found["ranks"] = list(ranks)
    return found


def strategy_name(config: Any, world_size: int) -> str:
    """As `strategy=` names it, as far as a node tells; what `auto` comes to."""
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


def side(ranks: Sequence[dict[str, Any]], kind: str, sizes: Size) -> dict[str, Any]:
    """One kind of input over all ranks: a step lasts as long as on its slowest rank."""
    windows = [[w for w in rank["windows"] if w["input"] == kind] for rank in ranks]
    seconds = [max(w["seconds"] for w in same) for same in zip(*windows, strict=True)]
    steps = sorted(
        max(same)
        for one in zip(*windows, strict=True)
        for same in zip(*(w["steps"] for w in one), strict=True)
    )
    count = len(windows[0][0]["steps"])
    rates = [sizes.global_batch * count / s for s in seconds]
    return {
        "images_per_second": statistics.median(rates),
        "windows": rates,
        "step_seconds": {
            "median": statistics.median(steps),
            "p95": steps[min(len(steps) - 1, int(0.95 * len(steps)))],
            "mean": _mean(steps),
            "count": len(steps),
        },
        "split": {p: _mean(w["phases"][p] for rank in windows for w in rank) for p in PHASES},
    }


def communication(ranks: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What the traces saw, as the mean of the ranks."""
    if any(rank["exposed"] is None for rank in ranks):
        return None
    parts = [rank["exposed"] for rank in ranks]
    return {
        "busy_seconds": _mean(p["busy"] for p in parts),
        "calls": _mean(p["calls"] for p in parts),
        "exposed": {name: _mean(p["phases"].get(name, 0.0) for p in parts) for name in PHASES},
    }


def apart(split: dict[str, float], seen: dict[str, Any] | None) -> dict[str, float]:
    """Takes exposed communication out of the phases in which it was found."""
    found = dict(split)
    for phase, seconds in (seen["exposed"] if seen else {}).items():
        if phase != COMMUNICATION:
            # The traced steps were slower: never more than there is.
            moved = min(seconds, found[phase])
            found[phase] -= moved
            found[COMMUNICATION] += moved
    return found


def use(
    counted: tuple[Counted | None, str],
    held: dict[str, Any],
    world_size: int,
    limits: dict[str, Any],
) -> dict[str, Any]:
    """How much of the device the model uses, with held input.

    `mfu`: model FLOPs over the measured matrix rate (Chowdhery et al. 2022, "PaLM", appendix B,
    https://arxiv.org/abs/2204.02311, with a measured rate in the place of the advertised one).
    """
    model, note = counted
    if model is None:
        return {"note": f"not counted: {note}", "mfu": None, "bandwidth_use": None}
    rate, least = held["images_per_second"] / world_size, model.least_bytes_per_sample
    return {
        **asdict(model),
        "note": note,
        "mfu": model.flops_per_sample * rate / limits["matrix_flops"],
        "bandwidth_use": least and least * rate / limits["copy_bytes"],
    }


def judged(found: dict[str, Any], context: Built) -> verdict.Verdict:
    real, held, setting, model = (found[key] for key in ("real", "held", "setting", "model"))
    whole = sum(held["split"].values())
    data = context.config.get("data") or {}
    return verdict.judge(
        # Medians of steps: one that was disturbed does not decide.
        lost_to_data=1 - held["step_seconds"]["median"] / real["step_seconds"]["median"],
        waiting=real["split"][DATA] / sum(real["split"].values()),
        communication=held["split"][COMMUNICATION] / whole if verdict.looked_at(found) else None,
        other=(held["split"][OTHER] + held["split"][DATA]) / whole,
        mfu=model["mfu"],
        bandwidth_use=model["bandwidth_use"],
        setting={
            **setting,
            "data_batch": data.get("batch_size"),
            "workers": data.get("num_workers"),
            "compile": context.config.model.get("compile", "unknown"),
        },
        data_remedy=remedy(context.datamodule),
    )


# What `status.json` and the last lines on the screen say; the rest is for MLflow.
MAIN = ("images_per_second", "step_ms", "share_data", "share_communication", "mfu")


def main_metrics(found: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in metrics(found).items() if k.split("/")[1] in MAIN}


def metrics(found: dict[str, Any]) -> dict[str, float]:
    """For MLflow: what one compares between runs."""
    real, held = found["real"], found["held"]
    whole = sum(real["split"].values())
    values = {
        "images_per_second": real["images_per_second"],
        "images_per_second_per_device": real["images_per_second"] / found["setting"]["world_size"],
        "images_per_second_held": held["images_per_second"],
        "step_ms": 1000 * real["step_seconds"]["median"],
        "step_ms_p95": 1000 * real["step_seconds"]["p95"],
        **{
            f"share_{phase}": real["split"][phase] / whole
            for phase in PHASES
            if phase != COMMUNICATION or verdict.looked_at(found)
        },
        "memory_gib": found["memory_gib"],
        "matrix_tflops": found["limits"]["matrix_flops"] / 1e12,
        "copy_gb_per_second": found["limits"]["copy_bytes"] / 1e9,
        "mfu": found["model"]["mfu"],
    }
    return {f"benchmark/{k}": float(v) for k, v in values.items() if v is not None}


def _mean(values: Any) -> float:
    return statistics.fmean(values)
