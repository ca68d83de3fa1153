"""Images from shards: the order, reading, and StoredImages with a cache and without."""

from __future__ import annotations

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
from lightning.pytorch import Trainer

from distdl.data import StoredImages, TrainPosition
from distdl.data.loading import distribute
from distdl.datasets.format import MANIFEST, Manifest
from distdl.datasets.order import Windows, by_first_use
from distdl.datasets.reading import Shards, open_data_set
from distdl.util.errors import UserError
from distdl.validation.signatures import matches, takes
from tests import prepared
from tests.prepared import PER_SHARD, files, flip, jpeg, open_cache, prepare, wait_until

made, small_disk = prepared.made, prepared.small_disk  # fixtures

SIZES = tuple([PER_SHARD] * 19 + [3])


def test_windows_hold_each_sample_once_and_stay_near():
    windows = Windows(SIZES, 4)
    order = windows.order(1, 0)
    assert sorted(order.tolist()) == list(range(sum(SIZES)))
    assert [len(window) for window in windows.shards(1, 0)] == [2, 4, 4, 4, 4, 2]
    assert np.array_equal(order, Windows(SIZES, 4).order(1, 0))
    assert not np.array_equal(order, windows.order(1, 1))
    assert not np.array_equal(order, windows.order(2, 0))
    shard_of = np.repeat(np.arange(20), SIZES)
    assert by_first_use(shard_of, order)[:2].tolist() != [0, 1]
    assert set(by_first_use(shard_of, order)[:2]) == set(windows.shards(1, 0)[0])
    # Inside a window the shards are mixed.
    start = sum(SIZES[s] for s in windows.shards(1, 0)[0])
    assert len(set(shard_of[order[start : start + 12]])) > 2


def test_the_order_never_changes():
    """A run that is resumed by a later version must go on in its order."""
    assert Windows((3, 2, 4), 2).order(5, 0).tolist() == [3, 4, 1, 0, 2, 6, 7, 8, 5]


def test_next_uses():
    windows = Windows(tuple([10] * 12), 3)
    now, after = windows.shards(0, 3), windows.shards(0, 4)
    uses = windows.next_uses(0, 3, place=65)  # in the third window
    starts = {int(s): 30 * i for i, w in enumerate(now) for s in w}
    later = {int(s): 120 + 30 * i for i, w in enumerate(after) for s in w}
    for shard in range(12):  # the one before the current still counts
        assert uses[shard] == (starts[shard] if starts[shard] >= 30 else later[shard])


def test_a_flipped_byte_in_a_cached_shard_is_never_seen(tmp_path, made, caplog):
    data = open_data_set(str(tmp_path / "far"))
    cache = open_cache(tmp_path)
    shards = Shards(data, "train", cache)
    assert [shards.read(i) for i in range(40)] == [jpeg(i) for i in range(40)]
    place = int(shards.rows["offset"][11]) + 300
    os.utime(cache.path(shards.file(11)), (1, 1))  # from an earlier run
    flip(cache.path(shards.file(11)), place, keep_times=True)
    later = Shards(data, "train", open_cache(tmp_path))
    assert later.read(11) == jpeg(11) and later.read(12) == jpeg(12)
    assert cache.store.downloads.count(shards.file(11).name) == 2
    healed = [f"{cache.path(shards.file(11))} is damaged: it comes down again"]
    assert [record.getMessage() for record in caplog.records] == healed
    # Also while it is read, and in a copy that was whole when it came.
    assert later.read(30) == jpeg(30)
    flip(cache.path(shards.file(30)), int(shards.rows["offset"][30]) + 300, keep_times=True)
    assert later.read(30) == jpeg(30) and not later.repair(30)
    os.truncate(cache.path(shards.file(20)), 100)
    assert later.read(20) == jpeg(20)


def test_a_reader_that_waited_in_vain_does_not_wait_again(tmp_path, made):
    shards = Shards(open_data_set(str(tmp_path / "far")), "train", open_cache(tmp_path))
    for name in ("train-00000.tar", "train-00001.tar"):
        (tmp_path / "far" / name).rename(tmp_path / name)
    for index in (0, PER_SHARD):
        with pytest.raises(UserError, match=r"train-00000.tar: No such file"):
            shards.read(index)
    assert shards.cache.store.downloads == ["train.index.npy", "train-00000.tar"]


def damaged(batches: Any) -> dict[str, float]:
    """Which images a pass over a loader calls damaged, and what it counts in all."""
    found, weight = set(), 0.0
    for batch in batches:
        weight += float(batch["weight"].sum())
        found |= {text.partition(":")[2].partition(":")[0] for text in batch["damaged"] if text}
    return dict.fromkeys(found, weight) or {"": weight}


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
    for loader in (train, val):  # DataLoader refuses to be asked
        object.__setattr__(loader, "persistent_workers", persistent)
    train.batch_sampler.position = TrainPosition(0, consumed=24)  # a resume: the rest is unread
    for number in range(3):
        seen = damaged(train)
        assert set(seen) <= {"image_20.jpg", ""} and (number == 0 or seen == {"image_20.jpg": 39})
        assert damaged(val) == {"image_3.jpg": 6}
        train.batch_sampler.position = TrainPosition(number + 1, 0)
    damage("train", 20)  # whole again
    damage("val", 5)  # which was whole so far
    assert damaged(train) == {"": 40}
    assert damaged(val) == {"image_3.jpg": 5, "image_5.jpg": 5}


def test_a_data_set_that_does_not_fit_together_is_refused(tmp_path, made):
    flip(tmp_path / "far" / "train.index.npy", 500)
    with pytest.raises(UserError, match=r"train.index.npy is not the index"):
        Shards(open_data_set(str(tmp_path / "far")), "train")
    other = made.to_json().replace('"samples": 8', '"samples": 9', 1)
    (tmp_path / "far" / MANIFEST).write_text(other)
    flip(tmp_path / "far" / "train.index.npy", 500)  # back
    with pytest.raises(UserError, match="does not fit the shards"):
        Shards(open_data_set(str(tmp_path / "far")), "train")
    (tmp_path / "far" / MANIFEST).write_text("{}")
    with pytest.raises(UserError, match="is not a manifest"):
        open_data_set(str(tmp_path / "far"))
    evil = made.to_json().replace("train-00000.tar", "x/../../evil")
    (tmp_path / "far" / MANIFEST).write_text(evil)
    with pytest.raises(UserError, match="is not a name of a shard"):
        open_data_set(str(tmp_path / "far"))


def images(tmp_path: Path, **arguments) -> StoredImages:
    arguments = {"num_workers": 0, **arguments}
    data = StoredImages(str(tmp_path / "far"), 4, num_classes=10, image_size=16, **arguments)
    distribute(data, rank=0, world_size=1, seed=3, position=TrainPosition())
    return data


def epoch(
    data: StoredImages, number: int, consumed: int = 0, each: Callable[[], None] = lambda: None
) -> list[int]:
    """The indices of one epoch, whose labels are right."""
    fresh = data.train_dataloader()
    fresh.batch_sampler.position = TrainPosition(number, consumed)
    found = []
    for batch in fresh:
        assert (batch["label"] == batch["index"] % 10).all() and batch["weight"].all()
        found += batch["index"].tolist()
        each()
    return found


def test_the_first_epoch_goes_by_windows_and_the_second_reads_only_the_disk(tmp_path, made):
    data = images(tmp_path, cache_dir=str(tmp_path / "cache"), shuffle_window=2)
    data.setup()
    first = epoch(data, 0)
    assert sorted(first) == list(range(40))
    assert len({i // PER_SHARD for i in first[: 2 * PER_SHARD]}) == 2
    cache = data._splits["val"].shards.cache  # type: ignore[attr-defined]
    wait_until(lambda: all(cache.has(s) for split in made.splits.values() for s in split.shards))
    (tmp_path / "far").rename(tmp_path / "gone")
    second = epoch(data, 1)
    assert sorted(second) == list(range(40))
    assert len({i // PER_SHARD for i in second[: 2 * PER_SHARD]}) > 2
    assert sum(float(b["weight"].sum()) for b in data.val_dataloader()) == 7
    assert epoch(data, 0, consumed=12) == first[12:]
    data.teardown()


def test_a_cache_that_is_too_small_is_trained_from_in_windows(tmp_path):
    manifest = prepare(tmp_path / "far", train=160, per_shard=PER_SHARD)
    size = max(shard.bytes for shard in manifest.splits["train"].shards)
    indices = sum(split.index.bytes for split in manifest.splits.values())
    limit = 10 * size + indices
    data = images(tmp_path, cache_dir=str(tmp_path / "cache"), cache_gb=limit / 1e9)
    data.setup()
    cache = data._splits["train"].shards.cache  # type: ignore[attr-defined]

    def room_is_kept() -> None:
        with FileLock(cache.root / "lock"):
            assert sum((cache.folder / name).stat().st_size for name in files(cache)) <= limit

    orders = [epoch(data, number, each=room_is_kept) for number in range(3)]
    for order in orders:
        assert sorted(order) == list(range(160))
        assert len({i // PER_SHARD for i in order[:16]}) <= 3
    assert orders[0] != orders[1] != orders[2]
    assert sum(float(b["weight"].sum()) for b in data.val_dataloader()) == 7
    data.teardown()
    with pytest.raises(UserError, match="holds not even three shards"):
        images(tmp_path, cache_dir=str(tmp_path / "c"), cache_gb=2 * size / 1e9).setup()


def test_a_split_without_samples_is_refused(tmp_path):
    prepare(tmp_path / "far")
    manifest = Manifest.from_json((tmp_path / "far" / MANIFEST).read_bytes(), "")
    empty = replace(manifest.splits["val"], samples=0, shards=())
    changed = replace(manifest, splits={**manifest.splits, "val": empty})
    (tmp_path / "far" / MANIFEST).write_text(changed.to_json())
    (problem,) = StoredImages.check({"root": str(tmp_path / "far")})
    assert problem.path == "root" and "no sample in 'val'" in problem.what
    with pytest.raises(UserError, match="no sample in 'val'"):
        images(tmp_path).setup()


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [("cache_gb", 0.5, 0), ("shuffle_window", 1, 0), ("on_damaged", "error", "ignore")],
)
def test_arguments_out_of_range_do_not_fit_the_signature(key, good, bad):
    hint = takes(StoredImages)[key].annotation
    assert matches(good, hint) and not matches(bad, hint)


def test_check_and_setup_say_the_same(tmp_path, made):
    node = {"root": str(tmp_path / "far"), "num_classes": 11}
    (problem,) = StoredImages.check(node)
    assert (problem.path, problem.remedy) == ("num_classes", "data.num_classes=10")
    with pytest.raises(UserError, match=r"data.num_classes: is 11"):
        StoredImages(node["root"], 4, 11, num_workers=0).setup()
    assert list(StoredImages.check({**node, "num_classes": 10}, {"local": True})) == []
    elsewhere = list(StoredImages.check({**node, "root": "azure://box/a"}, {"local": False}))
    assert elsewhere == ["the job looks at azure://box/a"]
    (tmp_path / "far" / MANIFEST).unlink()
    found = [p.path for p in StoredImages.check({"root": f"file://{tmp_path}/far"})]
    assert found == ["root", "root"]  # a folder without train/ and val/
    (bad,) = StoredImages.check({"root": "ftp://x/y"})
    assert bad.path == "root" and "form" in bad.what


def setup_of_rank(rank: int, root: Path, meet: Path, said: Any) -> None:
    """What a rank's set-up raises."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    try:
        StoredImages(str(root), 4, 10, num_workers=0).setup()
        said.put((rank, ""))
    except UserError as error:
        said.put((rank, str(error)))
    dist.destroy_process_group()


def setup_of_two(tmp_path: Path, *roots: Path) -> dict[int, str]:
    context = multiprocessing.get_context("fork")
    said, meet = context.SimpleQueue(), tmp_path / f"meet-{time.monotonic_ns()}"
    ranks = [
        context.Process(target=setup_of_rank, args=(rank, root, meet, said))
        for rank, root in enumerate(roots)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    return dict(said.get() for _ in ranks)


def test_ranks_that_see_different_data_sets_are_refused(tmp_path, made):
    prepare(tmp_path / "other", train=39)
    assert setup_of_two(tmp_path, tmp_path / "far", tmp_path / "far") == {0: "", 1: ""}
    said = setup_of_two(tmp_path, tmp_path / "far", tmp_path / "other")
    keys = [open_data_set(str(tmp_path / name)).key[:12] for name in ("far", "other")]
    assert said[0] == said[1]
    assert f"data sets: {keys[0]} is rank 0's, on " in said[0] and f"{keys[1]} is rank 1" in said[0]


def test_ranks_that_see_different_folders_are_refused(tmp_path):
    for root, count in (("a", 2), ("b", 3)):
        for split in ("train", "val"):
            for number in range(10):
                (tmp_path / root / split / str(number)).mkdir(parents=True)
                for image in range(count):
                    (tmp_path / root / split / str(number) / f"{image}.jpg").touch()
    assert setup_of_two(tmp_path, tmp_path / "a", tmp_path / "a") == {0: "", 1: ""}
    said = setup_of_two(tmp_path, tmp_path / "a", tmp_path / "b")
    assert said[0] == said[1] and "the ranks see different data sets" in said[0]


@pytest.mark.parametrize("room", [None, 1.0])
def test_only_what_an_epoch_uses_is_brought_down(tmp_path, room):
    manifest = prepare(tmp_path / "far", train=160, val=17)
    size = max(shard.bytes for shard in manifest.splits["train"].shards)
    limits = {"limit_train_batches": 0.1, "limit_val_batches": 2}
    bounded = {} if room is None else {"cache_gb": 12 * size / 1e9}
    data = images(tmp_path, cache_dir=str(tmp_path / "cache"), **bounded)
    data.trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, **limits)
    data.setup()
    fresh = data.train_dataloader()
    fresh.batch_sampler.position = TrainPosition(3)
    seen = [i for _, batch in zip(range(4), fresh, strict=False) for i in batch["index"].tolist()]
    cache = data._splits["val"].shards.cache  # type: ignore[attr-defined]
    needed = {f"train-{i // PER_SHARD:05d}.tar" for i in seen}
    if room is not None:  # a window's shards are all of it
        window = data._order._needs.windows.shards(3, 3)[0]  # type: ignore[union-attr]
        needed = {f"train-{number:05d}.tar" for number in window}
    needed |= {"val-00000.tar"}
    wait_until(lambda: {name for name in files(cache) if name.endswith(".tar")} >= needed)
    time.sleep(0.5)  # for one that should not come
    assert {name for name in files(cache) if name.endswith(".tar")} == needed
    data.teardown()


def test_a_data_set_larger_than_the_disk_is_refused_before_training(tmp_path, small_disk):
    prepare(tmp_path / "far", padding=20_000)
    data = images(tmp_path, cache_dir=str(small_disk))
    with pytest.raises(UserError, match=r"has room for .* and needs") as error:
        data.setup()
    assert "data.cache_gb" in error.value.problems[0].remedy
