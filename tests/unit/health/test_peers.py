"""What a rank hears of the others, through a real store: by how many requests, and who gathers."""

import collections
import threading

import pytest
import torch.distributed as dist

from distdl.health import gathering, peers
from distdl.health.heartbeat import RankHeartbeat
from distdl.ranks.environment import Environment
from tests.waiting import until

MINE = 300.0  # the limit of a rank that waits
LONGER = 1800.0  # and of one that saves a checkpoint
SOON_S = 20.0  # on a busy machine
NONE = {"others": 0, "peers": {}}


class Counting:
    """A store that counts the requests of each thread."""

    def __init__(self, store):
        self.store = store
        self.requests = collections.Counter()

    def __getattr__(self, name):
        self.requests[threading.current_thread().name] += 1
        return getattr(self.store, name)


class Job:
    """Ranks that look after each other by one store, one look after the other."""

    def __init__(self, size, store=None):
        self.store = Counting(store or dist.HashStore())
        self.ranks = [
            peers.Peers(Environment("local", rank, size), RankHeartbeat(), lambda verdict: None)
            for rank in range(size)
        ]
        self.number = 0
        self.waits = [True] * size
        self.limits = [MINE] * size
        self.age = 400.0

    def look(self, *without):
        """Each rank publishes and listens once; `without`: ranks that do not."""
        self.number += 1
        for number, rank in enumerate(self.ranks):
            if number not in without:
                limit = self.limits[number]
                age = self.age if self.waits[number] else 1.0
                rank.pulse = {
                    "rank": number,
                    "number": self.number,
                    "age": age,
                    "limit": limit,
                    "waits": self.waits[number],
                    "host": f"node{number}",
                    "step": 7,
                }
                rank.talk(self.store)

    def excused(self):
        return [rank.excuse(MINE) for rank in self.ranks]


@pytest.fixture
def clock(monkeypatch):
    """Seconds, which pass only when a test says so."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(peers, "time", clock)
    monkeypatch.setattr(gathering, "time", clock)
    return clock


def test_listening_takes_as_few_requests_in_a_large_job(clock):
    """The job of issue 33: two requests for each rank that is heard of were 41 s for 1,024."""
    requests = {}
    for size in (8, 64):
        job = Job(size)
        for _ in range(10):
            clock.now += peers.PUBLISH_S
            job.look()
        job.store.requests.clear()
        for _ in range(10):
            clock.now += peers.PUBLISH_S
            job.look()
        requests[size] = job.store.requests.total() / size / 10
    assert requests[64] <= requests[8] <= 3


def test_a_rank_hears_of_one_that_may_take_longer_and_of_its_end(clock):
    job = Job(5)
    job.waits[3] = False
    job.limits[3] = LONGER
    for _ in range(5):
        clock.now += peers.PUBLISH_S
        job.look()
    assert all(job.excused())
    assert sum(rank.gathers for rank in job.ranks) == 1
    job.limits[3] = None  # in a debugger
    clock.now += peers.PUBLISH_S
    job.look(), job.look()
    assert all(rank.excuse(LONGER) for rank in job.ranks)
    job.waits[3] = True
    job.look(), job.look()
    assert not any(job.excused())


@pytest.mark.parametrize("goes_on", [False, True])
def test_another_rank_gathers_if_the_one_that_did_is_gone_or_goes_on(clock, goes_on):
    job = Job(5)
    job.waits[3] = False
    job.limits[3] = LONGER
    for _ in range(5):
        clock.now += peers.PUBLISH_S
        job.look()
    (first,) = [rank for rank in job.ranks if rank.gathers]
    number = job.ranks.index(first)
    gone = () if goes_on else (number,)
    others = [rank for rank in job.ranks if rank is not first]
    job.waits[number] = not goes_on
    for _ in range(int(peers.STALE_S / peers.PUBLISH_S) + 4):
        clock.now += peers.PUBLISH_S
        job.look(*gone)
        assert all(rank.excuse(MINE) for rank in others), "no false alarm in between"
    assert sum(rank.gathers for rank in others) == 1
    silent = {key for rank in others for key, p in rank.facts()["peers"].items() if not p["fresh"]}
    assert silent == {str(number) for number in gone}
    clock.now += peers.PUBLISH_S
    job.look()  # it is back: one rank gathers, not two
    assert sum(rank.gathers for rank in job.ranks) == 1


def test_a_rank_that_is_silent_excuses_nobody_and_is_named(clock):
    job = Job(40)
    job.limits[3] = LONGER
    job.waits[3] = False
    for _ in range(5):
        clock.now += peers.PUBLISH_S
        job.look()
    gone = [3, *range(20, 40)]
    for _ in range(10):
        clock.now += peers.PUBLISH_S
        job.look(*gone)
    here = [rank for number, rank in enumerate(job.ranks) if number not in gone]
    assert not any(rank.excuse(MINE) for rank in here)
    (gatherer,) = [rank for rank in here if rank.gathers]
    heard = gatherer.facts()
    assert [int(key) for key, each in heard["peers"].items() if not each["fresh"]] == gone
    assert heard["peers"]["3"]["host"] == "node3"
    assert heard["peers"]["3"]["step"] == 7
    other = next(rank for rank in here if rank is not gatherer).facts()
    assert other["others"] == 19
    assert [*map(int, other["peers"])] == gone[: gathering.NAMED]


def test_nobody_is_silent_because_the_machine_slept(clock):
    job = Job(3)
    job.waits[2] = False
    job.limits[2] = LONGER
    for _ in range(5):
        clock.now += peers.PUBLISH_S
        job.look()
    clock.now += 3600
    for rank in job.ranks:
        rank.paused(3600)
        assert rank.excuse(MINE)
    job.look()
    assert all(job.excused())


def test_a_rank_that_the_store_does_not_answer_excuses_nobody(clock):
    job = Job(3)
    job.waits[2] = False
    job.limits[2] = LONGER
    for _ in range(5):
        clock.now += peers.PUBLISH_S
        job.look()
    clock.now += peers.DEAF_S + 1
    assert not any(job.excused())
    assert all(rank.facts() == NONE for rank in job.ranks)


def test_all_ranks_hear_of_a_hang(clock):
    """Those as well that were busy and listened to nobody; nobody writes over it."""
    job = Job(4)
    for _ in range(5):
        clock.now += peers.PUBLISH_S
        job.look()
    job.waits[2] = False
    job.limits[2] = LONGER
    job.ranks[1].hang = True
    for _ in range(3):
        clock.now += peers.PUBLISH_S
        job.look()
    assert all(rank.hang for rank in job.ranks)
    assert job.ranks[2].facts()["others"] + len(job.ranks[2].facts()["peers"]) == 4


def test_ranks_hear_of_each_other_by_torchs_store():
    """As a job runs it: each rank has a thread and a connection of its own."""
    store = dist.TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False)
    job = Job(4)
    job.waits[0] = False
    job.limits[0] = None
    job.look()
    for rank in job.ranks:
        rank.start(store.clone())
    until(lambda: all(job.excused()), SOON_S, lambda: str([r.facts() for r in job.ranks]))
    job.ranks[3].hang = True
    until(lambda: all(rank.hang for rank in job.ranks), SOON_S)
    for rank in job.ranks:
        rank.stop()
