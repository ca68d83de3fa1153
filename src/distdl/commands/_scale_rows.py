"""What the measured members come to: efficiency, prediction, price, advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from distdl.benchmark.verdict import traced
from distdl.config import unit_of
from distdl.errors import UserError
from distdl.scaling import Link, Links, Prediction, Setting, predict
from distdl.scaling.setting import STRATEGIES

if TYPE_CHECKING:
    from distdl.commands._scale_members import Member

# An efficiency below it is worth advice.
GOOD = 0.9
# More of one device's speed than this no device has: one that was measured alone was slowed.
MOST = 1.05
DATA_BOUND = "data-bound"


@dataclass(frozen=True)
class Row:
    """One member in one mode.

    Args:
        unit: Of the rate: images or samples per second.
        rate: Of all devices, with real input: the median of the windows.
        spread: From the slowest to the fastest window, as a share of it.
        efficiency: Of one device's rate, what each still does; None: one device was not measured.
        communication: Share of a step in which a rank only communicates (held input); None: nobody
            looked.
        predicted: The same from one device's step and the measured link; None: not predicted.
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


@dataclass(frozen=True)
class Rented:
    """What a node costs.

    Args:
        name: Of the VM size.
        gpus: Of one VM; 0: it has none, and a node is a VM.
        price: USD per hour of one VM.
        bandwidth: Bytes per second between VMs, 0 where there is no fast network.
    """

    name: str
    gpus: int
    price: float | None
    bandwidth: float


def rows(
    measured: Sequence[Member], rented: Rented | None, between: Link | None, modes: Sequence[str]
) -> list[Row]:
    """A row for each member and mode, the smallest first."""
    base = next((m.found for m in measured if m.world_size == 1), None)
    links = links_of(measured, rented, between)
    found = []
    for mode in modes:
        for member in measured:
            if mode not in member.modes:
                continue
            own = member.found
            setting = own["setting"]
            rate = own["real"]["images_per_second"]
            found.append(
                Row(
                    strategy=member.strategy,
                    mode=mode,
                    nodes=member.nodes,
                    devices=member.devices,
                    global_batch=setting["global_batch"],
                    unit=unit_of(setting.get("data")),
                    rate=rate,
                    spread=(max(own["real"]["windows"]) - min(own["real"]["windows"])) / rate,
                    step_seconds=own["real"]["step_seconds"]["median"],
                    efficiency=rate / member.world_size / _rate(base) if base else None,
                    communication=share(own["held"], "communication") if traced(own) else None,
                    data_wait=share(own["real"], "data"),
                    bound=own["verdict"]["bound"],
                    predicted=prediction(base, own, links, per_node(measured, rented)),
                    price=price(own, rented),
                    remedies=tuple(own["verdict"]["remedies"]),
                )
            )
    return sorted(found, key=order)


def order(row: Row) -> tuple[bool, str, int]:
    """One device first, then strategy by strategy."""
    return row.world_size > 1, row.strategy, row.world_size


def dollars(price: float) -> str:
    return f"{price:,.2f}" if price >= 0.1 else f"{price:.2g}"


def _rate(found: dict[str, Any]) -> float:
    return found["real"]["images_per_second"]


def share(side: dict[str, Any], phase: str) -> float:
    return side["split"][phase] / sum(side["split"].values())


def per_node(measured: Iterable[Member], rented: Rented | None) -> int:
    """Devices of a full node."""
    return max([rented.gpus if rented else 0, *(member.devices for member in measured)])


def links_of(
    measured: Sequence[Member], rented: Rented | None, between: Link | None
) -> tuple[Link | None, Link | None]:
    """Inside a node and between nodes: as measured by the smallest member that has it.

    Between nodes: as told, else as measured, else as the VM's table says.
    """
    inside = None
    outside = between
    for member in sorted(measured, key=lambda m: m.world_size):
        link = member.found.get("link")
        if not link:
            continue
        seen = Link(link["bandwidth"], link["latency"])
        if member.nodes == 1:
            inside = inside or seen
        else:
            outside = outside or seen
    if outside is None and rented and rented.bandwidth:
        # Few microseconds: of InfiniBand (benchmarks/published.py says from where).
        outside = Link(rented.bandwidth, 2e-6)
    return inside or outside, outside


def setting_of(
    base: dict[str, Any],
    own: dict[str, Any],
    links: tuple[Link | None, Link | None],
    devices: int,
    world_size: int,
) -> Setting | None:
    """What `distdl.scaling` starts from: nothing of it was measured on several devices but links.

    Args:
        base: One device alone.
        own: Whose strategy and batch it is.
        links: Inside and between.
        devices: Of a full node.
        world_size: For which it is asked.
    """
    model, setting, (inside, between) = base["model"], own["setting"], links
    name, node = setting["strategy"], setting["strategy_node"]
    if name not in STRATEGIES or inside is None or model.get("gradient_bytes") is None:
        return None
    if between is None and world_size > devices:
        return None
    split = base["held"]["split"]
    # In strong scaling a device has a part of the batch, and is taken to need that part of the time
    part = setting["global_batch"] / setting["world_size"] / base["setting"]["global_batch"]
    hook = {"bf16": 0.5, "fp16": 0.5}.get(setting.get("comm_hook") or "", 1.0)
    more: dict[str, Any] = {}
    if node.get("bucket_cap_mb") and isinstance(node["bucket_cap_mb"], (int, float)):
        more["bucket_bytes"] = node["bucket_cap_mb"] * 2**20 * hook
    if name == "pipeline":
        stages = node.get("stages") or world_size
        schedule = node.get("schedule", "1f1b")
        several = schedule in ("interleaved", "zero_bubble")
        more |= {
            "stages": stages,
            "micro_batches": node.get("micro_batches"),
            "schedule": schedule,
            "pieces_per_stage": node.get("pieces_per_stage", 2) if several else 1,
        }
    return Setting(
        step_seconds=base["real"]["step_seconds"]["median"] * part,
        gradient_bytes=model["gradient_bytes"] * hook,
        weight_bytes=model["gradient_bytes"],
        links=Links(inside, between or inside),
        devices_per_node=devices,
        strategy=name,
        backward_share=split["backward"] / sum(split.values()),
        **more,
    )


def prediction(
    base: dict[str, Any] | None,
    own: dict[str, Any],
    links: tuple[Link | None, Link | None],
    devices: int,
    world_size: int | None = None,
) -> Prediction | None:
    """For the member's own size, or another."""
    count = world_size or own["setting"]["world_size"]
    if base is None or count == 1:
        return None
    try:
        setting = setting_of(base, own, links, devices, count)
        return predict(setting, count) if setting else None
    except UserError:  # so many devices do not fill nodes, or are no pipelines
        return None


def price(own: dict[str, Any], rented: Rented | None) -> float | None:
    """USD for an epoch on whole VMs."""
    if rented is None or rented.price is None or not own.get("epoch_samples"):
        return None
    setting = own["setting"]
    per = rented.gpus or setting["devices_per_node"]
    vms = max(setting["nodes"], -(-setting["world_size"] // per))
    return vms * rented.price * own["epoch_samples"] / _rate(own) / 3600


def advise(found: Sequence[Row]) -> list[str]:
    """What the rows say, the most useful first."""
    several = [r for r in found if r.world_size > 1 and r.efficiency is not None]
    said: list[str] = []
    if not several:
        return ["measure more than one device: --devices 1,2,4"]
    several = [r for r in several if not r.is_disturbed]
    slow = [r for r in several if r.bound == DATA_BOUND]
    if slow:
        said.append(f"input first, it binds at {at(slow[0])}: {slow[0].remedies[0]}")
    best = max(several, key=lambda r: (r.efficiency or 0, r.world_size), default=None)
    for mode in dict.fromkeys(r.mode for r in several):
        same = [r for r in several if r.mode == mode]
        inside = [r.efficiency or 0 for r in same if r.nodes == 1]
        across = [r.efficiency or 0 for r in same if r.nodes > 1]
        if inside and across and max(across) < max(inside) - 0.05:
            said.append(
                f"scale up before out ({mode}): {100 * max(inside):.0f} % inside a node, "
                f"{100 * max(across):.0f} % over several"
            )
    poor = [r for r in several if (r.efficiency or 0) < GOOD and (r.communication or 0) > 1 - GOOD]
    if poor:
        worst = min(poor, key=lambda r: r.efficiency or 0)
        said.append(
            f"{at(worst)} communicates {100 * (worst.communication or 0):.0f} % of a step: "
            + "; ".join(r for r in worst.remedies if not r.startswith("scale up"))
        )
    unseen = [r for r in several if r.communication is None]
    said += [
        f"{at(r)}: {r.remedies[0]}" for r in unseen if (r.efficiency or 0) < GOOD and r not in slow
    ]
    told = [*poor, *slow, *unseen]
    idle = [r for r in several if (r.efficiency or 0) < GOOD and r not in told]
    if idle:
        worst = min(idle, key=lambda r: r.efficiency or 0)
        said.append(
            f"{at(worst)} is at {100 * (worst.efficiency or 0):.0f} % without communication being "
            "the cause: devices that share cores, memory or power, or batches too small for them"
        )
    priced = [r for r in found if r.price is not None]
    if priced:
        cheap, fast = min(priced, key=lambda r: r.price or 0), max(priced, key=lambda r: r.rate)
        said.append(f"cheapest: {at(cheap)}, ${dollars(cheap.price or 0)} an epoch")
        if fast is not cheap:
            said.append(f"fastest: {at(fast)}, ${dollars(fast.price or 0)} an epoch")
    if best is not None:
        said.append(f"most efficient of several: {at(best)}, {100 * (best.efficiency or 0):.0f} %")
    return said


def disturbed(found: Sequence[Row]) -> list[str]:
    """Rows that no advice is given on."""
    return [
        f"{at(r)}: {100 * (r.efficiency or 0):.0f} % is a disturbed measurement, one device alone "
        "was slowed by something: measure again on a quiet machine, under another name="
        for r in found
        if r.is_disturbed
    ]


def at(row: Row) -> str:
    """As it is named in a sentence."""
    return f"{row.strategy} on {row.nodes} x {row.devices} ({row.mode})"
