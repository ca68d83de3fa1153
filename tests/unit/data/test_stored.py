"""StoredImages from shards: in place, with a cache, with a small one, and damaged."""

import os
import time
from dataclasses import replace

import pytest
from filelock import FileLock

from distdl.data import StoredImages, TrainPosition
from distdl.datasets.cache import Cache
from distdl.datasets.format import MANIFEST, File
from distdl.datasets.order import Windows
from distdl.datasets.reading import Shards, open_data_set
from tests import prepared
from tests.prepared import PER_SHARD, files, flip, jpeg, open_cache, prepare, refusal
from tests.unit.sample_data import share, write_photographs
from tests.waiting import until

made, small_disk = prepared.made, prepared.small_disk  # fixtures


def test_damage_in_the_cache_is_never_read(tmp_path, made, caplog):
    def opened():
        return Shards(open_data_set(str(tmp_path / "far")), "train", open_cache(tmp_path))

    shards = opened()
    assert [shards.read(i) for i in range(40)] == [jpeg(i) for i in range(40)]
    assert sorted(shards.cache.store.downloads) == files(shards.cache), "each of them once"
    copies = [shards.cache.path(shards.file(i)) for i in range(40)]
    positions = [int(offset) + 300 for offset in shards.rows["offset"]]
    os.utime(copies[11], (1, 1))  # from an earlier run
    flip(copies[11], positions[11], keep_times=True)
    later = opened()
    assert later.read(11) == jpeg(11)
    assert later.read(12) == jpeg(12)
    assert shards.cache.store.downloads.count(copies[11].name) == 2
    again = "is damaged: it is downloaded again"
    assert caplog.messages == [f"{copies[11]} {again}"]
    # Also during the run, in a copy that was intact at first.
    assert later.read(30) == jpeg(30)
    flip(copies[30], positions[30], keep_times=True)
    assert later.read(30) == jpeg(30)
    assert not later.repair(30)
    os.truncate(copies[20], 100)
    assert later.read(20) == jpeg(20)
    assert caplog.messages[-1] == f"{copies[20]} {again}"
    # After a failed download a reader does not wait again.
    lost = Shards(open_data_set(str(tmp_path / "far")), "train", open_cache(tmp_path, root="other"))
    for path in (tmp_path / "far").glob("*.tar"):
        path.unlink()
    assert refusal(lost.read, 0) == refusal(lost.read, PER_SHARD)


def images(tmp_path, **arguments):
    arguments = {"num_workers": 0, **arguments}
    data = StoredImages(str(tmp_path / "far"), 4, num_classes=10, image_size=16, **arguments)
    return share(data)


def cache_of(tmp_path):
    data = open_data_set(str(tmp_path / "far"))
    return Cache(data.store, tmp_path / "cache", data.key)


def damaged(batches):
    """The images that a pass over a loader calls damaged, and the total weight."""
    names = set()
    weight = 0.0
    for batch in batches:
        weight += float(batch["weight"].sum())
        names |= {text.partition(":")[2].partition(":")[0] for text in batch["damaged"] if text}
    return dict.fromkeys(names, weight) or {"": weight}


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_in_a_folder_is_found_in_each_epoch(tmp_path, made, workers):
    rows = {name: open_data_set(str(tmp_path / "far")).index(name, None) for name in made.splits}

    def damage(split, index):
        row = rows[split][index]
        path = tmp_path / "far" / f"{split}-{row['shard']:05d}.tar"
        flip(path, int(row["offset"]) + 300, keep_times=True)  # it decodes, with other pixels

    damage("train", 20)
    damage("val", 3)
    data = images(tmp_path, num_workers=workers)
    data.setup()
    train = data.train_dataloader()
    val = data.val_dataloader()
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


def epoch(data, number, consumed=0, each=lambda: None):
    """The indices of one epoch, whose labels are right."""
    loader = data.train_dataloader()
    indices = []
    loader.batch_sampler.position = TrainPosition(number, consumed)
    for batch in loader:
        assert (batch["label"] == batch["index"] % 10).all()
        assert batch["weight"].all()
        indices += batch["index"].tolist()
        each()
    return indices


def shards_of(indices):
    return {f"train-{index // PER_SHARD:05d}.tar" for index in indices}


def test_the_first_epoch_uses_windows_and_the_second_needs_no_store(tmp_path, made):
    data = images(tmp_path, cache_dir=str(tmp_path / "cache"), shuffle_window=2)
    data.setup()
    first = epoch(data, 0)
    assert sorted(first) == list(range(40))
    assert len(shards_of(first[: 2 * PER_SHARD])) == 2
    cache = cache_of(tmp_path)
    until(lambda: all(cache.has(s) for split in made.splits.values() for s in split.shards))
    (tmp_path / "far").rename(tmp_path / "gone")
    second = epoch(data, 1)
    assert sorted(second) == list(range(40))
    assert len(shards_of(second[: 2 * PER_SHARD])) > 2
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

    def within_limit():
        with FileLock(cache.root / "lock"):
            assert sum((cache.folder / name).stat().st_size for name in files(cache)) <= limit

    orders = [epoch(data, number, each=within_limit) for number in range(3)]
    for order in orders:
        assert sorted(order) == list(range(160))
        assert len(shards_of(order[:16])) <= 3
    assert orders[0] != orders[1] != orders[2]
    assert damaged(data.val_dataloader()) == {"": 7}
    data.teardown()
    small = images(tmp_path, cache_dir=str(tmp_path / "c"), cache_gb=2 * size / 1e9)
    problem = refusal(small.setup)
    enough = float(problem.remedy.removeprefix("data.cache_gb=").removesuffix(" or more"))
    assert problem.path == "data.cache_gb"
    assert enough * 1e9 >= 3 * size


def test_windows_of_a_folder_are_read_ahead_and_resumed(tmp_path):
    """As `data.order=windows` has it, for a disk that is slow at random reads."""
    prepare(tmp_path / "far", train=160)
    data = images(tmp_path, order="windows", shuffle_window=2)
    data.setup()
    ahead = data._order._ahead
    seen = set()
    near = []

    def look():
        wanted = {file.name for file in data._order._needs.near()}
        near.append(wanted)
        until(lambda: all(ahead.has(File(name, 0, "")) for name in wanted))
        seen.update(ahead._read)

    for number in range(2):
        order = epoch(data, number, each=look)
        assert sorted(order) == list(range(160))
        assert len(shards_of(order[:16])) <= 2
        assert epoch(data, number, consumed=60) == order[60:]
    assert len(seen) == 20
    assert max(map(len, near)) == 4, "two windows, and no more, are kept in mind"
    until(lambda: len(ahead._read) <= 4)
    data.teardown()
    node = {"root": str(tmp_path), "order": "windows"}
    problem = next(iter(StoredImages.check(node, {"local": True})))
    assert (problem.path, problem.remedy) == ("order", "data.order=shuffled")


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
        needed = {f"train-{n:05d}.tar" for n in Windows(counts, 2).shards(0, 3)[0]}
    needed |= {"val-00000.tar"}
    cache = cache_of(tmp_path)
    until(lambda: set(files(cache)) >= needed)
    time.sleep(0.3)  # for one that should not come
    assert {name for name in files(cache) if name.endswith(".tar")} == needed
    data.teardown()


def test_a_data_set_larger_than_the_disk_is_refused(tmp_path, small_disk):
    prepare(tmp_path / "far", padding=50_000)
    problem = refusal(images(tmp_path, cache_dir=str(small_disk)).setup)
    assert problem.path == "data.cache_dir"
    assert "data.cache_gb" in problem.remedy


def test_check_and_setup_report_the_same(tmp_path, made):
    def check(root, local=True, **node):
        return list(StoredImages.check({"root": root, **node}, {"local": local}))

    root = str(tmp_path / "far")
    manifest = tmp_path / "far" / MANIFEST
    problem = refusal(StoredImages(root, 4, 11, num_workers=0).setup)
    assert problem.path == "data.num_classes"
    assert "is 11" in problem.what
    assert check(f"file://{root}", num_classes=10) == []
    assert check("azure://box/a", local=False) == ["the job itself checks azure://box/a"]
    empty = replace(made.splits["val"], samples=0, shards=())
    manifest.write_text(replace(made, splits={**made.splits, "val": empty}).to_json())
    (problem,) = check(root)
    assert problem.path == "root"
    assert "no sample in 'val'" in problem.what
    assert refusal(images(tmp_path).setup).what == problem.what
    manifest.write_text(made.to_json())
    flip(tmp_path / "far/train.index.npy", 500)
    problem = refusal(images(tmp_path).setup)
    assert problem.path == "data.root"
    assert "train.index.npy" in problem.what


def test_ranks_that_see_different_data_sets_are_refused(tmp_path, monkeypatch):
    met = []

    def gather(value):
        """As if those that come later were rank 1."""
        met.append(value)
        return [met[0], value]

    monkeypatch.setattr("distdl.data.same_data.process_group.gather", gather)
    monkeypatch.setattr("distdl.data.stored_data.name_different_decoders", lambda decoder: None)
    for train in (1, 2):
        write_photographs(tmp_path / f"folder {train}", "ab", train=train, val=1)
        prepare(tmp_path / f"shards {train}", train=train)
    for kind, classes in (("folder", 2), ("shards", 10)):
        met.clear()
        roots = (str(tmp_path / f"{kind} {number}") for number in (1, 1, 2))
        first, same, other = (StoredImages(r, 4, classes, num_workers=0) for r in roots)
        first.setup(), same.setup()
        what = refusal(other.setup).what
        assert f"different data sets: {met[0][0]} is rank 0's, on" in what
        assert met[2][0] in what


@pytest.mark.parametrize("kind", ["folder", "prepared"])
def test_the_data_on_the_disk_are_counted(request, tmp_path, kind):
    from tests import prepared

    config = {
        "task": {"_target_": "distdl.tasks.train"},
        "data": {"batch_size": 4},
        "trainer": {"val_check_interval": 20},
    }
    context = {"local": True, "world_size": 2, "config": config}
    if kind == "prepared":
        root = tmp_path / "shards"
        prepared.prepare(root)
        classes = None
    else:
        for split in ("train", "val"):
            for name in "ab":
                (tmp_path / split / name).mkdir(parents=True)
                for number in range(20):
                    (tmp_path / split / name / f"{number}.jpg").write_bytes(b"")
        root = tmp_path
        classes = 2
    node = {"root": str(root), "num_classes": classes, "batch_size": 4}
    (problem,) = [p for p in StoredImages.check(node, context) if not isinstance(p, str)]
    assert problem.what == "trainer.val_check_interval is 20, and an epoch has 5 batches"
    # A batch that is larger than the set, whatever else the run counts.
    for batch, refused in ((20, False), (21, True)):
        config = {"data": {"batch_size": batch}, "task": {"_target_": "distdl.tasks.train"}}
        context = {"local": True, "world_size": 2, "config": config}
        found = [p for p in StoredImages.check(node, context) if not isinstance(p, str)]
        assert [p.path for p in found] == (["batch_size"] if refused else []), found
