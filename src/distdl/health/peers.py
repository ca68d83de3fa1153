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
from typing import Any

from distdl.health import flight, straggler
from distdl.health.heartbeat import KEPT, RankHeartbeat
from distdl.ranks.environment import Environment

log = logging.getLogger(__name__)

PUBLISH_S = 0.5  # seconds between two pulses
STALE_S = 3.0  # a rank that was silent for so long is not excused
DEAF_S = 10.0  # nor is any, if this one has heard nothing for so long
EXCHANGE_S = 10.0  # seconds between two records of how long steps take
ANSWER_S = datetime.timedelta(seconds=5)
PREFIX = "distdl/health"


class Peers:
    """The other ranks of a job, as this one last heard of them.

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
        self.environment, self.heartbeat = environment, heartbeat
        self.on_straggler = on_straggler
        self.pulses: dict[int, dict[str, Any]] = {}
        self._listened = time.monotonic()
        self.hang = False  # of any rank
        self.pulse: Mapping[str, Any] = {}  # of this rank, to publish
        self._heard: dict[int, tuple[int, float]] = {}
        self._exchanged, self._count = time.monotonic(), 0  # the last exchange, and steps until it
        self._verdict: straggler.Slowdown | None = None
        self._warned: tuple[Any, ...] = ()
        self._stop = threading.Event()

    def start(self) -> None:
        """Called in a process group."""
        from torch.distributed import distributed_c10d

        store = distributed_c10d._get_default_store().clone()
        store.set_timeout(ANSWER_S)
        threading.Thread(target=self._talk, args=(store,), name="peers", daemon=True).start()

    def stop(self) -> None:
        self._stop.set()

    def excuse(self, limit: float) -> bool:
        """Whether another rank may take longer than `limit` seconds in what it does now."""
        if time.monotonic() - self._listened > DEAF_S:  # the store does not answer
            return False
        for other in self.pulses.values():
            longer = other["limit"] is None or (other["limit"] > limit > 0)
            late = other["limit"] is not None and other["age"] > other["limit"]
            if longer and not late and other["fresh"] and not other["waits"]:
                return True
        return False

    def _talk(self, store: Any) -> None:
        with suppress(RuntimeError):  # the store has ended, with rank 0 or its agent
            while True:
                if self.pulse:
                    store.set(f"{PREFIX}/pulse/{self.environment.rank}", json.dumps(self.pulse))
                if self.hang:
                    store.set(f"{PREFIX}/hang", "1")
                self.hang = self.hang or store.check([f"{PREFIX}/hang"])
                if self.pulse.get("age", 0) > STALE_S / 2 or self.hang:
                    self._listen(store)
                self._exchange(store)
                if self._stop.wait(PUBLISH_S):
                    return

    def _listen(self, store: Any) -> None:
        now, pulses = time.monotonic(), self._read(store, "pulse")
        pulses.pop(self.environment.rank, None)
        for rank, pulse in pulses.items():
            number, since = self._heard.get(rank, (-1, now))
            since = since if number == pulse["number"] else now
            self._heard[rank] = (pulse["number"], since)
            pulse["fresh"] = now - since < STALE_S
        self.pulses, self._listened = pulses, now

    def _exchange(self, store: Any) -> None:
        """Publishes how long this rank's steps take; rank 0 compares them."""
        heartbeat, steps = self.heartbeat, [*self.heartbeat.steps]
        passed = time.monotonic() - self._exchanged
        # Timing costs time: no more steps than are kept are timed, the last ones.
        rate = (heartbeat.count - self._count) / passed
        heartbeat.time_steps((EXCHANGE_S - passed) * rate < KEPT)
        if passed < EXCHANGE_S or len(steps) < straggler.STEPS:
            return
        self._exchanged, self._count = time.monotonic(), heartbeat.count
        heartbeat.time_steps(False)
        heartbeat.steps.clear()
        # On a GPU nobody waits where a collective is started.
        times = [each.created for each in flight.collectives(flight.GLOO)]
        mine = {**straggler.record(steps, times), "rank": self.environment.rank}
        mine["host"] = self.pulse["host"]
        store.set(f"{PREFIX}/steps/{self.environment.rank}", json.dumps(mine))
        if self.environment.rank == 0:
            verdict = straggler.verdict([*self._read(store, "steps").values()])
            before, self._verdict = self._verdict, verdict
            # Twice in a row, since another program may use a rank's core for some seconds.
            if verdict and before and verdict[:2] == before[:2] != self._warned:
                self._warned = verdict[:2]
                self.on_straggler(verdict)

    def _read(self, store: Any, kind: str) -> dict[int, dict[str, Any]]:
        """What each rank has published."""
        keys = {r: f"{PREFIX}/{kind}/{r}" for r in range(self.environment.world_size)}
        return {r: json.loads(store.get(key)) for r, key in keys.items() if store.check([key])}
