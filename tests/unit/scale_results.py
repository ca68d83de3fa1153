"""Results of measurements for the tests of `scale`."""

from distdl.benchmark import PHASES
from distdl.scaling import members

PARTS = {"bandwidth": 1e9, "latency": 1e-5}


def bench(world=1, nodes=1, rate=100.0, batch=0, communication=0.0, bound="compute-bound", **more):
    """What a benchmark writes: 12 samples a device, `rate` img/s of all devices."""
    batch = batch or 12 * world
    split = {**dict.fromkeys(PHASES, 0.0), "forward": 0.04, "backward": 0.08}
    split["communication"] = communication
    seconds = {"median": batch / rate, "p95": batch / rate}
    side = {"images_per_second": rate, "windows": [0.9 * rate, rate, 1.05 * rate]}
    side |= {"step_seconds": seconds, "split": split}
    setting = {"strategy": "ddp" if world > 1 else "single", "comm_hook": "none", **more}
    setting |= {"strategy_node": {"bucket_cap_mb": 25}, "precision": "32-true"}
    setting |= {"nodes": nodes, "devices_per_node": world // nodes}
    trace = setting.pop("trace", {"calls": 3.0} if world > 1 else None)
    return {
        "device": "a CPU",
        "real": side,
        "held": side,
        "link": {**PARTS, "ranks": world} if world > 1 else None,
        "communication": trace,
        "epoch_samples": 36_000,
        "setting": {**setting, "world_size": world, "global_batch": batch},
        "model": {"gradient_bytes": 44_000_000, "mfu": 0.1},
        "verdict": {"bound": bound, "why": "", "remedies": ["do this"]},
    }


def member(result, name="ddp", *modes):
    setting = result["setting"]
    size = (setting["nodes"], setting["devices_per_node"])
    return members.Member(name, *size, list(modes or ("weak",)), None, None, result)
