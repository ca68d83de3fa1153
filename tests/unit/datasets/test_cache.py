"""The cache of a node, what prefetches shards into it, and how they may be damaged."""

import multiprocessing
import os
import shutil
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest

from distdl.datasets.cache import Cache
from distdl.datasets.order import Needs, Windows
from distdl.datasets.prefetch import Prefetch
from distdl.stores.files import FileStore
from distdl.util.errors import NoRoom, UserError
from tests import prepared
from tests.prepared import Unreliable, files, open_cache, prepare, refusal
from tests.waiting import until

made, small_disk = prepared.made, prepared.small_disk  # fixtures
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def shards(made):
    return made.splits["train"].shards


def forked(action):
    process = FORK.Process(target=action)
    process.start()
    return process


def unreliable(tmp_path, answer, patience):
    """A cache of a network store."""
    store = Unreliable(tmp_path / "far", answer, patience)
    return Cache(store, tmp_path / "cache", "0123456789abcdef")


@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_a_damaged_download_is_repeated(tmp_path, shards, fault):
    path = open_cache(tmp_path, fault, fault).fetch(shards[0])
    assert path.read_bytes() == (tmp_path / "far" / shards[0].name).read_bytes()
    cache = open_cache(tmp_path, *[fault] * 9, root="other")
    problem = refusal(cache.fetch, shards[0])
    assert problem.path == "data.root"
    assert "train-00000.tar arrived damaged 3 times" in problem.what
    assert "upload it again" in problem.remedy
    assert files(cache) == []
    (tmp_path / "far" / shards[1].name).unlink()
    assert f"far/{shards[1].name}: No such file" in refusal(cache.fetch, shards[1]).what


def test_a_node_waits_for_a_server_once_and_not_for_each_shard(tmp_path, shards, monkeypatch):
    monkeypatch.setattr("distdl.datasets.cache.AGAIN", 0.2)
    errors = []
    available = threading.Event()

    def answer():
        if not available.is_set():
            raise ConnectionError("no response")

    def fetch(cache, number):
        try:
            cache.fetch(shards[number])
        except UserError as error:
            errors.append(str(error))

    opened = partial(unreliable, tmp_path, answer)
    first = opened(0.4)
    others = opened(3600)  # one that waits so long does not end in this test
    asked = ((first, 0), (opened(0.4), 0), (others, 1), (others, 2))
    threads = [threading.Thread(target=fetch, args=args, daemon=True) for args in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    fetch(others, 3)  # of the same run, a little later: it asks, and does not wait
    assert len(errors) == 5
    assert len(set(errors)) == 1
    assert "no response" in errors[0]
    # Another run starts anew, and waits for a server that responds.
    later = opened(60)
    threading.Timer(0.4, available.set).start()
    fetch(later, 4)
    assert len(errors) == 5
    assert later.has(shards[4])
    assert not (later.folder / "locks/unreachable").exists()


def test_a_killed_download_leaves_nothing_that_counts(tmp_path, shards):
    child = forked(lambda: open_cache(tmp_path, "slow").fetch(shards[0]))
    cache = open_cache(tmp_path)
    until(lambda: any(name.endswith(".part") for name in files(cache)))
    assert not cache.has(shards[0])
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert len(files(cache)) == 1  # the leftover
    assert cache.fetch(shards[0]).stat().st_size == shards[0].bytes
    assert files(cache) == [shards[0].name]


def test_unused_data_sets_make_room_and_used_ones_stay(tmp_path, shards):
    limit = sum(shard.bytes for shard in shards[:2])
    ready, end = FORK.Event(), FORK.Event()

    def other_run():
        other = Cache(FileStore(tmp_path / "far"), tmp_path / "cache", "f" * 64)
        for shard in shards[:2]:
            other.fetch(shard)
        ready.set()
        end.wait(60)

    child = forked(other_run)
    assert ready.wait(60)
    cache = open_cache(tmp_path, limit=limit)
    with pytest.raises(NoRoom):
        cache.fetch(shards[2])
    end.set()
    child.join()
    cache.fetch(shards[2])
    others = [*(tmp_path / "cache" / ("f" * 16)).glob("*.tar")]
    assert len(others) == 1
    assert cache.has(shards[2])


def test_a_full_disk_is_reported_and_leaves_nothing_unfinished(tmp_path, small_disk, monkeypatch):
    shards = prepare(tmp_path / "far", train=24, padding=20_000).splits["train"].shards  # 160 kB
    cache = Cache(FileStore(tmp_path / "far"), small_disk / "cache", "a" * 64)
    for shard in shards[:2]:
        cache.fetch(shard)
    (small_disk / "others").write_bytes(bytes(1_650_000))
    usage = SimpleNamespace(free=10**9, total=10**9)
    for looked in (shutil.disk_usage, lambda root: usage):  # others write after it has looked
        monkeypatch.setattr("distdl.datasets.cache.shutil.disk_usage", looked)
        with pytest.raises(NoRoom, match=rf"no room for .* \(0.2 MB\) in {small_disk}/cache: "):
            cache.fetch(shards[2])
        assert files(cache) == [shard.name for shard in shards[:2]]
    (small_disk / "others").unlink()
    assert cache.fetch(shards[2]).stat().st_size == shards[2].bytes


def test_prefetching_never_evicts_what_is_needed_sooner(tmp_path, made, monkeypatch):
    monkeypatch.setattr("distdl.datasets.prefetch.PAUSE", 0.02)
    train, val = made.splits["train"], made.splits["val"]
    needs = Needs(Windows(tuple(s.samples for s in train.shards), 1), train, val)
    needs.reached(3, 0, 0)
    order = [train.shards[s] for window in needs.windows.shards(3, 0) for s in window]
    cache = open_cache(tmp_path, limit=2 * max(s.bytes for s in train.shards))
    prefetch = Prefetch(cache, needs.needed_later)
    prefetch.want(needs.soonest_first)
    until(lambda: all(map(cache.has, order[:2])))
    time.sleep(0.1)
    assert set(files(cache)) == {shard.name for shard in order[:2]}  # the third one waits
    needs.reached(3, 0, 24)  # until the first window and the one after it are over
    until(lambda: cache.has(order[2]))
    prefetch.close()


def test_closing_a_prefetch_aborts_its_download(tmp_path, shards):
    tries = []

    def answer():
        tries.append(1)
        raise ConnectionError("no response")

    prefetch = Prefetch(unreliable(tmp_path, answer, patience=36_000), None)
    prefetch.want(lambda: shards)
    until(lambda: tries)
    prefetch.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("shards-")]
