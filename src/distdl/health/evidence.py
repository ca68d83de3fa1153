"""What the ranks of a failed job left behind: errors/rank_N.json and health/rank_N.json.

It comes from files that may be damaged, or from somebody else: a field of another type counts as
absent, and no text has control characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from distdl.runs import failures
from distdl.runs.directory import Attempt, read_json
from distdl.util.errors import UserError
from distdl.util.tail import plain

LARGEST = 1 << 20  # bytes of a file that is read
MOST = 100_000  # ranks
LENGTH = 300  # characters of a text
STOPPED = ("T", "t")  # states of a process: by a signal, by a debugger
# gloo and torch say so if ranks make different calls. The mistake may be another rank's.
MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives")


def one_line(value: object) -> str:
    """Text of a file as one line, without control characters."""
    text = " ".join(plain(value).split())
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 3]}..."


Text = Annotated[str, AfterValidator(one_line)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Collective(BaseModel):
    """A collective that a rank has started. `sizes` are the shapes of its inputs."""

    op: Text = ""
    sizes: list[Annotated[list[Count], Field(max_length=16)]] = []
    where: Text = ""

    def __str__(self) -> str:
        values, where = sum(map(math.prod, self.sizes)), f" ({self.where})" if self.where else ""
        size = f" of {values} value{'s' * (values != 1)}" if self.sizes else ""
        return f"{self.op}{size}{where}"


class Place(BaseModel, frozen=True):
    """Where a rank was. `samples` are the indices of its batch in the data set, `where` is a line
    of the user's code, `memory` and `disk` are bytes by name."""

    rank: int = -1
    host: Text = ""
    step: Count | None = None
    epoch: Count | None = None
    samples: list[Count] | None = None
    phase: Text = ""
    where: Text = ""
    memory: dict[Text, Count | None] = {}
    disk: dict[Text, Count] = {}


class Sight(Place, frozen=True):
    """A rank as it was when the job failed, or as another rank last heard of it (then `fresh` is
    False if it was silent); or one of its loader's workers. `age`: seconds without progress."""

    world_size: Annotated[int, Field(ge=1, le=MOST)] = 1
    pid: Count = 0
    how: Text = ""
    age: float = 0.0
    fresh: bool = True
    batch: Count | None = None
    action: Text = ""
    process: Text = ""
    wchan: Text = ""
    workers: list[Sight] = []
    enqueued: int | None = None
    collective: Collective | None = None
    last: Collective | None = None
    peers: dict[str, Sight] = {}


def sight_of(fields: Mapping[str, Any]) -> Sight:
    """The contents of a file, without the fields that are damaged."""
    try:
        return Sight.model_validate(fields)
    except ValidationError as error:
        damaged = {each["loc"][0] for each in error.errors()}
        return sight_of({key: value for key, value in fields.items() if key not in damaged})


@dataclass(frozen=True)
class Evidence:
    """What the ranks of an attempt left behind.

    Args:
        errors: Rank to its recorded failure (`distdl.runs.failures`).
        sights: Rank to what was seen of it.
        size: The number of ranks.
    """

    errors: Mapping[int, dict[str, Any]]
    sights: Mapping[int, Sight]
    size: int

    @property
    def ranks(self) -> list[int]:
        """Those that left anything."""
        return sorted({*self.errors, *self.sights})

    def seen(self, rank: int) -> Sight:
        """A rank as it was seen; of one that left nothing, what the others last heard of it."""
        heard = [s.peers[str(rank)] for s in self.sights.values() if str(rank) in s.peers]
        last = min(heard, key=lambda each: each.age, default=Sight(rank=rank))
        return self.sights.get(rank, last)

    def text(self, rank: int) -> str:
        """The messages of a rank's exception, and of those that led to it; "" if it has none."""
        error, seen = self.errors.get(rank), self.seen(rank)
        if seen.how == "died" and seen.collective:
            return ""  # gloo aborted it, which may be the mistake of another rank
        if error is None or error["type"] == failures.HANG:
            return "Killed: its process was gone" if error is None and seen.how == "died" else ""
        trace = str(error.get("traceback")).splitlines()
        chain = [line for line in trace if line[:1].strip() and not line.startswith("Traceback ")]
        return "\n".join([f"{error['type']}: {error['message']}", *chain])

    def waits(self, rank: int) -> bool:
        """Whether a rank only waited for others, or lost them."""
        error, seen = self.errors.get(rank, {}), self.seen(rank)
        if text := self.text(rank):
            return bool(error.get("lost_peer") or MISMATCH.search(text))
        return seen.process not in STOPPED and bool(error.get("waiting") or seen.collective)

    def waiting(self) -> list[int]:
        return [rank for rank in self.ranks if self.waits(rank)]

    def inside(self) -> dict[int, Collective]:
        """The collective of each rank that waited."""
        seen = {rank: self.seen(rank) for rank in self.waiting()}
        return {rank: each for rank, s in seen.items() if (each := s.collective or s.last)}

    def host(self, rank: int) -> str:
        return self.seen(rank).host or one_line(self.errors.get(rank, {}).get("host") or "")

    def where(self, rank: int) -> str:
        """The user's line in which its loader's worker was, or the rank itself."""
        seen = self.seen(rank)
        lines = [worker.where for worker in seen.workers if seen.phase == "data"]
        lines += [self.errors.get(rank, {}).get("where") or seen.where]
        return one_line(next(filter(None, lines), ""))


def evidence_of(attempt: Attempt) -> Evidence:
    """What the ranks of an attempt left behind. Damaged files, links and pipes are left out."""
    errors = {e["rank"]: e for e in failures.recorded(attempt.errors) if 0 <= e["rank"] < MOST}
    sights = dict[int, Sight]()
    for path in attempt.path.glob("health/rank_*.json"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST:
            sight = sight_of(read_json(path))
            if path.stem == f"rank_{sight.rank}" and 0 <= sight.rank < MOST:
                sights[sight.rank] = sight
    sizes = [*(sight.world_size for sight in sights.values()), *(r + 1 for r in (*errors, *sights))]
    with suppress(UserError):
        sizes.append(min(attempt.resources().world_size, MOST))
    return Evidence(errors, sights, max(sizes, default=1))
