"""Batches that are assembled at their place: the same by threads, processes and one by one."""

from __future__ import annotations

import gc
import logging
import random
import threading

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from distdl.data import StoredImages, TrainPosition
from distdl.data.images import ImageData
from distdl.data.keyed import KeyedDataset
from distdl.data.loading import distribute
from distdl.data.same_data import name_different_decoders
from distdl.data.sampling import SampleKey
from distdl.data.threads import Lent, ThreadLoader
from distdl.datasets.reading import Shards
from distdl.images import decoding
from distdl.images.native import WHOLE, Library
from distdl.images.views import EvalView
from distdl.util.errors import UserError
from tests.miniature import encoded, photograph
from tests.prepared import prepare
from tests.unit.sample_data import BROKEN, GREY, PICTURE, PLAIN, Listed
from tests.waiting import until

ERASING = {"random_erasing": {"p": 0.5, "fill": "noise"}}
# Also such as the library does not decode, and damaged ones.
FILES = [PLAIN, encoded(PICTURE, "PNG"), GREY, BROKEN, encoded(PICTURE, progressive=True)]
FILES += [encoded(photograph(n, 60 + n, 50)) for n in range(5)] + [PLAIN[:-40], b"no image"]
needs_native = pytest.mark.skipif(decoding.native_library() is None, reason="no distdl-native")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Class folders with odd and damaged files."""
    root = tmp_path_factory.mktemp("images")
    for split in ("train", "val"):
        for number, data in enumerate(FILES * 3):
            folder = root / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:02d}.jpg").write_bytes(data)
    return root


def module(root, kind, workers, position=None, classes=2, **more):
    settings = {"draws": "counter", "image_size": 24, "augment": ERASING, **more}
    data = StoredImages(str(root), 4, classes, num_workers=workers, worker_kind=kind, **settings)
    data.setup()
    distribute(data, rank=0, world_size=1, seed=3, position=position or TrainPosition())
    return data


def plain(batch):
    """A batch as values that compare, with the types and the layout of its tensors."""
    values = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
    types = {k: getattr(v, "dtype", None) for k, v in batch.items()}
    last = batch["image"].is_contiguous(memory_format=torch.channels_last)
    return [*batch], types, last, values


@needs_native
@pytest.mark.parametrize("stage", ["train", "val"])
def test_every_kind_of_worker_and_decoder_makes_the_same_batches(root, stage):
    def batches(*args, **more):
        loader = getattr(module(root, *args, **more), f"{stage}_dataloader")()
        return type(loader), [plain(batch) for batch in loader]

    _, expected = batches("processes", 0, decoder="simplejpeg")
    assert len(expected) == 9
    damaged = [text for *_, values in expected for text in values["damaged"] if text]
    assert len(damaged) == 9
    for kind, workers in (("processes", 0), ("processes", 2), ("threads", 1), ("threads", 3)):
        loader, made = batches(kind, workers)
        assert loader is (ThreadLoader if kind == "threads" else DataLoader)
        assert made == expected, (kind, workers)


def test_a_batch_is_what_collate_makes_of_samples_that_draw_by_their_key(root):
    data = module(root, "processes", 0)
    keyed = data.train_dataloader().dataset
    assert keyed.assembles
    keys = [SampleKey(index, 2, 1.0) for index in (0, 7, 3)]
    images = keyed.dataset
    state = random.getstate(), torch.get_rng_state().tolist()
    batch = keyed.__getitems__(keys).batch
    assert (random.getstate(), torch.get_rng_state().tolist()) == state
    again = keyed.__getitems__(keys[::-1]).batch
    assert torch.equal(batch["image"], again["image"].flip(0))
    assert batch["label"].tolist() == [images.label(key.index) for key in keys]
    other = keyed.__getitems__([key._replace(epoch=3) for key in keys]).batch
    assert not torch.equal(batch["image"], other["image"])


@needs_native
def test_a_resume_goes_on_exactly_with_another_kind_of_worker(root):
    whole = [plain(batch) for batch in module(root, "threads", 2).train_dataloader()]
    position = TrainPosition(consumed=12)
    for kind, workers in (("processes", 1), ("threads", 1)):
        rest = [plain(b) for b in module(root, kind, workers, position).train_dataloader()]
        assert rest == whole[3:]


@needs_native
def test_what_draws_in_other_ways_keeps_processes_and_says_so_once(root, caplog):
    for more in ({"draws": "global"}, {"augment": {"trivial_augment": True}}, {"decoder": "pil"}):
        caplog.clear()
        data = module(root, "threads", 1, **more)
        assert type(data.train_dataloader()) is DataLoader
        assert len(caplog.records) == 1
        assert "processes load" in caplog.text
    caplog.clear()
    assert type(module(root, "auto", 1, draws="global").train_dataloader()) is DataLoader
    assert type(module(root, "auto", 1).train_dataloader()) is ThreadLoader
    assert type(module(root, "auto", 5).train_dataloader()) is DataLoader
    assert not caplog.records
    # What a subclass overrides is called.
    assert Listed([PLAIN], EvalView(8)).draws_apart
    for name in ("at_epoch", "collate", "__getitem__"):
        kind = type("Own", (Listed,), {name: lambda *a: None})
        assert not kind([PLAIN], EvalView(8)).draws_apart
    assert not Listed([PLAIN], type("Own", (EvalView,), {})(8)).draws_apart
    own = KeyedDataset(Listed([PLAIN]), 0, with_weight=True, collate_fn=default_collate)
    assert not own.assembles


@needs_native
def test_a_rank_says_once_what_decodes_and_loads(root, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    augment = {"rand_augment": {"ops": 1}}
    for kind, workers, more, said in (
        ("threads", 1, {}, ["native decodes, in 1 thread of each rank (training)"]),
        ("processes", 2, {}, ["native decodes, in 2 processes of each rank (training)"]),
        (
            "auto",
            2,
            {"augment": augment},
            [
                "native decodes, in 2 processes of each rank (training)",
                "native decodes, in 2 threads of each rank (evaluation)",
            ],
        ),
        ("auto", 0, {"decoder": "pil"}, ["pil decodes, in the rank itself (training)"]),
    ):
        caplog.clear()
        data = module(root, kind, workers, **more)
        for _ in range(2):
            data.train_dataloader()
            data.val_dataloader()
        lines = [text for text in caplog.messages if text.startswith("images: ")]
        assert lines == [f"images: {text}" for text in said]
    caplog.clear()
    nodes = [("native", "a"), ("native", "a"), ("simplejpeg", "b"), ("native", "c")]
    monkeypatch.setattr("distdl.distributed.process_group.gather", lambda value: nodes)
    name_different_decoders("native")
    (line,) = caplog.messages
    assert "decoded by native on a, c, by simplejpeg on b" in line
    nodes.pop(2)
    name_different_decoders("native")
    assert len(caplog.messages) == 1


def test_memory_of_a_batch_is_used_again_once_nothing_refers_to_it():
    lent = Lent()
    first, second = lent((2, 8, 8, 3)), lent((2, 8, 8, 3))
    places = {first.data_ptr(), second.data_ptr()}
    assert len(places) == 2
    part = first.permute(0, 3, 1, 2)[1]
    del first
    assert lent((2, 8, 8, 3)).data_ptr() not in places, "a part of it is still in use"
    part = part + 1
    assert lent((2, 8, 8, 3)).data_ptr() in places
    del second
    assert lent((4, 8, 8, 3)).shape == (4, 8, 8, 3)


@needs_native
def test_threads_use_a_few_places_for_all_batches_of_all_epochs(root):
    data = module(root, "threads", 2)
    loader = data.train_dataloader()
    places = [batch["image"].data_ptr() for _ in range(6) for batch in loader]
    assert len(places) == 54
    assert len({*places}) <= 8  # four are made ahead, two are being made, one is looked at


class Failing(Listed):
    def read(self, index):
        if index == 5:
            raise UserError.at("data.root", "the shard is gone", "copy it again")
        return super().read(index)


def failing_loader():
    data = ImageData(2, 2, worker_kind="threads")
    images = Failing([PLAIN] * 12, EvalView(16))
    data.train_dataloader = lambda: data.loader(images, shuffle=False)
    distribute(data, rank=0, world_size=1, seed=0, position=TrainPosition(), shuffle=False)
    return data.train_dataloader()


def threads():
    return [each for each in threading.enumerate() if each.name.startswith("loader-")]


@needs_native
def test_threads_pass_on_refusals_and_end_with_their_loader():
    gc.collect()
    until(lambda: not threads(), 10)
    loader = failing_loader()
    batches = iter(loader)
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(UserError, match="the shard is gone"):
        next(batches)
    assert len(threads()) == 2
    # An epoch that is given up delays no other one, which has all its batches.
    del batches
    assert next(iter(loader))["index"].tolist() == [0, 1]
    assert len(threads()) == 2, "threads are kept between epochs"
    del loader
    gc.collect()
    until(lambda: not threads(), 10)


@pytest.mark.parametrize("draws", ["counter", "global"])
def test_a_loader_leaves_what_the_training_draws_alone(root, draws):
    """Such as its dropout: torch's loader draws a seed for its workers, and in a resumed process
    once more. A run that was started with the old generators keeps that."""
    kinds = [("processes", 0), ("processes", 1)]
    kinds += [("threads", 1)] if decoding.native_library() is not None else []
    for kind, workers in kinds:
        for apart in (True, False):
            data = module(root, kind, workers, TrainPosition(seeds_apart=apart), draws=draws)
            for loader in (data.train_dataloader(), data.val_dataloader()):
                state = torch.get_rng_state()
                next(iter(loader))
                same = torch.equal(state, torch.get_rng_state())
                assert same == (draws == "counter" or (apart and workers > 0)), (kind, workers)


@needs_native
def test_processes_start_while_threads_decode(root):
    busy = iter(module(root, "threads", 2).train_dataloader())
    forked = [plain(b) for b in module(root, "processes", 2).train_dataloader()]
    assert forked == [plain(b) for b in busy]


@needs_native
def test_a_prepared_image_is_decoded_to_its_end_once(tmp_path, monkeypatch):
    prepare(tmp_path, train=8, val=4)
    flags = []
    honest = Library.crops

    def crops(self, files, cuts, outs, room, how, most):
        flags.extend(how)
        return honest(self, files, cuts, outs, room, how, most)

    monkeypatch.setattr(Library, "crops", crops)
    data = module(tmp_path, "threads", 2, classes=10)
    for expected in ([WHOLE] * 8, [0] * 8):
        flags.clear()
        list(data.train_dataloader())
        assert flags == expected
    shards = data.splits["train"].shards
    assert isinstance(shards, Shards)
    apart = shards.for_thread(4)
    assert apart.read(0) == shards.read(0)
    assert apart._open is not shards._open
    assert apart._intact is shards._intact
