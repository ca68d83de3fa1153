"""Images from shards: the order, reading, and StoredImages with a cache and without."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from filelock import FileLock

from distdl.data import StoredImages, TrainPosition
from distdl.data.loading import distribute
from distdl.datasets.cache import Cache
from distdl.datasets.format import MANIFEST
from distdl.datasets.order import Windows, by_first_use
from distdl.datasets.reading import Shards, open_data_set
from distdl.validation.signatures import matches, takes
from tests import prepared
from tests.prepared import PER_SHARD, files, flip, jpeg, open_cache, prepare, refusal, wait_until

made, small_disk = prepared.made, prepared.small_disk  # fixtures
SIZES = tuple([PER_SHARD] * 19 + [3])
SEED = 3


def test_windows_hold_each_sample_once_and_stay_near():
    windows = Windows(SIZES, 4)
    order, shards = windows.order(1, 0), windows.shards(1, 0)
    assert sorted(order.tolist()) == list(range(sum(SIZES)))
    assert [len(window) for window in shards] == [2, 4, 4, 4, 4, 2]
    assert np.array_equal(order, Windows(SIZES, 4).order(1, 0))
    assert not any(np.array_equal(order, windows.order(*other)) for other in ((1, 1), (2, 0)))
    shard_of = np.repeat(np.arange(20), SIZES)
    assert set(by_first_use(shard_of, order)[:2]) == set(shards[0]) != {0, 1}
    # Inside a window the shards are mixed.
    start = sum(SIZES[s] for s in shards[0])
    assert len(set(shard_of[order[start : start + 12]])) > 2
    # A later version of distdl must resume a run in its order.
    assert Windows((3, 2, 4), 2).order(5, 0).tolist() == [3, 4, 1, 0, 2, 6, 7, 8, 5]
    # The next use of each shard.
    windows = Windows(tuple([10] * 12), 3)
    uses = windows.next_uses(0, 3, position=65)  # in the third window
    starts = {s: 30 * i for i, window in enumerate(windows.shards(0, 3)) for s in window}
    later = {s: 120 + 30 * i for i, window in enumerate(windows.shards(0, 4)) for s in window}
    for shard in range(12):  # the window before the current one still counts
        assert uses[shard] == (starts[shard] if starts[shard] >= 30 else later[shard])


def test_damage_in_the_cache_is_never_read(tmp_path, made, caplog):
    def opened() -> Shards:
        return Shards(open_data_set(str(tmp_path / "far")), "train", open_cache(tmp_path))

    shards = opened()
    assert [shards.read(i) for i in range(40)] == [jpeg(i) for i in range(40)]
    copies = [shards.cache.path(shards.file(i)) for i in range(40)]
    positions = [int(offset) + 300 for offset in shards.rows["offset"]]
    os.utime(copies[11], (1, 1))  # from an earlier run
    flip(copies[11], positions[11], keep_times=True)
    later = opened()
    assert later.read(11) == jpeg(11) and later.read(12) == jpeg(12)
    assert shards.cache.store.downloads.count(copies[11].name) == 2
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [f"{copies[11]} is damaged: it is downloaded again"]
    # Also during the run, in a copy that was intact at first.
    assert later.read(30) == jpeg(30)
    flip(copies[30], positions[30], keep_times=True)
    assert later.read(30) == jpeg(30) and not later.repair(30)
    os.truncate(copies[20], 100)
    assert later.read(20) == jpeg(20)


def test_after_a_failed_download_a_reader_does_not_wait_again(tmp_path, made):
    shards = Shards(open_data_set(str(tmp_path / "far")), "train", open_cache(tmp_path))
    for path in (tmp_path / "far").glob("*.tar"):
        path.unlink()
    assert refusal(shards.read, 0) == refusal(shards.read, PER_SHARD)
    assert shards.cache.store.downloads == ["train.index.npy", "train-00000.tar"]


def damaged(batches: Any) -> dict[str, float]:
    """The images that a pass over a loader calls damaged, and the total weight."""
    names, weight = set(), 0.0
    for batch in batches:
        weight += float(batch["weight"].sum())
        names |= {text.partition(":")[2].partition(":")[0] for text in batch["damaged"] if text}
    return dict.fromkeys(names, weight) or {"": weight}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True), (2, False)])
def test_damage_in_a_folder_is_found_in_each_epoch(tmp_path, made, workers, persistent):
    rows = {name: open_data_set(str(tmp_path / "far")).index(name, None) for name in made.splits}

    def damage(split: str, index: int) -> None:
        row = rows[split][index]
        path = tmp_path / "far" / f"{split}-{row['shard']:05d}.tar"
        flip(path, int(row["offset"]) + 300, keep_times=True)  # it decodes, with other pixels

    damage("train", 20)
    damage("val", 3)
    data = images(tmp_path, num_workers=workers)
    data.setup()
    train, val = data.train_dataloader(), data.val_dataloader()
    for loader in (train, val):  # DataLoader refuses it after its creation
        object.__setattr__(loader, "persistent_workers", persistent)
    train.batch_sampler.position = TrainPosition(0, consumed=24)  # resumed: the rest is unread
    for number in range(3):
        result = damaged(train)
        assert set(result) <= {"image_20.jpg", ""}
        assert number == 0 or result == {"image_20.jpg": 39}
        assert damaged(val) == {"image_3.jpg": 6}
        train.batch_sampler.position = TrainPosition(number + 1, 0)
    damage("train", 20)  # intact again
    damage("val", 5)  # which was intact so far
    assert damaged(train) == {"": 40}
    assert damaged(val) == {"image_3.jpg": 5, "image_5.jpg": 5}


def test_a_foreign_index_is_refused(tmp_path, made):
    flip(tmp_path / "far" / "train.index.npy", 500)
    problem = refusal(Shards, open_data_set(str(tmp_path / "far")), "train")
    assert problem.path == "data.root" and "train.index.npy" in problem.what


def images(tmp_path: Path, **arguments) -> StoredImages:
    arguments = {"num_workers": 0, **arguments}
    data = StoredImages(str(tmp_path / "far"), 4, num_classes=10, image_size=16, **arguments)
    distribute(data, rank=0, world_size=1, seed=SEED, position=TrainPosition())
    return data


def cache_of(tmp_path: Path) -> Cache:
    data = open_data_set(str(tmp_path / "far"))
    return Cache(data.store, tmp_path / "cache", data.key)


def epoch(
    data: StoredImages, number: int, consumed: int = 0, each: Callable[[], None] = lambda: None
) -> list[int]:
    """The indices of one epoch, whose labels are right."""
    loader, indices = data.train_dataloader(), []
    loader.batch_sampler.position = TrainPosition(number, consumed)
    for batch in loader:
        assert (batch["label"] == batch["index"] % 10).all() and batch["weight"].all()
        indices += batch["index"].tolist()
        each()
    return indices


def shards_of(indices: list[int]) -> set[str]:
    return {f"train-{index // PER_SHARD:05d}.tar" for index in indices}


def test_the_first_epoch_uses_windows_and_the_second_needs_no_store(tmp_path, made):
    data = images(tmp_path, cache_dir=str(tmp_path / "cache"), shuffle_window=2)
    data.setup()
    first = epoch(data, 0)
    assert sorted(first) == list(range(40)) and len(shards_of(first[: 2 * PER_SHARD])) == 2
    cache = cache_of(tmp_path)
    wait_until(lambda: all(cache.has(s) for split in made.splits.values() for s in split.shards))
    (tmp_path / "far").rename(tmp_path / "gone")
    second = epoch(data, 1)
    assert sorted(second) == list(range(40)) and len(shards_of(second[: 2 * PER_SHARD])) > 2
    assert damaged(data.val_dataloader()) == {"": 7}
    assert epoch(data, 0, consumed=12) == first[12:]
    data.teardown()


def test_a_cache_that_is_too_small_is_trained_from_in_windows(tmp_path):
    manifest = prepare(tmp_path / "far", train=160)
    size = max(shard.bytes for shard in manifest.splits["train"].shards)
    limit = 10 * size + sum(split.index.bytes for split in manifest.splits.values())
    data = images(tmp_path, cache_dir=str(tmp_path / "cache"), cache_gb=limit / 1e9)
    data.setup()
    cache = cache_of(tmp_path)

    def within_limit() -> None:
        with FileLock(cache.root / "lock"):
            assert sum((cache.folder / name).stat().st_size for name in files(cache)) <= limit

    orders = [epoch(data, number, each=within_limit) for number in range(3)]
    for order in orders:
        assert sorted(order) == list(range(160)) and len(shards_of(order[:16])) <= 3
    assert orders[0] != orders[1] != orders[2]
    assert damaged(data.val_dataloader()) == {"": 7}
    data.teardown()
    small = images(tmp_path, cache_dir=str(tmp_path / "c"), cache_gb=2 * size / 1e9)
    problem = refusal(small.setup)
    enough = float(problem.remedy.removeprefix("data.cache_gb=").removesuffix(" or more"))
    assert problem.path == "data.cache_gb" and enough * 1e9 >= 3 * size


@pytest.mark.parametrize("limit", [None, 12])  # of the cache, in shards
def test_only_shards_that_an_epoch_uses_are_fetched(tmp_path, limit):
    manifest = prepare(tmp_path / "far", train=160, val=17)
    size = max(shard.bytes for shard in manifest.splits["train"].shards)
    bounded = {"cache_gb": limit * size / 1e9} if limit else {}
    data = images(tmp_path, cache_dir=str(tmp_path / "cache"), shuffle_window=2, **bounded)
    data.trainer = prepared.quiet_trainer(tmp_path, limit_train_batches=0.1, limit_val_batches=2)
    data.setup()
    loader = data.train_dataloader()
    loader.batch_sampler.position = TrainPosition(3)
    read = [i for _, batch in zip(range(4), loader, strict=False) for i in batch["index"].tolist()]
    needed = shards_of(read)
    if limit:  # all shards of the window
        counts = tuple(shard.samples for shard in manifest.splits["train"].shards)
        needed = {f"train-{n:05d}.tar" for n in Windows(counts, 2).shards(SEED, 3)[0]}
    needed |= {"val-00000.tar"}
    cache = cache_of(tmp_path)
    wait_until(lambda: set(files(cache)) >= needed)
    time.sleep(0.3)  # for one that should not come
    assert {name for name in files(cache) if name.endswith(".tar")} == needed
    data.teardown()


def test_a_data_set_larger_than_the_disk_is_refused(tmp_path, small_disk):
    prepare(tmp_path / "far", padding=20_000)
    problem = refusal(images(tmp_path, cache_dir=str(small_disk)).setup)
    assert problem.path == "data.cache_dir" and "data.cache_gb" in problem.remedy


def test_check_and_setup_report_the_same(tmp_path, made):
    def check(root: str, local: bool = True, **node: Any) -> list[Any]:
        return list(StoredImages.check({"root": root, **node}, {"local": local}))

    root = str(tmp_path / "far")
    (problem,) = check(root, num_classes=11)
    assert (problem.path, problem.remedy) == ("num_classes", "data.num_classes=10")
    problem = refusal(StoredImages(root, 4, 11, num_workers=0).setup)
    assert problem.path == "data.num_classes" and "is 11" in problem.what
    assert check(root, num_classes=10) == []
    assert check("azure://box/a", local=False) == ["the job itself checks azure://box/a"]
    assert [p.path for p in check("ftp://x/y")] == ["root"]
    ranges = (("cache_gb", 0.5, 0), ("shuffle_window", 1, 0), ("on_damaged", "error", "ignore"))
    for key, good, bad in ranges:
        hint = takes(StoredImages)[key].annotation
        assert matches(good, hint) and not matches(bad, hint)
    empty = replace(made.splits["val"], samples=0, shards=())
    changed = replace(made, splits={**made.splits, "val": empty})
    (tmp_path / "far" / MANIFEST).write_text(changed.to_json())
    (problem,) = check(root)
    assert problem.path == "root" and "no sample in 'val'" in problem.what
    assert refusal(images(tmp_path).setup).what == problem.what
    (tmp_path / "far" / MANIFEST).unlink()
    assert [p.path for p in check(f"file://{root}")] == ["root", "root"]  # no train/ and no val/


@pytest.mark.parametrize("form", ["shards", "folders"])
def test_ranks_that_see_different_data_sets_are_refused(tmp_path, form):
    context, roots = multiprocessing.get_context("fork"), [tmp_path / "a", tmp_path / "b"]
    for root, count in zip(roots, (2, 3), strict=True):
        if form == "shards":
            prepare(root, train=37 + count)
            continue
        for split, label, i in itertools.product(("train", "val"), range(10), range(count)):
            (root / split / str(label)).mkdir(parents=True, exist_ok=True)
            (root / split / str(label) / f"{i}.jpg").touch()
    results = context.SimpleQueue()

    def setup(rank: int) -> None:
        meet = f"file://{tmp_path}/meet"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
        StoredImages(str(roots[0]), 4, 10, num_workers=0).setup()  # the same
        results.put(str(refusal(StoredImages(str(roots[rank]), 4, 10, num_workers=0).setup)))
        dist.destroy_process_group()

    ranks = [context.Process(target=setup, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    error = results.get()
    assert error == results.get() and "the ranks see different data sets" in error
    if form == "shards":
        keys = [open_data_set(str(root)).key[:12] for root in roots]
        assert f"{keys[0]} is rank 0's, on " in error and f"{keys[1]} is rank 1" in error
