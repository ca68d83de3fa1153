"""The cache of a node, what brings shards into it early, and what may go wrong with them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from distdl.datasets import cache as cache_module
from distdl.datasets.cache import Cache, NoRoom, default_root
from distdl.datasets.needs import Needs
from distdl.datasets.order import Windows
from distdl.datasets.prefetch import Prefetch
from distdl.stores import StoreError
from distdl.stores.files import FileStore
from distdl.stores.remote import RemoteStore
from distdl.util.errors import UserError
from tests import prepared
from tests.prepared import files, open_cache, prepare, wait_until

made, small_disk = prepared.made, prepared.small_disk  # fixtures


# Coming down


def test_a_shard_comes_once(tmp_path, made):
    cache, shard = open_cache(tmp_path), made.splits["train"].shards[1]
    path = cache.fetch(shard)
    assert path.read_bytes() == (tmp_path / "far" / shard.name).read_bytes()
    assert cache.fetch(shard) == path and open_cache(tmp_path).fetch(shard) == path
    assert cache.store.downloads == [shard.name] and files(cache) == [shard.name]


@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_what_comes_damaged_comes_again(tmp_path, made, fault):
    shard = made.splits["train"].shards[0]
    path = open_cache(tmp_path, fault, fault).fetch(shard)
    assert path.read_bytes() == (tmp_path / "far" / shard.name).read_bytes()
    cache = open_cache(tmp_path, *[fault] * 9, root="other")
    with pytest.raises(UserError, match=r"far/train-00000.tar came 3 times, and it") as error:
        cache.fetch(shard)
    assert "upload it again" in error.value.problems[0].remedy
    assert files(cache) == []


def test_what_is_gone_is_named(tmp_path, made):
    shard = made.splits["train"].shards[0]
    (tmp_path / "far" / shard.name).unlink()
    with pytest.raises(UserError, match=r"far/train-00000.tar: No such file"):
        open_cache(tmp_path).fetch(shard)


def test_who_waited_while_another_tried_in_vain_does_not_start_anew(tmp_path, made):
    shard, tries, said = made.splits["train"].shards[0], [], []

    class Gone(FileStore):
        def download(self, name, to, progress=None):
            tries.append(name)
            time.sleep(0.4)
            raise StoreError(f"{name}: no answer", transient=True)

    def fetch() -> None:
        try:
            Cache(Gone(tmp_path / "far"), tmp_path / "cache", "0123456789abcdef").fetch(shard)
        except UserError as error:
            said.append(str(error))

    waiting = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    assert len(tries) == 1 and len(said) == 3 and len(set(said)) == 1
    fetch()  # who comes later tries
    assert len(tries) == 2
    assert open_cache(tmp_path).fetch(shard).stat().st_size == shard.bytes


class Silent(RemoteStore):
    """A server that does not answer until `open` exists."""

    def __init__(self, folder: Path, patience: float) -> None:
        super().__init__("silent://box", "", patience=patience)
        self.folder = folder

    def _connect(self):
        return None

    def _server(self):
        return "silent"

    def _size(self, key):
        if not (self.folder / "open").exists():
            raise ConnectionError("no answer")
        return (self.folder / key).stat().st_size

    def _range(self, key, start, count):
        return (self.folder / key).read_bytes()[start : start + count]

    def _put(self, path, name, progress):
        raise NotImplementedError

    def _list(self, start):
        raise NotImplementedError

    def _is_transient(self, error):
        return isinstance(error, ConnectionError)


def test_a_node_waits_for_a_server_once_and_not_once_for_each_shard(tmp_path, made, monkeypatch):
    monkeypatch.setattr(cache_module, "AGAIN", 0.2)
    shards, said = made.splits["train"].shards, []

    def opened(patience: float) -> Cache:
        return Cache(Silent(tmp_path / "far", patience), tmp_path / "cache", "0123456789abcdef")

    def fetch(cache: Cache, number: int) -> None:
        try:
            cache.fetch(shards[number])
        except UserError as error:
            said.append(str(error))

    first, others = opened(0.6), opened(3600)  # who waits so long has no end in this test
    waiting = [
        threading.Thread(target=fetch, args=(cache, number))
        for cache, number in ((first, 0), (others, 1), (others, 2))
    ]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    fetch(others, 3)  # of the same run, a little later: it asks, and waits no more
    assert len(said) == 4 and len(set(said)) == 1 and "no answer" in said[0]
    # Another run begins anew, and a server that answers is one that can be waited for again.
    later = opened(60)
    thread = threading.Thread(target=fetch, args=(later, 4))
    thread.start()
    time.sleep(0.6)
    assert thread.is_alive()
    (tmp_path / "far" / "open").touch()
    thread.join()
    assert len(said) == 4 and later.has(shards[4])
    assert not (later.folder / "locks" / "unreachable").exists()


def test_a_copy_that_is_cut_is_said_and_comes_again(tmp_path, made, caplog):
    shard = made.splits["train"].shards[0]
    path = open_cache(tmp_path).fetch(shard)
    assert caplog.records == []
    os.truncate(path, 10)
    assert open_cache(tmp_path).fetch(shard).stat().st_size == shard.bytes
    assert [r.getMessage() for r in caplog.records] == [f"{path} is damaged: it comes down again"]


def test_a_killed_download_is_nothing(tmp_path, made):
    shard = made.splits["train"].shards[0]
    context = multiprocessing.get_context("fork")
    child = context.Process(target=lambda: open_cache(tmp_path, "slow").fetch(shard))
    child.start()
    cache = open_cache(tmp_path)
    wait_until(lambda: any(name.endswith(".part") for name in files(cache)))
    assert not cache.has(shard)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert len(files(cache)) == 1  # the leftover
    assert cache.fetch(shard).stat().st_size == shard.bytes and files(cache) == [shard.name]


def test_processes_that_race_for_a_cache_download_once(tmp_path, made):
    context = multiprocessing.get_context("fork")
    shards = made.splits["train"].shards
    hold = FileLock(tmp_path / "hold")
    hold.acquire()

    def fetch_all() -> None:
        with FileLock(tmp_path / "hold"):
            pass
        cache = open_cache(tmp_path)
        for shard in shards:
            assert cache.fetch(shard).stat().st_size == shard.bytes

    children = [context.Process(target=fetch_all) for _ in range(4)]
    for child in children:
        child.start()
    hold.release()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 4
    assert sorted(open_cache(tmp_path).store.downloads) == [shard.name for shard in shards]


# Room


def test_a_bounded_cache_removes_what_is_needed_last(tmp_path, made):
    shards = made.splits["train"].shards
    cache = open_cache(tmp_path, limit=sum(shard.bytes for shard in shards[:3]))
    for shard in shards[:3]:
        cache.fetch(shard)
    opened = cache.path(shards[1]).open("rb")
    with pytest.raises(NoRoom, match="no room for its"):
        cache.fetch(shards[3])
    cache.fetch(shards[3], lambda: [shards[1].name, shards[0].name])
    assert files(cache) == [shards[i].name for i in (0, 2, 3)]
    assert len(opened.read()) == shards[1].bytes  # who reads goes on reading


def test_what_no_run_reads_makes_room_and_what_one_reads_stays(tmp_path, made):
    shards = made.splits["train"].shards
    limit = sum(shard.bytes for shard in shards[:2])
    other = Cache(FileStore(tmp_path / "far"), tmp_path / "cache", "f" * 64)
    other.fetch(shards[0])
    other.fetch(shards[1])
    cache = open_cache(tmp_path, limit=limit)
    with pytest.raises(NoRoom):
        cache.fetch(shards[2])
    assert cache.room() == 0
    os.close(other._used)  # as when its process ends
    assert cache.room() == limit
    cache.fetch(shards[2])
    assert len(files(other)) == 1 and cache.has(shards[2])


def test_a_full_disk_is_named_and_nothing_half_done_stays(tmp_path, small_disk, monkeypatch):
    monkeypatch.setattr("distdl.stores.files._PIECE", 10_000)
    manifest = prepare(tmp_path / "far", train=24, padding=20_000)  # 160 kB a shard
    cache = Cache(FileStore(tmp_path / "far"), small_disk / "cache", "a" * 64)
    shards = manifest.splits["train"].shards
    (small_disk / "others").write_bytes(bytes(150_000))
    cache.fetch(shards[0])
    cache.fetch(shards[1])
    with pytest.raises(NoRoom, match=rf"no room for its 0.2 MB in {small_disk}/cache: .* MB left"):
        cache.fetch(shards[2])
    assert files(cache) == [shards[0].name, shards[1].name]
    (small_disk / "others").unlink()
    assert cache.fetch(shards[2]).stat().st_size == shards[2].bytes
    # What others write while a shard comes down: the same answer.
    cache.drop(shards[2])
    cache._free = lambda: 10**9  # type: ignore[method-assign]  # looked before they wrote
    (small_disk / "others").write_bytes(bytes(200_000))
    came: list[int] = []
    with pytest.raises(NoRoom, match="no room"):
        cache.fetch(shards[2], progress=came.append)
    assert files(cache) == [shards[0].name, shards[1].name] and came == []


def test_where_copies_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("DISTDL_CACHE", str(tmp_path))
    assert default_root() == tmp_path
    monkeypatch.delenv("DISTDL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert default_root() in (tmp_path / "c" / "distdl", Path("/mnt/distdl"))


# Prefetching


def test_shards_are_fetched_in_the_order_of_their_use(tmp_path, made, monkeypatch):
    cache = open_cache(tmp_path)
    train = made.splits["train"]
    wanted = [train.shards[i] for i in (3, 0, 4)]
    monkeypatch.setattr("distdl.datasets.prefetch.THREADS", 1)
    prefetch = Prefetch(cache, None)
    prefetch.want(lambda: wanted)
    wait_until(lambda: all(cache.has(shard) for shard in wanted))
    assert cache.store.downloads == [shard.name for shard in wanted]
    prefetch.close()


def test_what_is_prefetched_never_pushes_out_what_is_needed_sooner(tmp_path, made):
    train, val = made.splits["train"], made.splits["val"]
    needs = Needs(Windows(tuple(s.samples for s in train.shards), 1), train, val)
    needs.reached(3, 0, 0)
    order = [int(s) for window in needs.windows.shards(3, 0) for s in window]
    second = train.shards[order[-2]]
    later = needs.needed_later(second)
    assert train.shards[order[0]].name not in later and train.shards[order[-1]].name in later
    assert val.shards[0].name in later and later[0] == val.shards[0].name
    everything = needs.farthest_first(train.shards[order[0]])
    assert len(everything) == 5 and train.shards[order[0]].name not in everything
    cache = open_cache(tmp_path, limit=2 * max(s.bytes for s in train.shards))
    first = [train.shards[n] for n in order[:2]]
    prefetch = Prefetch(cache, needs.needed_later)
    prefetch.want(needs.soonest_first)
    wait_until(lambda: all(cache.has(shard) for shard in first))
    time.sleep(0.5)
    assert set(files(cache)) == {shard.name for shard in first}  # the third one waits
    needs.reached(3, 0, 24)  # until the first window and the one after it are over
    wait_until(lambda: cache.has(train.shards[order[2]]))
    prefetch.close()


def test_a_prefetch_that_is_ended_gives_up_its_download(tmp_path, made):
    script = f"""
import sys
from pathlib import Path
from distdl.datasets.prefetch import Prefetch
from distdl.datasets.cache import Cache
from distdl.datasets.reading import open_data_set
from distdl.stores import open_store
data = open_data_set({str(tmp_path / "far")!r})
store = open_store("http://127.0.0.1:1/account/box", patience=36_000)  # nobody answers
prefetch = Prefetch(Cache(store, Path({str(tmp_path / "cache")!r}), data.key), None)
prefetch.want(lambda: data.split("train").shards)
import time
time.sleep(1)
prefetch.close()
print("closed", flush=True)
"""
    environment = {**os.environ, "AZURE_STORAGE_SAS_TOKEN": "sig=x", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "closed\n" and done.returncode == 0, done.stderr
