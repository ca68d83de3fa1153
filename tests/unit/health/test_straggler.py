"""Which rank makes the others wait: verdicts on simulated jobs, whose ranks have wrong clocks."""

import json
import random

import pytest
import torch.distributed as dist
from pytest import approx

from distdl.health import heartbeat, peers, straggler
from distdl.health.heartbeat import BACKWARD, DATA, FORWARD, PHASES
from distdl.ranks.environment import Environment

# Milliseconds of a usual step.
USUAL = {
    "data": 1.0,
    "copy": 0.2,
    "forward": 8.0,
    "backward": 12.0,
    "optimizer": 1.0,
    "callbacks": 0.5,
    "checkpoint": 2.0,
    "link": 3.0,
}
EVERY = 4  # steps between two checkpoints
MS = 1_000_000
# The parts of a step with DDP and batch norm: the phase, the part's share of it, and how many
# milliseconds the collective after it takes; 0: nobody waits for it.
STEP = [
    ("data", 1, None),
    ("copy", 1, None),
    ("callbacks", 0.2, None),
    ("forward", 0.1, 0.1),
    ("forward", 0.9, None),
    ("backward", 0.3, 0),
    ("backward", 0.7, USUAL["link"]),
    ("optimizer", 1, None),
    ("callbacks", 0.8, 0),
]
SAVING = [("checkpoint", 0.2, 0.1), ("checkpoint", 0.8, 0.1)]


class Job:
    """Ranks that train.

    Args:
        seed: Of the noise, and of how wrong the clock of each rank is.
        slow: Further milliseconds of a rank's phase, in one of `every` steps; rank -1 is the link.
        accumulate: Batches of which only the last one sends gradients.
    """

    def __init__(self, world, slow=None, seed=0, every=1, accumulate=1):
        self.slow = slow or {}
        self.random = random.Random(seed)
        self.now = [0.0] * world  # milliseconds of a true clock
        self.clock = [self.random.uniform(0, 1e9) for _ in self.now]
        self.marks, self.steps, self.collectives = ([[] for _ in self.now] for _ in range(3))
        for step in range(40):
            self.stalls = step % every == 0
            before = ""
            saves = step % EVERY == EVERY - 1
            for phase, share, wait in STEP + SAVING if saves else STEP:
                if phase != before:
                    self.begin(PHASES.index(phase))
                before = phase
                self.work(phase, share)
                if wait is not None and (phase != "backward" or (step + 1) % accumulate == 0):
                    self.meet(wait)
        self.begin(DATA)

    def begin(self, phase):
        for rank, now in enumerate(self.now):
            mark = (phase, self.read(rank))
            if phase == DATA and self.marks[rank]:
                self.steps[rank].append((*self.marks[rank], mark))
                self.marks[rank] = []
            self.marks[rank].append(mark)
            self.now[rank] = now + 0.01

    def work(self, phase, share):
        """All ranks work in parallel; the part of a phase that may be slow is the main one."""
        for rank in range(len(self.now)):
            slow = share > 0.5 and self.stalls
            self.now[rank] += USUAL[phase] * self.noise() * share
            self.now[rank] += self.slow.get((rank, phase), 0.0) if slow else 0.0

    def noise(self):
        return self.random.lognormvariate(0, 0.3)

    def meet(self, ms):
        """A collective, for which every rank waits unless it takes no time."""
        for rank, started in enumerate(self.collectives):
            started.append(self.read(rank))
            self.now[rank] += 0.01
        if ms > 1:  # the gradients
            ms = ms * self.noise() + self.slow.get((-1, "link"), 0.0)
        if ms:
            self.now = [max(self.now) + ms] * len(self.now)

    def read(self, rank):
        return int((self.now[rank] + self.clock[rank]) * MS)

    def records(self, kept=10**6, known=True):
        """What the ranks publish; their recorders keep the last `kept` collectives."""
        found = []
        for rank, steps in enumerate(self.steps):
            row = straggler.record(steps, self.collectives[rank][-kept:] if known else [])
            found.append(json.loads(json.dumps({**row, "rank": rank, "host": f"node{rank}"})))
        return found

    def verdict(self, **how):
        verdict = straggler.verdict(self.records(**how))
        return verdict and verdict[:2]


@pytest.mark.parametrize("phase", straggler.WORDS)
def test_the_slow_rank_and_phase_are_named(phase):
    for world, rank in ((2, 0), (2, 1), (8, 7)):
        job = Job(world, {(rank, phase): 50.0}, seed=rank)
        verdict = straggler.verdict(job.records())
        assert verdict
        assert verdict[:2] == (rank, phase)
        mean = 50 / EVERY if phase == "checkpoint" else 50
        assert verdict.excess_ms == approx(mean, rel=0.2)
        assert f"rank {rank} (node{rank}) is slow: {straggler.WORDS[phase]}" in verdict.sentence
        # Without the collectives it is known that a rank takes longer, but not why.
        assert job.verdict(known=False) == ((rank, phase) if phase in ("data", "copy") else None)


@pytest.mark.parametrize("world", [1, 2, 8])
def test_an_undisturbed_job_has_no_straggler(world):
    jobs = [Job(world, seed=seed) for seed in range(10)]
    found = [job.verdict(known=known) for job in jobs for known in (True, False)]
    assert found == [None] * 20


LINK = {(-1, "link"): 12.0}
VERDICTS = [
    *((world, {(-1, "link"): 50.0}, {}, (None, "link")) for world in (2, 8)),
    # A part that begins with a collective may be longer because of the link.
    (2, {**LINK, (1, "forward"): 9.0}, {}, None),
    (2, {**LINK, (1, "forward"): 30.0}, {}, (1, "forward")),
    (2, {**LINK, (1, "data"): 9.0}, {}, (1, "data")),
    # The greatest excess counts, and 3 of 29 ms are none.
    (4, {(1, "data"): 30.0, (2, "forward"): 60.0}, {}, (2, "forward")),
    (4, {(1, "data"): 90.0, (2, "forward"): 60.0}, {}, (1, "data")),
    (4, {(1, "data"): 3.0}, {}, None),
    # A rare stall is no straggler, and a frequent one is.
    (2, {(1, "data"): 3000.0}, {"every": 20}, None),
    (2, {(1, "data"): 200.0}, {"every": 3}, (1, "data")),
    # Gradients of several batches are sent together.
    (4, {(2, "backward"): 50.0}, {"accumulate": 4}, (2, "backward")),
    (4, {}, {"accumulate": 4}, None),
]


@pytest.mark.parametrize("world, slow, options, verdict", VERDICTS)
def test_which_excess_counts(world, slow, options, verdict):
    found = straggler.verdict(Job(world, slow, **options).records())
    assert (found and found[:2]) == verdict
    if verdict == (None, "link"):
        assert found.excess_ms == approx(53, 0.1)
        assert "the link between the ranks is slow: 5" in found.sentence


def test_a_record_has_only_what_is_known_and_stays_small():
    job = Job(2, {(1, "backward"): 50.0})
    per_step = len(job.collectives[0]) / len(job.steps[0])
    assert [each["steps"] for each in job.records(kept=int(20 * per_step))] == [19, 19]
    assert job.verdict(kept=int(20 * per_step)) == (1, "backward")
    assert job.verdict(kept=int(9 * per_step)) is None, "too few"
    # FSDP has hundreds of collectives in a phase.
    step = (FORWARD, 0), (BACKWARD, 100 * MS), (DATA, 200 * MS)
    parts = straggler.record([step] * 2, range(0, 200 * MS, MS))["parts"]
    for phase in ("forward", "backward"):
        assert len([part for part in parts if part[0] == phase]) == straggler.MOST_PARTS + 1
    assert sum(part[3] for part in parts) == approx(200)


GOOD = Job(3, {(1, "data"): 50.0}).records()
WRONG = [("rank", -1), ("host", "a\nb"), ("steps", 9), ("parts", [["data", 0, 0, 1.0]] * 2000)]
WRONG += [("parts", [part]) for part in (["end", 0, 0, 1.0], ["data", 0, 0, float("nan")])]
DAMAGED = [None, *({**GOOD[2], key: value} for key, value in WRONG)]


@pytest.mark.parametrize("damaged", DAMAGED, ids=lambda value: repr(value)[-60:])
def test_a_damaged_record_is_ignored(damaged):
    assert straggler.verdict([*GOOD[:2], damaged])[:2] == (1, "data")
    assert straggler.verdict([damaged, GOOD[1]]) is None


def test_rank_0_warns_of_what_it_has_seen_twice_in_a_row_and_only_once(monkeypatch):
    monkeypatch.setattr(peers, "EXCHANGE_S", 0.0)
    # The recorder is the process's: it may hold collectives of earlier tests.
    monkeypatch.setattr(peers.flight, "collectives", lambda *recorders: [])
    store = dist.HashStore()
    warned = []
    ranks = [
        peers.Peers(
            Environment("local", rank, 2),
            heartbeat.RankHeartbeat(),
            lambda verdict: warned.append(verdict.phase),
        )
        for rank in (0, 1)
    ]
    seen = []
    # In which phase rank 1 is slow, exchange by exchange; "": in none.
    for phase in ("data", "copy", "copy", "copy", "", "copy", "copy", "data", "data"):
        job = Job(2, {(1, phase): 50.0})
        for rank in (1, 0):  # rank 0 reads what the other one has published
            ranks[rank].pulse = {"host": f"node{rank}"}
            ranks[rank].heartbeat.steps.extend(job.steps[rank])
            ranks[rank]._exchange(store)
        seen.append([*warned])
    assert seen == [[], [], *[["copy"]] * 6, ["copy", "data"]]
