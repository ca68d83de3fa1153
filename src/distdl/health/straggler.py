"""Which rank makes the others wait, and in which part of a step.

Ranks that train together take equally long for a step: whoever comes early to a collective waits in
it for the last one. So each rank measures, on its own clock, how long each part of a step takes; a
collective inside a phase begins a new part of it. These times are added up from the moment at which
all ranks had the same gradients. A rank that takes longer for a part while it is ahead of another
only waits for it. A rank that takes longer and falls behind is slow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from distdl.health.heartbeat import PHASES, StepTimes

STEPS = 10  # fewer steps give no verdict
# A smaller excess, in a step or as a share of one, is no verdict.
LEAST_MS = 5.0
LEAST_SHARE = 0.15
LINK_SHARE = 0.4  # of a step; sending the gradients may take less
MOST_PARTS = 8  # of a phase; further ones are counted as one
# What is compared, in the order of a step that begins when all ranks have the same gradients.
WORDS = {
    "optimizer": "the optimizer's step",
    "callbacks": "running callbacks",
    "checkpoint": "saving checkpoints",
    "data": "fetching data",
    "copy": "copying batches to the device",
    "forward": "the forward",
    "backward": "the backward",
}
# Nobody waits in these, so that they are compared also if the collectives are unknown.
ALONE = ("data", "copy")

# A part of a step: its phase, the number of collectives in it, and of those before the part.
Part = tuple[str, int, int]
_Phase = Annotated[str, Field(pattern=f"^({'|'.join(WORDS)})$")]
_Count = Annotated[int, Field(ge=0, strict=True)]
_Milliseconds = Annotated[FiniteFloat, Field(ge=0, le=1e8)]


class Slowdown(NamedTuple):
    """What slows the job down.

    Args:
        rank: None if it is the link between the ranks.
        phase: A key of WORDS, or "link".
        excess_ms: By how many milliseconds a step is longer than it need be.
        step_ms: A step, in milliseconds.
        sentence: For the user.
        host: Of the rank; "" if it is the link.
    """

    rank: int | None
    phase: str
    excess_ms: float
    step_ms: float
    sentence: str
    host: str = ""


class _Record(BaseModel):
    """What `record` has made on another host."""

    rank: _Count
    host: str = Field(pattern="^[A-Za-z0-9_.:-]+$", max_length=255)
    steps: int = Field(ge=STEPS, strict=True)
    parts: list[tuple[_Phase, _Count, _Count, _Milliseconds]] = Field(max_length=1000)

    def times(self) -> dict[Part, float]:
        return {(phase, count, index): ms for phase, count, index, ms in self.parts}


def record(steps: Sequence[StepTimes], collectives: Sequence[int]) -> dict[str, Any]:
    """How long this rank took for each part of a step.

    Args:
        steps: As RankHeartbeat has them.
        collectives: The nanoseconds (`time.time_ns`) at which those of the CPU were started, in
            this order; empty if they are unknown.

    Returns:
        The number of steps, and rows of a `Part` and its mean milliseconds per step. It can be
        written as JSON; the publisher adds its `rank` and `host`.
    """
    # The recorder has forgotten the collectives of older steps.
    kept = [step for step in steps if not collectives or step[0][1] >= collectives[0]]
    times: dict[Part, list[float]] = defaultdict(list)
    for step in kept:
        for phase, parts in _divided(step, collectives).items():
            for index, nanoseconds in enumerate(parts):
                times[phase, len(parts) - 1, index].append(nanoseconds / 1e6)
    rows = [[*part, round(_usual(each) / len(kept), 4)] for part, each in times.items()]
    return {"steps": len(kept), "parts": rows}


def _divided(step: StepTimes, collectives: Sequence[int]) -> dict[str, list[int]]:
    """The nanoseconds of each part of a step."""
    phases: dict[str, list[int]] = {}
    for (phase, begin), (_, end) in pairwise(step):
        inside = collectives[bisect_left(collectives, begin) : bisect_left(collectives, end)]
        first, *further = (b - a for a, b in pairwise((begin, *inside, end)))
        parts = phases.setdefault(PHASES[phase], [0])
        parts[-1] += first
        parts += further
    return {name: _few(parts) for name, parts in phases.items() if name in WORDS}


def _few(parts: list[int]) -> list[int]:
    """At most MOST_PARTS and the last one, in which the backward waits for the others."""
    if len(parts) <= MOST_PARTS + 1:
        return parts
    first = MOST_PARTS - 1
    return [*parts[:first], sum(parts[first:-1]), parts[-1]]


def _usual(times: Sequence[float]) -> float:
    """The sum of the times, without the longest tenth: a rare stall is no slow rank."""
    usual = sorted(times)[: len(times) - len(times) // 10 - 1]
    return sum(usual) * len(times) / max(len(usual), 1)


def verdict(records: Iterable[Any]) -> Slowdown | None:
    """What slows the job down, if anything does.

    Args:
        records: The newest of each rank, as they came over the wire. A damaged one is ignored.
    """
    ranks = {each.rank: each for each in map(_read, records) if each}
    if len(ranks) < 2:
        return None
    times = {rank: each.times() for rank, each in ranks.items()}
    step_ms = median(sum(each.values()) for each in times.values())
    # The last rank waits least, for nobody: in this time the gradients are sent.
    link_ms = min(map(_wait, times.values()))
    excess = _excess(times, link_ms)
    slowest = max(excess, key=lambda key: excess[key], default=(0, ""))
    slow_ms = excess.get(slowest, 0.0)
    if link_ms > max(slow_ms, LEAST_MS, LINK_SHARE * step_ms):
        sentence = (
            f"the link between the ranks is slow: {link_ms:.0f} ms of a step of {step_ms:.0f} ms "
            "pass after the last rank has started its last collective"
        )
        return Slowdown(None, "link", link_ms, step_ms, sentence)
    if slow_ms < max(LEAST_MS, LEAST_SHARE * step_ms):
        return None
    rank, phase = slowest
    sentence = (
        f"rank {rank} ({ranks[rank].host}) is slow: {WORDS[phase]} takes {slow_ms:.0f} ms longer "
        f"than on the other ranks, in a step of {step_ms:.0f} ms"
    )
    return Slowdown(rank, phase, slow_ms, step_ms, sentence, ranks[rank].host)


def _read(value: object) -> _Record | None:
    try:
        return _Record.model_validate(value)
    except ValidationError:
        return None


def _is_wait(part: Part) -> bool:
    """Whether it is the end of a backward, in which all gradients are sent and nothing else is
    done."""
    phase, count, index = part
    return phase == "backward" and 0 < count == index


def _wait(times: Mapping[Part, float]) -> float:
    """Milliseconds from the start of the backward's last collective to its end; 0: unknown."""
    return sum(ms for part, ms in times.items() if _is_wait(part))


def _excess(
    times: Mapping[int, Mapping[Part, float]], link_ms: float
) -> dict[tuple[int, str], float]:
    """By how many milliseconds each rank fell behind in each phase.

    Args:
        times: Of each rank.
        link_ms: How long gradients are sent; 0: unknown, like everything about collectives.
    """
    order = tuple(WORDS) if link_ms else ALONE
    parts = {part for each in times.values() for part in each if part[0] in order}
    passed, late = dict.fromkeys(times, 0.0), dict.fromkeys(times, 0.0)
    excess: dict[tuple[int, str], float] = defaultdict(float)
    for part in sorted(parts, key=lambda part: (order.index(part[0]), *part[1:])):
        if _is_wait(part):
            continue
        for rank, each in times.items():
            passed[rank] += each.get(part, 0.0)
        before = late
        late = {rank: _late(passed, rank) for rank in times}
        for rank in times:
            more = late[rank] - before[rank]
            # A part that begins with a collective may be longer because of the link.
            if more > (link_ms if part[2] else 0.0):
                excess[rank, part[0]] += more
    return excess


def _late(passed: Mapping[int, float], rank: int) -> float:
    """By how much a rank is behind the others."""
    return max(0.0, passed[rank] - median(ms for other, ms in passed.items() if other != rank))
