"""What keeps a step from being shorter, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPUTE, DATA, COMMUNICATION = "compute-bound", "data-bound", "communication-bound"
NOT_DATA = "not data-bound"  # and no more is known: nobody looked at the communication
# Below this share of the step neither data nor communication is worth a change.
WORTH = 0.1
# Above it the matrix units are well used.
GOOD_MFU = 0.5
# Share of the step in which nothing of it runs: small steps, slow Python.
MUCH_OTHER = 0.2


@dataclass(frozen=True)
class Verdict:
    """What binds, why one can say so, and the remedies, the first one first."""

    bound: str
    why: str
    remedies: list[str]


def looked_at(found: Mapping[str, Any]) -> bool:
    """Whether anything could see communication: a trace, or the phases of a pipeline.

    Args:
        found: What `task=benchmark` writes.
    """
    alone = found["setting"]["world_size"] == 1
    return bool(alone or found["communication"] or found["held"]["split"]["communication"])


def judge(
    *,
    lost_to_data: float,
    waiting: float,
    communication: float | None,
    other: float,
    mfu: float | None,
    bandwidth_use: float | None,
    setting: Mapping[str, Any],
    data_remedy: str,
) -> Verdict:
    """Which of the three.

    Args:
        lost_to_data: Share of the speed that real input costs against held input (0 to 1).
        waiting: Share of a step with real input in which it waits for its batch.
        communication: Share of a step with held input in which a rank only communicates; None: of
            several ranks, and not looked at.
        other: Share of it outside of forward, backward and optimizer.
        mfu: Of the measured matrix rate, or None.
        bandwidth_use: Of the measured copy bandwidth at least, or None.
        setting: `accelerator`, `precision`, `strategy` (name), `comm_hook`, `world_size`, `nodes`,
            `accumulate`, `workers` (of the loader), `compile` (None: the model has none).
        data_remedy: What to do if data binds.
    """
    seen = communication or 0.0
    if lost_to_data > WORTH and lost_to_data >= seen and waiting > lost_to_data / 2:
        why = (
            f"real input costs {100 * lost_to_data:.0f} % of the speed with a batch held ready; "
            f"{100 * waiting:.0f} % of a step waits for its batch"
        )
        return Verdict(DATA, why, [data_remedy])
    if communication is None:
        why = f"a step waits {100 * waiting:.0f} % for its batch; communication was not looked at"
        return Verdict(NOT_DATA, why, ["task.trace=3 sees how long ranks only communicate"])
    if seen > WORTH:
        why = (
            f"{100 * seen:.0f} % of a step passes in communication that no computation "
            "hides (waiting for the slowest rank included)"
        )
        return Verdict(COMMUNICATION, why, communication_remedies(setting))
    parts = []
    if mfu is not None:
        parts.append(f"{100 * mfu:.0f} % of the measured matrix rate")
    if bandwidth_use is not None and bandwidth_use >= 0.01:
        parts.append(f"at least {100 * bandwidth_use:.0f} % of the measured copy bandwidth")
    used = f"; it uses {' and '.join(parts)}" if parts else ""
    why = f"a step waits {100 * waiting:.0f} % for its batch and communicates unhidden for "
    why += f"{100 * seen:.0f} %{used}"
    remedies = compute_remedies(setting, other, mfu)
    if lost_to_data > WORTH:  # and most of it is no waiting
        fewer = "loader workers take cores from the training (data.num_workers=<fewer>), or "
        remedies.insert(
            0,
            f"real input costs {100 * lost_to_data:.0f} % of the speed, and waiting for it is only "
            f"{100 * waiting:.0f} %: {fewer if setting.get('workers') else ''}"
            "the machine was busy (the windows tell)",
        )
    return Verdict(COMPUTE, why, remedies)


def communication_remedies(setting: Mapping[str, Any]) -> list[str]:
    """The cheapest first: nothing here changes what is learned but the last."""
    found = []
    name = setting.get("strategy")
    if setting.get("nodes", 1) > 1:
        found.append("scale up before out: fewer nodes with more devices each")
    if name == "pipeline":
        found.append("strategy.micro_batches=<more>: a smaller bubble")
        found.append("strategy.schedule=interleaved or zero_bubble")
        found.append("fewer stages: strategy.stages=<less>, the other devices as replicas")
        return found
    if name == "ddp" and setting.get("comm_hook") in (None, "none"):
        found.append("strategy.comm_hook=bf16: half the bytes (gradients rounded to bfloat16)")
    if name in ("fsdp", "deepspeed_zero3"):
        found.append("strategy=ddp sends two thirds of the bytes, where the model fits a device")
    if setting.get("data_batch"):
        found.append(f"data.batch_size=<more than {setting['data_batch']}>: as many bytes, rarer")
    if name not in ("fsdp", "deepspeed_zero3"):  # which gather weights for every batch
        more = 2 * int(setting.get("accumulate") or 1)
        found.append(f"trainer.accumulate_grad_batches={more}: half as many exchanges")
    return found


def compute_remedies(setting: Mapping[str, Any], other: float, mfu: float | None) -> list[str]:
    found = []
    if other > MUCH_OTHER:
        found.append(
            f"{100 * other:.0f} % of a step is none of its parts: steps are too small for the "
            "device; data.batch_size=<more>"
        )
    if setting.get("accelerator") == "gpu" and str(setting.get("precision")).startswith("32"):
        found.append("trainer.precision=bf16-mixed")
    if setting.get("accelerator") == "gpu" and setting.get("compile") is False:
        found.append("model.compile=true")
    if mfu is not None and mfu >= GOOD_MFU:
        found.append("more devices: python -m distdl scale says what they bring")
    elif setting.get("data_batch"):
        found.append(f"data.batch_size=<more than {setting['data_batch']}>, while memory lasts")
    return found or ["more devices: python -m distdl scale says what they bring"]
