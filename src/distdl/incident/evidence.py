"""What the ranks of a failed job left behind: errors/rank_N.json and health/rank_N.json.

It comes from files that may be damaged, or from somebody else: a field of another type counts as
absent, and no text has control characters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from distdl.incident.words import STOPPED
from distdl.runs import failures
from distdl.runs.directory import Attempt, read_json
from distdl.util.tail import plain
from distdl.util.wording import plural

LARGEST = 1 << 20  # bytes of a file that is read
MOST = 100_000  # ranks
LENGTH = 300  # characters of a text
STEP = ("data", "copy", "forward", "backward", "optimizer")  # the phases of a training step
ABORTED = "aborted"  # in a collective, by gloo, which may be the mistake of another rank
AGREED = ("module.log", "module.log_dict", "module.all_gather")  # see `heartbeat.seen_in`
# gloo and torch say so if ranks make different calls. The mistake may be another rank's.
MISMATCH = r"op\.preamble\.length <= op\.nbytes|Detected mismatch between collectives"


def one_line(value: object) -> str:
    """Text of a file as one line, without control characters."""
    text = " ".join(plain(value).split())
    return text if len(text) <= LENGTH else f"{text[: LENGTH - 3]}..."


Text = Annotated[str, AfterValidator(one_line)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class Collective(BaseModel):
    """A collective that a rank has started, its `seq`-th. `sizes` are the shapes of its inputs."""

    op: Text = ""
    seq: Count | None = None
    sizes: list[Annotated[list[Count], Field(max_length=16)]] = []
    where: Text = ""

    def __str__(self) -> str:
        values = sum(map(math.prod, self.sizes))
        where = f" ({self.where})" if self.where else ""
        size = f" of {values} {plural('value', values)}" if self.sizes else ""
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
    memory: dict[Text, Count] = {}
    disk: dict[Text, Count] = {}


class Sight(Place, frozen=True):
    """A rank as it was when the job failed, or as another rank last heard of it (then `fresh` is
    False if it was silent); or one of its loader's workers. `age`: seconds without progress.
    `others`: of how many ranks it heard that are not among its `peers`."""

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
    enqueued: int = -1
    collective: Collective | None = None
    last: Collective | None = None
    peers: dict[str, Sight] = {}
    others: Annotated[int, Field(ge=0, le=MOST)] = 0

    @property
    def heard(self) -> int:
        """Of how many ranks it heard."""
        return self.others + sum(peer.fresh for peer in self.peers.values())

    @property
    def busy_worker(self) -> Sight:
        """The worker that it waited for, in a line of the user's code; empty if there is none."""
        return next((w for w in self.workers if w.where and self.phase == "data"), Sight())

    @property
    def stopped_worker(self) -> Sight | None:
        """The worker that it waited for, if a signal has stopped that."""
        stopped = (worker for worker in self.workers if worker.process in STOPPED)
        return next(stopped, None) if self.phase == "data" else None

    @property
    def alone(self) -> bool:
        """Whether it was in a call of Lightning's that all ranks have to make."""
        return self.action in AGREED


def sight_of(fields: Mapping[str, Any]) -> Sight:
    """The contents of a file, without the fields that are damaged."""
    try:
        return Sight.model_validate(fields)
    except ValidationError as error:
        damaged = {each["loc"][0] for each in error.errors()}
        return sight_of({key: value for key, value in fields.items() if key not in damaged})


@dataclass(frozen=True)
class Rank:
    """What is known of one rank.

    Args:
        sight: How it was seen; of a rank that left nothing, what the others last heard of it.
        error: The failure that it recorded (`distdl.runs.failures`); empty if none.
        seen: Whether `sight` is from its own file.
    """

    sight: Sight
    error: dict[str, Any]
    seen: bool

    @property
    def left(self) -> bool:
        """Whether it left anything."""
        return self.seen or bool(self.error)

    @cached_property
    def text(self) -> str:
        """The messages of its exception, and of those that led to it; "" if it has none."""
        if self.sight.how == ABORTED or self.error.get("type") == failures.HANG:
            return ""
        if not self.error:
            return "Killed: its process was gone" if self.sight.how == "died" else ""
        trace = str(self.error.get("traceback")).splitlines()
        chain = [line for line in trace if line[:1].strip() and not line.startswith("Traceback ")]
        return "\n".join([f"{self.error['type']}: {self.error['message']}", *chain])

    @cached_property
    def waits(self) -> bool:
        """Whether it only waited for others, or lost them."""
        inside = self.seen and self.sight.collective
        if self.text:
            return bool(self.error.get("lost_peer") or re.search(MISMATCH, self.text))
        return bool(self.error.get("waiting") or inside) and self.sight.process not in STOPPED

    @property
    def inside(self) -> Collective | None:
        """The collective that it waited in."""
        return (self.sight.collective or self.sight.last) if self.seen and self.waits else None

    @property
    def moment(self) -> tuple[int, int]:
        """How far it was in the training: its step, and the phase of that."""
        return self.sight.step or 0, (*STEP, self.sight.phase).index(self.sight.phase)

    @property
    def call(self) -> tuple[object, ...]:
        """Which collective it waited in, and when."""
        inside = self.inside or Collective()
        return self.moment, inside.op, str(inside.sizes)


def ranks_of(attempt: Attempt) -> list[Rank]:
    """What is known of each rank. Damaged files, links and pipes are left out."""
    errors = {e["rank"]: e for e in failures.recorded(attempt.errors) if 0 <= e["rank"] < MOST}
    sights = dict[int, Sight]()
    rows = attempt.ranks()[:MOST]
    heard = {str(row.rank): sight_of(row._asdict()) for row in rows}
    for path in attempt.path.glob("health/rank_*.json"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= LARGEST:
            sight = sight_of(read_json(path))
            if path.stem == f"rank_{sight.rank}" and 0 <= sight.rank < MOST:
                sights[sight.rank] = sight
                heard |= sight.peers
    sizes = [len(rows), *(sight.world_size for sight in sights.values())]
    ranks = []
    for rank in range(max([1, *sizes, *(number + 1 for number in (*errors, *sights))])):
        error = errors.get(rank, {})
        sight = sights.get(rank) or heard.get(str(rank)) or Sight()
        recorded = sight_of(error)
        where = sight.busy_worker.where or recorded.where or sight.where
        place = {"rank": rank, "host": sight.host or recorded.host, "where": where}
        ranks.append(Rank(sight.model_copy(update=place), error, rank in sights))
    return ranks
