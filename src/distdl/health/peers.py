"""What the ranks tell each other about their health, by the store with which they found each other.

A thread of its own does this, since the store of a host that is gone can block.
"""

from __future__ import annotations

import datetime
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from distdl.health import flight, straggler
from distdl.health.gathering import STALE_S, Gathering, Heard
from distdl.health.heartbeat import KEPT, RankHeartbeat
from distdl.ranks.environment import Environment

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger(__name__)

PUBLISH_S = 0.5  # seconds between two pulses
LISTEN_S = 1.5  # a rank that makes no progress for so long wants to hear of the others
OVERDUE_S = 1.0  # without a new text, another rank gathers
DEAF_S = 10.0  # no rank is excused if this one has heard nothing for so long
EXCHANGE_S = 10.0  # seconds between two records of how long steps take
ANSWER_S = datetime.timedelta(seconds=5)
PREFIX = "distdl/health"
HEARD = f"{PREFIX}/heard"


class Peers:
    """The other ranks of a job, as this one last heard of them.

    Every rank publishes its pulse, and reads one text: what was heard of all. One rank of those
    that wait makes this text. If it does not any more, because it goes on, is stopped or is gone,
    the first one that misses the text goes on with it.

    Args:
        environment, heartbeat: Of this rank.
        on_straggler: Called on rank 0 with each new verdict.
    """

    def __init__(
        self,
        environment: Environment,
        heartbeat: RankHeartbeat,
        on_straggler: Callable[[straggler.Slowdown], None],
    ) -> None:
        self.environment = environment
        self.heartbeat = heartbeat
        self.on_straggler = on_straggler
        self.hang = False  # of any rank
        self.pulse: Mapping[str, Any] = {}  # of this rank, to publish
        # The newest text, and what it says.
        self._text = ""
        self._heard = Heard()
        self._changed = time.monotonic()
        self._gathering: Gathering | None = None  # if it is this rank that gathers
        self._complete: set[str] = set()  # the kinds of which there is a record of each rank
        # The last exchange, and the steps until it.
        self._exchanged = time.monotonic()
        self._count = 0
        self._verdict: straggler.Slowdown | None = None
        self._warned: tuple[Any, ...] = ()
        self._stop = threading.Event()

    def start(self, store: Store | None = None) -> None:
        """Called in a process group. `store`: if not that of the group."""
        if store is None:
            from torch.distributed import distributed_c10d

            store = distributed_c10d._get_default_store().clone()
        store.set_timeout(ANSWER_S)
        threading.Thread(target=self._run, args=(store,), name="peers", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def excuse(self, limit: float) -> bool:
        """Whether another rank may take longer than `limit` seconds in what it does now."""
        deaf = time.monotonic() - self._changed > DEAF_S  # the store does not answer
        return not deaf and self._heard.longest > limit

    def paused(self, seconds: float) -> None:
        """Called if this process, or the machine, was stopped for so long."""
        self._changed += seconds

    @property
    def gathers(self) -> bool:
        """Whether it is this rank that gathers what is heard."""
        return self._gathering is not None

    def facts(self) -> dict[str, Any]:
        """What this rank has heard, for a report: see `Heard`."""
        if time.monotonic() - self._changed > STALE_S:
            return {"others": 0, "peers": {}}
        if self._gathering:
            return {"others": 0, "peers": self._gathering.pulses}
        return {"others": self._heard.others, "peers": self._heard.pulses}

    def talk(self, store: Store) -> None:
        """Publishes this rank's pulse, and reads what was heard of all: once."""
        if self.pulse:
            published = {key: value for key, value in self.pulse.items() if key != "pids"}
            store.set(f"{PREFIX}/pulse/{self.environment.rank}", json.dumps(published))
            self._listen(store)
            self._exchange(store)

    def _run(self, store: Store) -> None:
        with suppress(RuntimeError):  # the store has ended, with rank 0 or its agent
            while True:
                self.talk(store)
                if self._stop.wait(PUBLISH_S):
                    return

    def _listen(self, store: Store) -> None:
        """Reads what was heard, and gathers it if nobody else does."""
        if self._heard.hang:  # the last text
            return
        if self._gathering:
            self._gather(store, self._gathering)
        else:
            self._hear(store.compare_set(HEARD, "", Heard().text()))
        if self.hang and not self._heard.hang:
            store.set(HEARD, replace(self._heard, hang=True).text())
        elif self.pulse["age"] <= LISTEN_S:
            self._gathering = None
        elif not self._gathering and self._is_overdue() and self._publish(store, self._heard):
            self._gathering = Gathering()
            self._gather(store, self._gathering)

    def _is_overdue(self) -> bool:
        return time.monotonic() - self._changed > OVERDUE_S

    def _gather(self, store: Store, gathering: Gathering) -> None:
        heard = gathering.gather(self._read(store, "pulse"))
        if not self._publish(store, heard) and not self._heard.hang:
            self._gathering = None

    def _publish(self, store: Store, heard: Heard) -> bool:
        """Replaces the text by the next one. False: another rank has done so already."""
        new = replace(heard, by=self.environment.rank, number=self._heard.number + 1).text()
        self._hear(store.compare_set(HEARD, self._text, new))
        return self._text == new

    def _hear(self, answer: bytes) -> None:
        text = answer.decode()
        if text != self._text:
            self._heard = Heard.read(text)
            self._text = text
            self._changed = time.monotonic()
            self.hang = self.hang or self._heard.hang

    def _exchange(self, store: Store) -> None:
        """Publishes how long this rank's steps take; rank 0 compares them."""
        heartbeat = self.heartbeat
        steps = [*self.heartbeat.steps]
        passed = time.monotonic() - self._exchanged
        # Timing costs time: no more steps than are kept are timed, the last ones.
        rate = (heartbeat.count - self._count) / passed
        heartbeat.time_steps((EXCHANGE_S - passed) * rate < KEPT)
        if passed < EXCHANGE_S or len(steps) < straggler.STEPS:
            return
        self._exchanged = time.monotonic()
        self._count = heartbeat.count
        heartbeat.time_steps(False)
        heartbeat.steps.clear()
        # On a GPU nobody waits where a collective is started.
        times = [each.created for each in flight.collectives(flight.GLOO)]
        mine = {**straggler.record(steps, times), "rank": self.environment.rank}
        mine["host"] = self.pulse["host"]
        store.set(f"{PREFIX}/steps/{self.environment.rank}", json.dumps(mine))
        if self.environment.rank == 0:
            verdict = straggler.verdict(self._read(store, "steps"))
            before = self._verdict
            self._verdict = verdict
            # Twice in a row, since another program may use a rank's core for some seconds.
            if verdict and before and verdict[:2] == before[:2] != self._warned:
                self._warned = verdict[:2]
                self.on_straggler(verdict)

    def _read(self, store: Store, kind: str) -> list[dict[str, Any]]:
        """What each rank has published; empty for one that has published nothing yet."""
        keys = [f"{PREFIX}/{kind}/{rank}" for rank in range(self.environment.world_size)]
        if kind not in self._complete and not store.check(keys):
            for key in keys:
                store.compare_set(key, "", "{}")
        self._complete.add(kind)
        return [*map(json.loads, store.multi_get(keys))]
