"""Step time and efficiency on n devices, from one device's step and two links.

Weak scaling: each device keeps the batch whose step was measured. For strong scaling, give the step
time of the smaller batch.

    step(n) = step(1) + overhead + exposed communication + bubble + waiting

Sources: `distdl.tools.scaling.links` (collectives, overlap). What each strategy sends, and why
ZeRO-1 and 2 send as much as ZeRO-3, is explained at the top of `distdl.tools.measure.estimate`. The
bubble is computed by `distdl.strategies.pipeline.balance.bubble`. Waiting for the slowest of n
devices: E max <= sigma sqrt(2 ln n) for normal step times (Boucheron, Lugosi and Massart 2013,
"Concentration Inequalities", theorem 2.5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from distdl.strategies.pipeline.balance import bubble
from distdl.tools.scaling.links import Group, all_reduce, exposed, fastest
from distdl.tools.scaling.setting import Setting
from distdl.util.errors import UserError
from distdl.util.typed import FromOne, checked

# A loss below this share of the step is not reported.
SMALL = 0.005


@dataclass(frozen=True)
class Prediction:
    """The prediction for a number of devices.

    Args:
        step_seconds: Time of a step.
        efficiency: The speed of each device, as a share of one device's speed alone (0 to 1).
        communication_share: Share of the step in which devices wait for the network (0 to 1).
        communication_seconds: Time in which the network is busy, hidden or not.
        why: The reasons why the efficiency is below 100 %, the worst first.
    """

    step_seconds: float
    efficiency: float
    communication_share: float
    communication_seconds: float
    why: str


@dataclass(frozen=True)
class PredictedRow:
    """A row of a table: a prediction, or why there is none."""

    devices: int
    prediction: Prediction | None
    missing: str = ""


@dataclass(frozen=True)
class _Loss:
    """Seconds by which a step is longer, and the reason; for communication also its own time."""

    seconds: float
    why: str
    sending: float | None = None


def predict(setting: Setting, num_devices: int) -> Prediction:
    """The step on `num_devices` devices.

    Raises:
        UserError: `num_devices` is not a number, or does not divide into nodes or pipelines.
    """
    num_devices = checked(FromOne, num_devices, "num_devices")
    group = _group(setting, num_devices)
    if num_devices == 1:
        return Prediction(setting.step_seconds, 1.0, 0.0, 0.0, "one device")
    losses = [_Loss(setting.overhead_seconds, "overhead of any step with several devices")]
    if setting.strategy == "pipeline":
        losses += _pipeline(setting, group, num_devices)
    else:
        losses += _data_parallel(setting, group)
    late = setting.spread_seconds * math.sqrt(2 * math.log(num_devices))
    losses.append(_Loss(late, f"waiting for the slowest of {num_devices}"))
    seconds = setting.step_seconds + sum(loss.seconds for loss in losses)
    sent = [loss for loss in losses if loss.sending is not None]
    reasons = [
        f"{loss.why}: {100 * loss.seconds / seconds:.1f} %"
        for loss in sorted(losses, key=lambda loss: -loss.seconds)
        if loss.seconds > SMALL * seconds
    ]
    return Prediction(
        step_seconds=seconds,
        efficiency=setting.step_seconds / seconds,
        communication_share=sum(loss.seconds for loss in sent) / seconds,
        communication_seconds=sum(loss.sending or 0.0 for loss in sent),
        why="; ".join(reasons) or "all of it hides behind the computation",
    )


def table(setting: Setting, counts: Iterable[int]) -> list[PredictedRow]:
    """A row for each number of devices, with the reason where there is no prediction."""
    rows = []
    for count in counts:
        try:
            rows.append(PredictedRow(count, predict(setting, count)))
        except UserError as error:
            rows.append(PredictedRow(count, None, error.problems[0].what))
    return rows


def _sent(parts: int, seconds: float, window: float, why: str) -> _Loss:
    """`parts` messages of `seconds` each, overlapped by a computation of `window` seconds."""
    return _Loss(exposed(parts, seconds, window), why, parts * seconds)


def _data_parallel(setting: Setting, group: Group) -> Iterator[_Loss]:
    parts = setting.buckets
    backward = setting.backward_share * setting.step_seconds
    reduce, name = _all_reduce(setting, setting.gradient_bytes / parts, group)
    weights = setting.gradient_bytes if setting.weight_bytes is None else setting.weight_bytes
    # An all-gather and a reduce-scatter are half an all-reduce each [R].
    gather = _all_reduce(setting, weights / parts, group)[0] / 2
    where = _where(group, name)
    if setting.strategy in ("fsdp", "deepspeed_zero3"):
        forward = setting.step_seconds - backward
        yield _sent(parts, gather, forward, f"gathering weights for the forward {where}")
        both = gather + reduce / 2
        yield _sent(parts, both, backward, f"weights and gradients during the backward {where}")
        return
    yield _sent(parts, reduce, backward, f"gradients that wait {where}")
    if setting.strategy.startswith("deepspeed"):
        gathering = parts * gather  # nothing hides it
        yield _Loss(gathering, f"gathering weights after the step {where}", gathering)


def _pipeline(setting: Setting, group: Group, count: int) -> Iterator[_Loss]:
    stages = setting.stages
    micro = setting.micro_batches or 4 * setting.stages
    pieces, working = setting.pieces_per_stage, setting.step_seconds
    idle = bubble(setting.schedule, [1.0] * stages, pieces, micro)
    yield _Loss(working / (1 - idle) - working, f"bubble of {stages} stages, {micro} micro-batches")
    if stages > 1:
        # A pipeline gets the batch of all its devices, and each of its cuts passes all of it.
        neighbours = setting.devices_per_node % stages == 0
        link = setting.links.inside if neighbours else setting.links.between
        hop = link.latency + stages * setting.activation_bytes / micro / link.bandwidth
        filling = 2 * (stages - 1) * hop  # the first micro-batch's way in, the last one's back
        slower = micro * max(0.0, pieces * hop - working / micro)
        where = "inside a node" if neighbours else "between nodes"
        why = f"activations between stages {where}"
        yield _Loss(filling + slower, why, 2 * micro * pieces * hop)
    if count > stages:
        # A stage's gradients are complete only after the last micro-batch's backward.
        window = setting.backward_share * working / micro
        share = setting.gradient_bytes / stages
        parts = max(1, math.ceil(share / setting.bucket_bytes))
        reduce, name = _all_reduce(setting, share / parts, group)
        why = f"gradients of {count // stages} pipelines that wait {_where(group, name)}"
        yield _sent(parts, reduce, window, why)


def _all_reduce(setting: Setting, size: float, group: Group) -> tuple[float, str]:
    if setting.algorithm == "fastest":
        return fastest(size, group, setting.links)
    return all_reduce(size, group, setting.links, setting.algorithm), setting.algorithm


def _where(group: Group, algorithm: str) -> str:
    return "inside a node" if group.nodes == 1 else f"between {group.nodes} nodes ({algorithm})"


def _group(setting: Setting, count: int) -> Group:
    """The devices that average gradients with each other."""
    stages = setting.stages if setting.strategy == "pipeline" else 1
    per_node = min(setting.devices_per_node, count)
    full = count // per_node * per_node
    if count != full:
        raise UserError.at(
            "num_devices",
            what=f"{count} devices do not fill nodes of {per_node}",
            remedy=f"{full} or {full + per_node}",
            code="indivisible",
        )
    if count % stages:
        raise UserError.at(
            "num_devices",
            what=f"{count} devices do not divide into pipelines of {stages} stages",
            code="indivisible",
        )
    # Consecutive ranks are the stages of one pipeline (strategies/pipeline/stage_rules.py).
    together = per_node // stages if per_node % stages == 0 else 1
    return Group(count // stages, together, sharing=per_node // together)
