"""What the tests of `scale` take for measured."""

from __future__ import annotations

from typing import Any

from distdl.benchmark import PHASES
from distdl.scaling import members


def bench(world: int = 1, nodes: int = 1, rate: float = 100.0, **more: Any) -> dict[str, Any]:
    """What a benchmark writes: 12 samples a device, `rate` img/s of all devices."""
    batch = more.pop("batch", 12 * world)
    split = {**dict.fromkeys(PHASES, 0.0), "forward": 0.04, "backward": 0.08}
    split["communication"] = more.pop("communication", 0.0)
    step = batch / rate
    side = {
        "images_per_second": rate,
        "windows": [0.9 * rate, rate, 1.05 * rate],
        "step_seconds": {"median": step, "p95": step},
        "split": split,
    }
    link = {"bandwidth": 1e9, "latency": 1e-5, "ranks": world} if world > 1 else None
    return {
        "device": "a CPU",
        "real": side,
        "held": side,
        "link": link,
        "communication": more.pop("trace", {"calls": 3.0} if world > 1 else None),
        "epoch_samples": 36_000,
        "setting": {
            "strategy": more.pop("strategy", "ddp" if world > 1 else "single"),
            "strategy_node": {"bucket_cap_mb": 25},
            "nodes": nodes,
            "devices_per_node": world // nodes,
            "world_size": world,
            "global_batch": batch,
            "comm_hook": more.pop("comm_hook", "none"),
            "precision": "32-true",
        },
        "model": {"gradient_bytes": 44_000_000, "mfu": 0.1},
        "verdict": {
            "bound": more.pop("bound", "compute-bound"),
            "why": "",
            "remedies": ["do this"],
        },
    }


def member(found: dict[str, Any], name: str = "ddp", *modes: str) -> Any:
    setting = found["setting"]
    return members.Member(
        name,
        setting["nodes"],
        setting["devices_per_node"],
        list(modes or ("weak",)),
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        found,
    )
