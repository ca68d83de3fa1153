"""What to do about the sizes that were measured: one rule per piece of advice, in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from distdl.tools.scaling.results import DATA_BOUND, ScalingRow, dollars

# Below this efficiency, advice is given.
GOOD = 0.9
# By how much less efficient several nodes are than one, if one should be filled first.
CLEARLY = 0.05
Rule = Callable[["Sizes"], Iterator[str]]


class Sizes:
    """The rows of a table, sorted by what holds them back.

    Args:
        rows: All that were measured.

    Attributes:
        several: Those of several devices that were compared with one device, undisturbed.
        waiting: Of these, those whose input is too slow.
        poor: Those that are not efficient enough, the worst first.
        sending: The poor ones that communicate for a long part of a step.
        untraced: Those whose communication was not measured.
        unexplained: The poor ones that are none of the above.
    """

    def __init__(self, rows: Sequence[ScalingRow]) -> None:
        self.rows = rows
        self.several = [r for r in compared(rows) if not r.is_disturbed]
        self.waiting = [r for r in self.several if r.bound == DATA_BOUND]
        self.poor = sorted((r for r in self.several if efficiency(r) < GOOD), key=efficiency)
        self.sending = [r for r in self.poor if (r.communication or 0) > 1 - GOOD]
        self.untraced = [r for r in self.several if r.communication is None]
        explained = [*self.sending, *self.waiting, *self.untraced]
        self.unexplained = [r for r in self.poor if r not in explained]


def advise(rows: Sequence[ScalingRow]) -> list[str]:
    """Advice from the rows, the most useful first."""
    if not compared(rows):
        return ["measure more than one device: --devices 1,2,4"]
    sizes = Sizes(rows)
    return [line for rule in RULES for line in rule(sizes)]


def input_first(sizes: Sizes) -> Iterator[str]:
    """Nothing else helps while the devices wait for data."""
    if sizes.waiting:
        first = sizes.waiting[0]
        yield f"input first: it limits {first}: {first.remedies[0]}"


def up_before_out(sizes: Sizes) -> Iterator[str]:
    """Where a step costs more between nodes than inside one."""
    for mode in dict.fromkeys(r.mode for r in sizes.several):
        same = [r for r in sizes.several if r.mode == mode]
        inside = max((efficiency(r) for r in same if r.nodes == 1), default=0.0)
        across = max((efficiency(r) for r in same if r.nodes > 1), default=0.0)
        if inside and across and across < inside - CLEARLY:
            difference = f"{percent(inside)} inside a node, {percent(across)} over several"
            yield f"scale up before out ({mode}): {difference}"


def less_communication(sizes: Sizes) -> Iterator[str]:
    if sizes.sending:
        worst = sizes.sending[0]
        remedies = [r for r in worst.remedies if not r.startswith("scale up")]
        busy = percent(worst.communication or 0.0)
        yield f"{worst} communicates {busy} of a step: {'; '.join(remedies)}"


def trace_communication(sizes: Sizes) -> Iterator[str]:
    """Why a row is poor cannot be said before its communication is measured."""
    for row in sizes.untraced:
        if row in sizes.poor and row not in sizes.waiting:
            yield f"{row}: {row.remedies[0]}"


def another_cause(sizes: Sizes) -> Iterator[str]:
    if sizes.unexplained:
        worst = sizes.unexplained[0]
        yield (
            f"{worst} is at {percent(efficiency(worst))}, and communication is not the cause: "
            "devices may share cores, memory or power, or batches may be too small"
        )


def prices(sizes: Sizes) -> Iterator[str]:
    priced = [r for r in sizes.rows if r.price is not None]
    if not priced:
        return
    cheapest = min(priced, key=lambda r: r.price or 0.0)
    fastest = max(priced, key=lambda r: r.rate)
    yield f"cheapest: {cheapest}, ${dollars(cheapest.price or 0.0)} an epoch"
    if fastest is not cheapest:
        yield f"fastest: {fastest}, ${dollars(fastest.price or 0.0)} an epoch"


def most_efficient(sizes: Sizes) -> Iterator[str]:
    if sizes.several:
        best = max(sizes.several, key=lambda r: (efficiency(r), r.world_size))
        yield f"most efficient of several: {best}, {percent(efficiency(best))}"


# The most useful first.
RULES: tuple[Rule, ...] = (
    input_first,
    up_before_out,
    less_communication,
    trace_communication,
    another_cause,
    prices,
    most_efficient,
)


def disturbed(rows: Sequence[ScalingRow]) -> list[str]:
    """Messages about rows whose measurement was disturbed; they get no advice."""
    return [
        f"{row}: {percent(efficiency(row))} means that something slowed the measurement of one "
        "device alone: measure again on a quiet machine, under another name="
        for row in rows
        if row.is_disturbed
    ]


def compared(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    """Rows of several devices that can be compared with one device."""
    return [r for r in rows if r.world_size > 1 and r.efficiency is not None]


def efficiency(row: ScalingRow) -> float:
    return row.efficiency or 0.0


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
