"""A mixture of data sets: its shares, its order, and that a resume goes on exactly."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from distdl.data import StoredImages, TrainPosition
from distdl.data.loading import distribute
from distdl.data.mixed import MixedSamples
from distdl.images import decoding
from distdl.images.views import EvalView
from tests.prepared import prepare, refusal
from tests.unit.sample_data import Listed, write_photographs

CLASSES = [f"class {i}" for i in range(10)]


def mixture(sizes, weights):
    return MixedSamples([Listed([b""] * size, EvalView(8)) for size in sizes], weights)


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [((70, 30), (0.7, 0.3)), ((70, 30), (0.1, 0.9)), ((5, 90, 6), (0.5, 0.25, 0.25))],
)
def test_each_set_gives_its_share_and_uses_its_samples_evenly(sizes, weights):
    mixed = mixture(sizes, weights)
    count = sum(sizes)
    assert len(mixed) == count
    used = Counter()
    for epoch in range(10):
        order = mixed.order(3, epoch)
        assert len(order) == len({*order.tolist()}) == count
        of_part = [mixed._part(index)[0] for index in order.tolist()]
        for part, weight in zip(mixed.parts, weights, strict=True):
            assert abs(of_part.count(part) - weight * count) < 1
        used.update(index % count for index in order.tolist())
        again = mixture(sizes, weights).order(3, epoch)
        assert np.array_equal(order, again)
        assert not np.array_equal(order, mixture(sizes, weights).order(4, epoch))
    for start, size in zip(mixed.starts, sizes, strict=False):
        times = [used[index] for index in range(start, start + size)]
        assert max(times) - min(times) <= 1


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Shards, and class folders with other images of the same classes."""
    folder = tmp_path_factory.mktemp("sets")
    prepare(folder / "shards", train=40, val=7)
    write_photographs(folder / "photographs", CLASSES, train=2, val=1)
    (folder / "photographs/train/class 3/0.jpg").write_bytes(b"no image")
    return folder


def loader(roots, position=None, ranks=1, rank=0, **more):
    mix = [{"root": str(roots / "photographs"), "weight": 0.6}]
    settings = {"draws": "counter", "image_size": 24, "mix": mix, **more}
    data = StoredImages(str(roots / "shards"), 12 // ranks, 10, **settings)
    data.setup()
    position = position or TrainPosition()
    distribute(data, rank=rank, world_size=ranks, seed=3, position=position)
    return data.train_dataloader()


def plain(batches):
    return [
        {k: v.tolist() if hasattr(v, "tolist") else v for k, v in batch.items()}
        for batch in batches
    ]


def test_a_mixture_is_resumed_exactly_with_any_workers_and_ranks(roots):
    whole = plain(loader(roots, num_workers=0))
    assert len(whole) == 5
    # 36 of 20 photographs, so most come twice, each time cut and flipped in another way.
    seen = {}
    for batch in whole:
        for index, image in zip(batch["index"], batch["image"], strict=True):
            seen.setdefault(index % 60, []).append(image)
    twice = [images for images in seen.values() if len(images) > 1]
    assert len(twice) == 16
    assert all(first != second for first, second in twice)
    damaged = [text for batch in whole for text in batch["damaged"] if text]
    assert len(damaged) in (1, 2)
    kinds = [("processes", 2)]
    kinds += [("threads", 2)] if decoding.native_library() is not None else []
    for kind, workers in kinds:
        position = TrainPosition(consumed=24)
        assert plain(loader(roots, position, worker_kind=kind, num_workers=workers)) == whole[2:]
    halves = [plain(loader(roots, ranks=2, rank=rank, num_workers=0)) for rank in range(2)]
    for one, first, second in zip(whole, *halves, strict=True):
        assert one["image"] == first["image"] + second["image"]
    later = loader(roots, TrainPosition(epoch=1), num_workers=0)
    assert plain(later)[0]["index"] != whole[0]["index"]


@pytest.mark.parametrize(
    ("mix", "path", "text"),
    [
        ("photographs", "mix", "not a list of sets"),
        ([{"root": "x"}], "mix[0]", "root and weight alone"),
        ([{"root": None, "weight": 0.5}], "mix[0].root", "not a folder or an address"),
        ([{"root": "x", "weight": 1.0}], "mix[0].weight", "above 0 and below 1"),
        ([{"root": "x", "weight": True}], "mix[0].weight", "above 0 and below 1"),
        ([{"root": "x", "weight": 0.5}] * 2, "mix", "nothing is left of data.root"),
        ([{"root": "/nowhere", "weight": 0.5}], "mix[0].root", "no such folder"),
    ],
)
def test_a_wrong_mixture_is_refused_before_anything_starts(roots, mix, path, text):
    node = {"root": str(roots / "shards"), "num_classes": 10, "mix": mix}
    (problem,) = StoredImages.check(node)
    assert problem.path == path
    assert text in problem.what
    assert problem.remedy


def test_what_does_not_go_with_a_mixture_is_refused(roots, tmp_path):
    mix = [{"root": str(roots / "photographs"), "weight": 0.5}]
    node = {"root": str(roots / "shards"), "num_classes": 10, "mix": mix}
    assert [*StoredImages.check(node)] == []
    assert StoredImages.added(node) == 20
    found = [*StoredImages.check({**node, "cache_gb": 1.0, "order": "windows"})]
    assert [problem.path for problem in found] == ["cache_gb", "order"]
    write_photographs(tmp_path, [f"other {i}" for i in range(10)], train=1, val=1)
    other = [{"root": str(tmp_path), "weight": 0.5}]
    problem = refusal(StoredImages(str(roots / "shards"), 4, 10, num_workers=0, mix=other).setup)
    assert problem.path == "data.mix[0].root"
    assert "class 0" in problem.what
    (before,) = StoredImages.check({**node, "mix": other})  # and before anything starts
    assert (before.path, before.what) == ("mix[0].root", problem.what)


def test_a_mixture_is_closed(roots):
    mix = [{"root": str(roots / "photographs"), "weight": 0.6}]
    data = StoredImages(str(roots / "shards"), 4, 10, draws="counter", image_size=24, mix=mix)
    data.setup()
    data.teardown("fit")
