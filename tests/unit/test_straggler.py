"""Which rank makes the others wait: verdicts on simulated jobs, whose ranks have wrong clocks."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch.distributed as dist

from distdl.health import peers, straggler
from distdl.health.heartbeat import (
    BACKWARD,
    CALLBACKS,
    CHECKPOINT,
    COPY,
    DATA,
    FORWARD,
    OPTIMIZER,
    PHASES,
    RankHeartbeat,
)
from distdl.ranks.environment import Environment

USUAL = {"data": 1.0, "copy": 0.2, "forward": 8.0, "backward": 12.0, "optimizer": 1.0}
USUAL |= {"callbacks": 0.5, "checkpoint": 2.0, "link": 3.0}  # milliseconds
EVERY = 4  # steps between two checkpoints
MS = 1_000_000


class Job:
    """Ranks that train with DDP and batch norm, and save checkpoints.

    Args:
        world: Number of ranks.
        seed: Of the noise, and of how wrong the clock of each rank is.
        slow: Further milliseconds of a rank's phase, in each step or only in some of them.
        every: In one of so many steps.
        accumulate: Batches of which only the last one sends gradients.
    """

    def __init__(
        self,
        world: int,
        seed: int = 0,
        slow: dict[tuple[int, str], float] | None = None,
        every: int = 1,
        accumulate: int = 1,
        steps: int = 40,
    ) -> None:
        self.slow, self.every, self.accumulate = slow or {}, every, accumulate
        self.random, self.step = random.Random(seed), 0
        self.now = [0.0] * world  # milliseconds of a true clock
        self.clock = [self.random.uniform(0, 1e9) for _ in self.now]
        self.marks: list[list[tuple[int, int]]] = [[] for _ in self.now]
        self.steps: list[list[Any]] = [[] for _ in self.now]
        self.collectives: list[list[int]] = [[] for _ in self.now]
        for self.step in range(steps):
            self.train()
        self.begin(DATA)

    def train(self) -> None:
        self.begin(DATA), self.work("data")
        self.begin(COPY), self.work("copy")
        self.begin(CALLBACKS), self.work("callbacks", 0.2)
        self.begin(FORWARD), self.work("forward", 0.1)
        self.meet()  # batch norm
        self.work("forward", 0.9, slow=True)
        self.begin(BACKWARD)
        sends = self.step % self.accumulate == self.accumulate - 1
        self.work("backward", 0.3)
        if sends:
            self.start()
        self.work("backward", 0.7, slow=True)
        if sends:
            self.meet(self.took(-1, "link"))
        self.begin(OPTIMIZER), self.work("optimizer")
        self.begin(CALLBACKS), self.work("callbacks", 0.8, slow=True)
        self.start()  # the agreement of all ranks
        if self.step % EVERY == EVERY - 1:
            self.begin(CHECKPOINT), self.work("checkpoint", 0.2)
            self.meet(), self.work("checkpoint", 0.8, slow=True), self.meet()

    def begin(self, phase: int) -> None:
        for rank, now in enumerate(self.now):
            mark = (phase, self.read(rank))
            if phase == DATA and self.marks[rank]:
                self.steps[rank].append((*self.marks[rank], mark))
                self.marks[rank] = []
            self.marks[rank].append(mark)
            self.now[rank] = now + 0.01

    def work(self, phase: str, share: float = 1.0, slow: bool | None = None) -> None:
        """All ranks work in parallel; the part of a phase that may be slow is the main one."""
        for rank in range(len(self.now)):
            more = self.slow.get((rank, phase), 0.0) if slow or share == 1.0 else 0.0
            self.now[rank] += self.took(rank, phase) * share
            self.now[rank] += 0.0 if self.step % self.every else more

    def took(self, rank: int, phase: str) -> float:
        more = self.slow.get((rank, phase), 0.0) if rank < 0 else 0.0
        return USUAL[phase] * self.random.lognormvariate(0, 0.3) + more

    def start(self) -> None:
        for rank, started in enumerate(self.collectives):
            started.append(self.read(rank))
            self.now[rank] += 0.01

    def meet(self, ms: float = 0.1) -> None:
        """A collective that every rank waits for."""
        self.start()
        self.now = [max(self.now) + ms] * len(self.now)

    def read(self, rank: int) -> int:
        return int((self.now[rank] + self.clock[rank]) * MS)

    def records(self, kept: int | None = None, known: bool = True) -> list[dict[str, Any]]:
        """What the ranks publish; their recorders keep the last `kept` collectives."""
        found = []
        for rank, steps in enumerate(self.steps):
            collectives = self.collectives[rank][-(kept or 10**6) :] if known else []
            row = {**straggler.record(steps, collectives), "rank": rank, "host": f"node{rank}"}
            found.append(json.loads(json.dumps(row)))
        return found

    def verdict(self, **how: Any) -> tuple[int | None, str] | None:
        verdict = straggler.verdict(self.records(**how))
        return verdict and verdict[:2]


PHASE_NAMES = ("data", "copy", "forward", "backward", "optimizer", "callbacks", "checkpoint")


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("phase", PHASE_NAMES)
def test_the_slow_rank_and_phase_are_named(world: int, phase: str) -> None:
    for rank in (0, world - 1):
        job = Job(world, seed=rank, slow={(rank, phase): 50.0})
        verdict = straggler.verdict(job.records())
        assert verdict and verdict[:2] == (rank, phase)
        mean = 50 / EVERY if phase == "checkpoint" else 50
        assert verdict.excess_ms == pytest.approx(mean, rel=0.2)
        assert f"rank {rank} (node{rank}) is slow: {straggler.WORDS[phase]}" in verdict.sentence


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_slow_link_is_nobodys_fault(world: int) -> None:
    verdict = straggler.verdict(Job(world, slow={(-1, "link"): 50.0}).records())
    assert verdict and verdict[:2] == (None, "link") and verdict.excess_ms == pytest.approx(53, 0.1)
    assert "the link between the ranks is slow: 5" in verdict.sentence


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_an_undisturbed_job_has_no_straggler(world: int) -> None:
    found = [Job(world, seed).verdict(known=known) for seed in range(10) for known in (True, False)]
    assert found == [None] * 20


def test_a_part_that_begins_with_a_collective_may_be_longer_because_of_the_link() -> None:
    slow = {(-1, "link"): 12.0, (1, "forward"): 9.0}
    assert Job(2, slow=slow).verdict() is None
    assert Job(2, slow={**slow, (1, "forward"): 30.0}).verdict() == (1, "forward")
    assert Job(2, slow={(-1, "link"): 12.0, (1, "data"): 9.0}).verdict() == (1, "data")


def test_the_greatest_excess_counts() -> None:
    slow = {(1, "data"): 30.0, (2, "forward"): 60.0}
    assert Job(4, slow=slow).verdict() == (2, "forward")
    assert Job(4, slow={**slow, (1, "data"): 90.0}).verdict() == (1, "data")
    assert Job(4, slow={(1, "data"): 3.0}).verdict() is None, "3 of 29 ms"


@pytest.mark.parametrize("phase", PHASE_NAMES)
def test_without_the_collectives_nobody_is_accused_wrongly(phase: str) -> None:
    """Then it is known that a rank takes longer, but not whether it only waits."""
    for world in (2, 4):
        verdict = Job(world, slow={(1, phase): 50.0}).verdict(known=False)
        assert verdict == ((1, phase) if phase in ("data", "copy") else None)


def test_a_rare_stall_is_no_straggler_and_a_frequent_one_is() -> None:
    assert Job(2, slow={(1, "data"): 3000.0}, every=20).verdict() is None
    assert Job(2, slow={(1, "data"): 200.0}, every=3).verdict() == (1, "data")


def test_gradients_of_several_batches_are_sent_together() -> None:
    for phase in ("data", "backward", "forward"):
        assert Job(4, slow={(2, phase): 50.0}, accumulate=4).verdict() == (2, phase)
    assert Job(4, accumulate=4).verdict() is None


def test_steps_whose_collectives_are_forgotten_do_not_count() -> None:
    job = Job(2, slow={(1, "backward"): 50.0})
    per_step = len(job.collectives[0]) / len(job.steps[0])
    assert [each["steps"] for each in job.records(kept=int(20 * per_step))] == [19, 19]
    assert job.verdict(kept=int(20 * per_step)) == (1, "backward")
    assert job.verdict(kept=int(9 * per_step)) is None, "too few"


def test_a_record_stays_small() -> None:
    """FSDP has hundreds of collectives in a phase."""
    collectives = [*range(0, 200 * MS, MS)]
    row = straggler.record(
        [((FORWARD, 0), (BACKWARD, 100 * MS), (DATA, 200 * MS))] * 2, collectives
    )
    sizes = {name: len([part for part in row["parts"] if part[0] == name]) for name in PHASES}
    assert sizes["forward"] == sizes["backward"] == straggler.MOST_PARTS + 1
    assert sum(part[3] for part in row["parts"]) == pytest.approx(200)


GOOD = Job(3, slow={(1, "data"): 50.0}).records()
DAMAGED: list[Any] = [
    *(None, [], "rank", 3, {}),
    *({**GOOD[2], key: value} for key, value in (("rank", -1), ("rank", "two"), ("rank", True))),
    *(
        {**GOOD[2], "host": host}
        for host in (None, "", "a\nb", "\x1b[31m", "a" * 300, "a b", ["a"])
    ),
    *({**GOOD[2], "steps": steps} for steps in (9, "many", None, 40.5, float("inf"))),
    *(
        {**GOOD[2], "parts": parts}
        for parts in (
            *(None, 5, {"data": 1}, [["data", 0, 0]], [["data", 0, 0, "x"]], [["end", 0, 0, 1.0]]),
            *([["data", 0, 0, ms]] for ms in (-1, float("nan"), float("inf"), 1e300, None)),
            *([["data", n, 0, 1.0]] for n in (-1, "0", 0.5, None)),
            [["data", 0, 0, 1.0]] * 2000,
        )
    ),
]


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda value: repr(value)[-60:])
def test_a_damaged_record_is_ignored(damaged: Any) -> None:
    assert straggler.verdict([*GOOD[:2], damaged])[:2] == (1, "data")
    assert straggler.verdict([damaged, GOOD[1]]) is None
    assert straggler.verdict([damaged]) is None and straggler.verdict([]) is None


def test_rank_0_warns_of_what_it_has_seen_twice_in_a_row_and_only_once(monkeypatch) -> None:
    monkeypatch.setattr(peers, "EXCHANGE_S", 0.0)
    # The recorder is the process's: it may hold collectives of earlier tests.
    monkeypatch.setattr(peers.flight, "collectives", lambda *recorders: [])
    store, warned = dist.HashStore(), list[str]()
    ranks = [
        peers.Peers(
            Environment("local", rank, 2),
            RankHeartbeat(),
            lambda verdict: warned.append(verdict.phase),
        )
        for rank in (0, 1)
    ]
    seen = []
    for phase in ("data", "copy", "copy", "copy", "", "copy", "copy", "data", "data"):
        job = Job(2, slow={(1, phase): 50.0})
        for rank in (1, 0):  # rank 0 reads what the other one has published
            ranks[rank].pulse = {"host": f"node{rank}"}
            ranks[rank].heartbeat.steps.extend(job.steps[rank])
            ranks[rank]._exchange(store)
        seen.append([*warned])
    copy, both = ["copy"], ["copy", "data"]
    assert seen == [[], [], copy, copy, copy, copy, copy, copy, both]


def test_the_heartbeat_gives_the_steps() -> None:
    heartbeat = RankHeartbeat()
    for heartbeat.count in range(3):
        for name in ("train_dataloader_next", "batch_to_device", "on_train_batch_start"):
            heartbeat.mark(f"[Strategy]Y.{name}")
        for name in ("training_step", "backward", "on_after_backward", "on_train_batch_end"):
            heartbeat.mark(f"[LightningModule]Y.{name}")
    heartbeat.mark("[LightningModule]Y.on_validation_start")
    assert len(heartbeat.steps) == 2
    row = straggler.record([*heartbeat.steps], [])
    names = [part[0] for part in row["parts"]]
    assert names == ["data", "copy", "callbacks", "forward", "backward", "optimizer"]
    first = heartbeat.steps[0]
    total = sum(part[3] for part in row["parts"])
    assert total <= (heartbeat.steps[1][-1][1] - first[0][1]) / MS
