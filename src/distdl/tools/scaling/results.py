"""Rows of a scaling table, from the measured members: efficiency, prediction, price."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distdl.config.recipe import unit_of
from distdl.strategies.pipeline.balance import SEVERAL_PIECES
from distdl.tools.measure.verdict import traced
from distdl.tools.scaling import Link, Links, Prediction, Setting, predict
from distdl.tools.scaling.setting import STRATEGIES
from distdl.util.errors import UserError

if TYPE_CHECKING:
    from distdl.tools.scaling.members import Member

# Above this efficiency, the measurement of one device alone was disturbed.
MOST = 1.05
DATA_BOUND = "data-bound"


@dataclass(frozen=True)
class ScalingRow:
    """One member in one mode.

    Args:
        unit: Of the rate: images or samples per second.
        rate: Of all devices together, with real input: the median of the windows.
        spread: From the slowest to the fastest window, as a share of the rate.
        efficiency: The rate per device, as a share of one device's rate alone; None: one device was
            not measured.
        communication: Share of a step in which a rank only communicates (held input); None:
            communication was not traced.
        predicted: From one device's step and the measured link; None: not predicted.
        price: Of an epoch, in USD; None: unknown.
    """

    strategy: str
    mode: str
    nodes: int
    devices: int
    global_batch: int
    unit: str
    rate: float
    spread: float
    step_seconds: float
    efficiency: float | None
    communication: float | None
    data_wait: float
    bound: str
    predicted: Prediction | None
    price: float | None
    remedies: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return self.nodes * self.devices

    @property
    def is_disturbed(self) -> bool:
        return (self.efficiency or 0) > MOST

    def __str__(self) -> str:
        """In a sentence."""
        return f"{self.strategy} on {self.nodes} x {self.devices} ({self.mode})"


@dataclass(frozen=True)
class Rented:
    """The VM size that the prices are for."""

    name: str
    gpus: int  # of one VM; 0: each node is one VM
    price: float | None  # USD per hour
    bandwidth: float  # bytes per second between VMs; 0: there is no fast network


def rented_of(vm: str | None, spot: bool, launcher: Mapping[str, Any]) -> Rented | None:
    """The VM size whose price counts: `vm`, or the launcher's."""
    from distdl.launchers.azureml import vm_sizes

    name = vm or launcher.get("vm_size")
    if not name:
        if spot:
            raise UserError.at(
                "--spot",
                what="needs a VM size, and the launcher has none",
                remedy="name a VM size too: --vm Standard_ND40rs_v2",
                code="incomplete",
            )
        return None
    size = vm_sizes.find(name)
    if size is None and not vm:
        return None  # training works, but the price is unknown
    if size is None:
        raise UserError.at(
            "--vm",
            what=f"no VM size {name!r} is known",
            remedy=vm_sizes.suggest(name),
            code="wrong-choice",
        )
    spot = spot or (not vm and launcher.get("tier") in vm_sizes.SPOT)
    cost = size.spot_price_per_hour if spot else size.price_per_hour
    return Rented(size.name, size.gpus, cost, size.infiniband_gbps * 1e9 / 8)


def rows(
    measured: Sequence[Member], rented: Rented | None, between: Link | None, modes: Sequence[str]
) -> list[ScalingRow]:
    """A row for each member and mode: first one device, then sorted by strategy."""
    base = next((m.result for m in measured if m.world_size == 1), None)
    alone = base["real"]["images_per_second"] if base else None
    links = links_of(measured, rented, between)
    devices = per_node(measured, rented)
    made = []
    for mode, member in itertools.product(modes, measured):
        if mode not in member.modes:
            continue
        result = member.result
        setting, real = result["setting"], result["real"]
        rate = real["images_per_second"]
        made.append(
            ScalingRow(
                strategy=member.strategy,
                mode=mode,
                nodes=member.nodes,
                devices=member.devices,
                global_batch=setting["global_batch"],
                unit=unit_of(setting.get("data")),
                rate=rate,
                spread=(max(real["windows"]) - min(real["windows"])) / rate,
                step_seconds=real["step_seconds"]["median"],
                efficiency=rate / member.world_size / alone if alone else None,
                communication=share(result["held"], "communication") if traced(result) else None,
                data_wait=share(real, "data"),
                bound=result["verdict"]["bound"],
                predicted=prediction(base, result, links, devices),
                price=price(result, rented),
                remedies=tuple(result["verdict"]["remedies"]),
            )
        )
    return sorted(made, key=lambda row: (row.world_size > 1, row.strategy, row.world_size))


def dollars(price: float) -> str:
    return f"{price:,.2f}" if price >= 0.1 else f"{price:.2g}"


def share(side: dict[str, Any], phase: str) -> float:
    return side["split"][phase] / sum(side["split"].values())


def per_node(measured: Iterable[Member], rented: Rented | None) -> int:
    """Devices of a full node."""
    return max([rented.gpus if rented else 0, *(member.devices for member in measured)])


def links_of(
    measured: Sequence[Member], rented: Rented | None, between: Link | None
) -> tuple[Link | None, Link | None]:
    """The links inside a node and between nodes, as measured by the smallest member that has them.
    Between nodes, the user's value comes first, and the VM size's value last."""
    inside = None
    for member in sorted(measured, key=lambda m: m.world_size):
        if link := member.result.get("link"):
            seen = Link(link["bandwidth"], link["latency"])
            if member.nodes == 1:
                inside = inside or seen
            else:
                between = between or seen
    if between is None and rented and rented.bandwidth:
        # A few microseconds, as of InfiniBand (benchmarks/published.py names the source).
        between = Link(rented.bandwidth, 2e-6)
    return inside or between, between


def setting_of(
    base: dict[str, Any],
    result: dict[str, Any],
    links: tuple[Link | None, Link | None],
    devices: int,
    world_size: int,
) -> Setting | None:
    """The input of `distdl.tools.scaling` for a number of devices. `base` is the result of one
    device alone, `result` gives the strategy and the batch, and `devices` fill a node. Of the
    measurements on several devices only the links (inside a node, between nodes) are used."""
    model = base["model"]
    setting = result["setting"]
    inside, between = links
    name, node = setting["strategy"], setting["strategy_node"]
    if name not in STRATEGIES or inside is None or model.get("gradient_bytes") is None:
        return None
    if between is None and world_size > devices:
        return None
    split = base["held"]["split"]
    # In strong scaling a device has a part of the batch, and is assumed to need the same part of
    # the time.
    batch = setting["global_batch"] / setting["world_size"]
    part = batch / base["setting"]["global_batch"]
    # A hook that halves the precision halves the bytes.
    sent = 0.5 if setting.get("comm_hook") in ("bf16", "fp16") else 1.0

    more: dict[str, Any] = {}
    bucket = node.get("bucket_cap_mb")
    if bucket and isinstance(bucket, (int, float)):  # else it is "auto"
        more["bucket_bytes"] = bucket * 2**20 * sent
    if name == "pipeline":
        schedule = node.get("schedule", "1f1b")
        more["schedule"] = schedule
        more["stages"] = node.get("stages") or world_size
        more["micro_batches"] = node.get("micro_batches")
        more["pieces_per_stage"] = (
            node.get("pieces_per_stage", 2) if schedule in SEVERAL_PIECES else 1
        )
    return Setting(
        step_seconds=base["real"]["step_seconds"]["median"] * part,
        gradient_bytes=model["gradient_bytes"] * sent,
        weight_bytes=model["gradient_bytes"],
        links=Links(inside, between or inside),
        devices_per_node=devices,
        strategy=name,
        backward_share=split["backward"] / sum(split.values()),
        **more,
    )


def prediction(
    base: dict[str, Any] | None,
    result: dict[str, Any],
    links: tuple[Link | None, Link | None],
    devices: int,
    world_size: int | None = None,
) -> Prediction | None:
    """The prediction for the size of the member's result, or for another one."""
    count = world_size or result["setting"]["world_size"]
    if base is None or count == 1:
        return None
    try:
        setting = setting_of(base, result, links, devices, count)
        return predict(setting, count) if setting else None
    except UserError:  # this number does not fill nodes or pipelines
        return None


def price(result: dict[str, Any], rented: Rented | None) -> float | None:
    """USD per epoch on whole VMs."""
    if rented is None or rented.price is None or not result.get("epoch_samples"):
        return None
    setting = result["setting"]
    per = rented.gpus or setting["devices_per_node"]
    vms = max(setting["nodes"], -(-setting["world_size"] // per))
    return vms * rented.price * result["epoch_samples"] / result["real"]["images_per_second"] / 3600


def further(
    measured: Sequence[Member], rented: Rented | None, between: Link | None, most: int
) -> dict[str, dict[int, Prediction]]:
    """Strategy to devices to prediction, up to `most` devices (weak scaling)."""
    base = next((m.result for m in measured if m.world_size == 1), None)
    links = links_of(measured, rented, between)
    devices = per_node(measured, rented)
    predicted: dict[str, dict[int, Prediction]] = {}
    for member in measured:
        if member.world_size == 1 or "weak" not in member.modes or member.strategy in predicted:
            continue
        guesses = {}
        for exponent in range(1, most.bit_length()):
            guess = prediction(base, member.result, links, devices, 2**exponent)
            if guess:
                guesses[2**exponent] = guess
        if guesses:
            predicted[member.strategy] = guesses
    return predicted
