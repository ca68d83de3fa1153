"""What limits the speed of a step, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPUTE, DATA, COMMUNICATION = "compute-bound", "data-bound", "communication-bound"
HOST = "host-bound"  # the host starts the device's kernels too slowly
NOT_DATA = "not data-bound"  # nothing more is known, since communication was not traced
# Below this share of the step neither data nor communication is worth a change.
WORTH = 0.1
# If more of the step than this is paced by the host, starting kernels faster makes it faster.
MUCH_HOST = 0.5
# Above this, the matrix units are well used.
GOOD_MFU = 0.5
# These reduce gradients or gather weights for every batch, and send half as much again as DDP.
PARTITIONED = ("fsdp", "deepspeed_zero2", "deepspeed_zero3")
# If more of the step is outside all phases, the steps are too small, or Python code is slow.
MUCH_OTHER = 0.2


@dataclass(frozen=True)
class Verdict:
    """What limits the step, why, and the remedies, the best one first."""

    bound: str
    why: str
    remedies: list[str]


def traced(result: Mapping[str, Any]) -> bool:
    """Whether `task=benchmark` measured communication: by a trace, or by a pipeline's phases."""
    alone = result["setting"]["world_size"] == 1
    return bool(alone or result["communication"] or result["held"]["split"]["communication"])


def judge(
    *,
    lost_to_data: float,
    waiting: float,
    communication: float | None,
    other: float,
    host_paced: float,
    mfu: float | None,
    bandwidth_use: float | None,
    setting: Mapping[str, Any],
    data_remedy: str,
) -> Verdict:
    """Decides whether data, communication, the host or computation limits the step.

    Args:
        lost_to_data: Share of the speed that real input costs against held input (0 to 1).
        waiting: Share of a step with real input in which it waits for its batch.
        communication: Share of a step with held input in which a rank only communicates; None:
            there are several ranks, and communication was not traced.
        other: Share of that step outside forward, backward and optimizer.
        host_paced: Share of that step in which the device waits for the host (`clock.Step`).
        mfu, bandwidth_use: Share of the measured matrix rate that is used, and a lower bound of the
            share of the copy bandwidth; or None.
        setting: `accelerator`, `precision`, `strategy` (name), `comm_hook`, `nodes`, `accumulate`,
            `data_batch`, `workers` (of the loader), `compile` (None: no such argument).
        data_remedy: What to do if data is the limit.
    """
    exposed = communication or 0.0
    lost = f"{100 * lost_to_data:.0f} % of the speed"
    waits = f"{100 * waiting:.0f} %"
    if lost_to_data > WORTH and lost_to_data >= exposed and waiting > lost_to_data / 2:
        why = f"real input costs {lost}; waiting for the batch takes {waits} of a step"
        return Verdict(DATA, why, [data_remedy])
    if communication is None:
        why = f"waiting for the batch takes {waits} of a step; communication was not traced"
        return Verdict(NOT_DATA, why, ["task.trace=3 measures how long ranks only communicate"])
    if exposed > WORTH:
        why = (
            f"{100 * exposed:.0f} % of a step is communication that no computation hides "
            "(waiting for the slowest rank included)"
        )
        return Verdict(COMMUNICATION, why, communication_remedies(setting))
    parts = []
    if mfu is not None:
        parts.append(f"{100 * mfu:.0f} % of the measured matrix rate")
    if bandwidth_use is not None and bandwidth_use >= 0.01:
        parts.append(f"at least {100 * bandwidth_use:.0f} % of the measured copy bandwidth")
    why = (
        f"waiting for the batch takes {waits} of a step, and unhidden communication "
        f"{100 * exposed:.0f} %"
    )
    if parts:
        why += f"; the model uses {' and '.join(parts)}"
    if host_paced > MUCH_HOST:
        text = f"for {100 * host_paced:.0f} % of a step the device waits for the host, which "
        return Verdict(HOST, f"{text}starts its kernels; {why}", host_remedies(setting))
    remedies = compute_remedies(setting, other, mfu)
    if lost_to_data > WORTH:  # and most of it is not waiting
        cause = "the machine was busy (compare the windows)"
        if setting.get("workers"):
            workers = "loader workers take cores from the training (fewer data.num_workers)"
            cause = f"{workers}, or {cause}"
        remedies.insert(0, f"real input costs {lost}, and waiting for it is only {waits}: {cause}")
    return Verdict(COMPUTE, why, remedies)


def communication_remedies(setting: Mapping[str, Any]) -> list[str]:
    """The cheapest first. Those that enlarge the global batch change what the model learns.

    The measured share includes waiting for the slowest rank, and shows no single link.
    """
    name = setting.get("strategy")
    remedies = []
    if setting.get("nodes", 1) > 1:
        remedies.append(
            "scale up before out, if the link between nodes is the limit (python -m distdl scale "
            "measures it): fewer nodes with more devices each"
        )
    if name == "pipeline":
        return [
            *remedies,
            "more strategy.micro_batches: a smaller bubble",
            "strategy.schedule=interleaved or zero_bubble",
            "fewer strategy.stages, the other devices as replicas",
        ]
    hooked = setting.get("comm_hook") not in (None, "none")
    if name == "ddp" and not hooked and setting.get("precision") not in ("16-true", "bf16-true"):
        remedies.append("strategy.comm_hook=bf16: half the bytes (gradients rounded to bfloat16)")
    if name in PARTITIONED:
        remedies.append("strategy=ddp sends two thirds of the bytes, where the model fits a device")
    if batch := larger_batch(setting):
        remedies.append(f"{batch}: as many bytes, less often")
    if name not in PARTITIONED:
        more = 2 * int(setting.get("accumulate") or 1)
        remedies.append(f"trainer.accumulate_grad_batches={more}: half as many exchanges")
    return remedies


def larger_batch(setting: Mapping[str, Any]) -> str:
    """The override for twice the batch; empty if there is no number of samples."""
    batch = setting.get("data_batch")
    return f"data.batch_size={2 * batch}" if isinstance(batch, int) and batch > 0 else ""


def host_remedies(setting: Mapping[str, Any]) -> list[str]:
    """Fewer kernels, kernels that are started together, and longer ones."""
    remedies = []
    compiled = setting.get("compile")
    if compiled is False:
        remedies.append("model.compile=true: fewer kernels")
    elif compiled in (True, "default") and int(setting.get("accumulate") or 1) == 1:
        remedies.append("model.compile=reduce-overhead: CUDA graphs start many kernels at once")
    if batch := larger_batch(setting):
        remedies.append(f"{batch}: each kernel works longer")
    return remedies or ["a larger batch, or fewer and larger operations in training_step"]


def compute_remedies(setting: Mapping[str, Any], other: float, mfu: float | None) -> list[str]:
    remedies = []
    if other > MUCH_OTHER:
        text = f"{100 * other:.0f} % of a step is outside forward, backward and optimizer"
        remedies.append(f"{text}: steps are too small for the device; a larger data.batch_size")
    on_gpu = setting.get("accelerator") == "gpu"
    if on_gpu and str(setting.get("precision")).startswith("32"):
        remedies.append("trainer.precision=bf16-mixed")
    if on_gpu and setting.get("compile") is False:
        remedies.append("model.compile=true")
    good = mfu is not None and mfu >= GOOD_MFU
    batch = larger_batch(setting)
    if batch and not good:
        remedies.append(f"{batch}, while memory lasts")
    elif good or not remedies:
        remedies.append("more devices: python -m distdl scale measures what they bring")
    return remedies
