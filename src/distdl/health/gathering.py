"""What a rank hears of all others: a short text, which one of them makes of the pulses of all.

With a thousand ranks, no store can answer each of them about each other one. So the text has only
what a rank needs while it waits: how long others may take, and who is silent.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

STALE_S = 3.0  # a rank that was silent for so long is not excused
PAUSE_S = 2.0  # a longer time without a look: this process, or the machine, was stopped
NAMED = 16  # silent ranks in the text
# What a report needs of a pulse. The rest is for the rank's monitor.
FIELDS = ("rank", "host", "step", "epoch", "batch", "phase", "action", "where", "age", "fresh")


@dataclass(frozen=True)
class Heard:
    """What is known of all ranks.

    Args:
        by, number: Which rank has gathered it, and its how many-th text this is.
        longest: Seconds that a rank may take that waits for no other one; infinite in a debugger.
        others: How many ranks were heard that are not in `pulses`.
        pulses: Of some ranks, those that were silent first. `fresh` is False if they were.
        hang: One of the ranks has hung: all of them end.
    """

    by: int = -1
    number: int = 0
    longest: float = 0.0
    others: int = 0
    pulses: dict[str, dict[str, Any]] = field(default_factory=dict)
    hang: bool = False

    @classmethod
    def read(cls, text: str) -> Heard:
        return cls(**json.loads(text))

    def text(self) -> str:
        return json.dumps(asdict(self))


class Gathering:
    """The pulses of all ranks, as one of them reads them again and again."""

    def __init__(self) -> None:
        self.pulses: dict[str, dict[str, Any]] = {}  # as `Heard` has them, of every rank
        self._numbers: dict[int, int] = {}
        self._silent: dict[int, float] = {}  # seconds
        self._looked = time.monotonic()

    def gather(self, pulses: Sequence[Mapping[str, Any]]) -> Heard:
        """`pulses` are those of all ranks, in their order; empty if a rank has published none."""
        now = time.monotonic()
        passed = min(now - self._looked, PAUSE_S)
        self._looked = now
        longest = 0.0
        for rank, pulse in enumerate(pulses):
            count = pulse.get("number", -1)
            same = self._numbers.get(rank) == count
            self._silent[rank] = self._silent.get(rank, 0.0) + passed if same else 0.0
            self._numbers[rank] = count
            fresh = self._silent[rank] < STALE_S
            known = {**pulse, "rank": rank, "fresh": fresh}
            self.pulses[str(rank)] = {key: known[key] for key in FIELDS if key in known}
            if fresh and pulse and not pulse["waits"]:
                limit = math.inf if pulse["limit"] is None else pulse["limit"]
                longest = max(longest, limit if pulse["age"] <= limit else 0.0)
        silent = {rank: each for rank, each in self.pulses.items() if not each["fresh"]}
        named = dict([*silent.items()][:NAMED])
        return Heard(longest=longest, others=len(pulses) - len(silent), pulses=named)
