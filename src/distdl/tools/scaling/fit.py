"""The actual rates of a machine's links, from a few measured steps.

Measurements inside one node give two numbers: the bandwidth of one device there, and the overhead
of any step with several devices. Measurements over several nodes, if there are any, give the
bandwidth between nodes. Otherwise that bandwidth stays as the setting has it.

The fit minimises the squares of relative errors. It considers no bandwidth above the setting's, and
takes the highest of those that fit equally well: if all communication is hidden, every bandwidth
fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from distdl.tools.scaling.links import Link
from distdl.tools.scaling.predict import predict
from distdl.tools.scaling.setting import Setting
from distdl.util.errors import Problem, UserError
from distdl.util.typed import Above0, FromOne, checked

SLOWEST = 1e-4  # bandwidth considered, as a share of the setting's
CANDIDATES = 400
EQUAL = 1e-9  # relative squared errors closer than this are called equal


@dataclass(frozen=True)
class Fit:
    """The result of a fit.

    Args:
        setting: With the bandwidths and the overhead that fit best.
        errors: Devices to predicted / measured throughput, less 1, for the fitted measurements.
        notes: What the measurements could not determine.
    """

    setting: Setting
    errors: Mapping[int, float]
    notes: tuple[str, ...]


def fit(setting: Setting, measured: Mapping[int, float]) -> Fit:
    """Fits bandwidths and overhead.

    Args:
        setting: Its bandwidths are upper limits (the hardware's); its `step_seconds` is not used.
        measured: Devices to seconds of a step at the same batch per device. One device is required,
            and one number of several devices that fits in a node.

    Raises:
        UserError: Too little was measured, or a time is not a positive number.
    """
    measured = dict(sorted(checked(dict[FromOne, Above0], measured, "measured").items()))
    inside = {n: s for n, s in measured.items() if 1 < n <= setting.devices_per_node}
    across = {n: s for n, s in measured.items() if n > setting.devices_per_node}
    problems = []
    if 1 not in measured:
        problems.append(
            Problem(
                "measured",
                what="one device is missing",
                remedy="measure one device, too",
                code="incomplete",
            )
        )
    if not inside:
        problems.append(
            Problem(
                "measured",
                what="several devices of one node are missing",
                remedy=f"measure 2 to {setting.devices_per_node} devices in one node",
                code="incomplete",
            )
        )
    if problems:
        raise UserError(*problems)
    alone = replace(setting, step_seconds=measured[1], overhead_seconds=0.0)

    def with_inside(bandwidth: float) -> Setting:
        link = Link(bandwidth, setting.links.inside.latency)
        candidate = replace(alone, links=replace(setting.links, inside=link))
        return replace(candidate, overhead_seconds=_overhead(candidate, inside))

    def with_between(bandwidth: float) -> Setting:
        link = Link(bandwidth, setting.links.between.latency)
        return replace(fitted, links=replace(fitted.links, between=link))

    notes = []
    fitted = _best(with_inside, setting.links.inside.bandwidth, inside)
    if len(inside) == 1:
        reason = "one number of devices in a node cannot tell overhead from bandwidth"
        notes.append(f"{reason}: the whole loss counts as overhead")
    if across:
        fitted = _best(with_between, setting.links.between.bandwidth, across)
    else:
        notes.append("nothing was measured between nodes: that link keeps its given bandwidth")
    errors = {n: s / predict(fitted, n).step_seconds - 1 for n, s in measured.items()}
    return Fit(fitted, errors, tuple(notes))


def _overhead(setting: Setting, measured: Mapping[int, float]) -> float:
    """The best overhead for this bandwidth: the weighted mean of the missing time, at least 0."""
    weights = {n: 1 / s**2 for n, s in measured.items()}
    missing = sum(weights[n] * (s - predict(setting, n).step_seconds) for n, s in measured.items())
    return max(0.0, missing / sum(weights.values()))


def _best(make: Callable[[float], Setting], limit: float, measured: Mapping[int, float]) -> Setting:
    """The setting with the smallest error, for bandwidths up to `limit`."""

    def error(bandwidth: float) -> float:
        setting = make(bandwidth)
        return sum((predict(setting, n).step_seconds / s - 1) ** 2 for n, s in measured.items())

    low = SLOWEST * limit
    high = limit
    for _ in range(2):  # first over the whole range, then around the best
        candidates = np.geomspace(high, low, CANDIDATES)
        errors = np.array([error(float(b)) for b in candidates])
        best = int(np.argmax(errors <= errors.min() + EQUAL))
        high = candidates[max(0, best - 1)]
        low = candidates[min(CANDIDATES - 1, best + 1)]
    return make(float(candidates[best]))
