"""Decoders against PIL, views against torchvision, and settings that are refused."""

from __future__ import annotations

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from distdl.data import decoding, views
from distdl.data.crop import random_crop
from distdl.data.decoding import CPU_DECODERS, Header, decoder, jpeg_header, works
from distdl.data.images import ImageData
from distdl.data.loading import KeyedDataset
from distdl.data.nvjpeg import EncodedBatch
from distdl.data.resizing import Resizing
from distdl.data.sampling import SampleKey
from distdl.data.synthetic_jpeg import SyntheticJpegs, jpegs
from distdl.data.views import EvalView, TrainView, check_views
from distdl.datasets.image_files import DamagedImage
from tests.conftest import ROOT
from tests.unit.sample_data import BROKEN, GREY, PLAIN, Listed, encoded, picture, seed_all

PHOTOGRAPHS = sorted((ROOT.parent / "shared/images/imagenet_sample").rglob("*.jpg"))[::5]
FAST = [name for name in CPU_DECODERS if name != "pil" and works(name)]
ROTATED = Image.Exif()
ROTATED[0x0112] = 6  # orientation: a quarter to the right
KINDS = {
    "plain": PLAIN,
    "grey": GREY,
    "cmyk": encoded(picture().convert("CMYK"), quality=95),
    "progressive": encoded(picture(), progressive=True),
    "fine colours": encoded(picture(), subsampling=0),
    "restart markers": encoded(picture(), restart_marker_rows=1),
    "rotated by EXIF": encoded(picture(), exif=ROTATED),
    "png": encoded(picture(), "PNG"),
    "palette": encoded(picture().convert("P"), "PNG"),
    "transparent": encoded(picture().convert("RGBA"), "PNG"),
    "webp": encoded(picture(), "WEBP"),
}
RESIZE = {"from": 32, "to": 96, "until_epoch": 2}
with_torchcodec = pytest.mark.skipif(not works("torchcodec"), reason="no torchcodec")


def by_pil(data: bytes) -> torch.Tensor:
    with Image.open(io.BytesIO(data)) as file:
        return torch.from_numpy(np.array(file.convert("RGB"))).permute(2, 0, 1)


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Mean, of 255."""
    assert left.shape == right.shape
    return float((left.float() - right.float()).abs().mean())


@pytest.mark.parametrize("name", ["pil", *FAST])
def test_all_decoders_see_what_pil_sees(name):
    for kind, data in KINDS.items():
        pixels = decoder(name)(data)
        assert pixels.dtype == torch.uint8
        assert pixels[None].is_contiguous(memory_format=torch.channels_last)
        assert difference(pixels, by_pil(data)) < 0.01, kind
    for path in PHOTOGRAPHS:
        assert difference(decoder(name)(path.read_bytes()), by_pil(path.read_bytes())) < 1, path


@pytest.mark.parametrize("name", ["pil", *FAST])
def test_no_decoder_fills_in_missing_bytes(name):
    cut = [KINDS[kind][:-1] for kind in ("plain", "grey", "progressive")]
    for kind in ("plain", "grey", "progressive", "png"):
        cut += [KINDS[kind][: int(len(KINDS[kind]) * s)] for s in (0.0, 0.01, 0.4, 0.9, 0.99)]
    for data in cut:
        with pytest.raises(DamagedImage):
            decoder(name)(data)
    with pytest.raises(DamagedImage, match="is not an image"):
        decoder(name)(b"<html>404</html>")


def test_auto_takes_the_first_that_works(monkeypatch):
    assert decoder("auto") is decoder(next(n for n in CPU_DECODERS if works(n)))
    monkeypatch.setattr(decoding, "works", lambda name: name == "pil")
    assert decoder("auto") is decoding.decode_pil
    with pytest.raises(ValueError, match="known decoders: auto, simplejpeg"):
        decoder("opencv")


def test_headers():
    components = {"plain": 3, "grey": 1, "cmyk": 4, "rotated by EXIF": 3}
    for kind, number in components.items():
        assert jpeg_header(KINDS[kind]) == Header(90, 125, number)
    flat = PLAIN.replace(bytes((8, 0, 90, 0, 125)), bytes((8, 0, 0, 0, 125)))
    assert flat != PLAIN
    assert {jpeg_header(data) for data in (flat, KINDS["png"], PLAIN[:40])} == {None}
    with pytest.raises(DamagedImage):
        TrainView(16)(flat)


def draw(view, data, seed=0):
    seed_all(seed)
    return view(data)["image"]


@pytest.mark.parametrize("size", [(125, 90), (90, 125), (64, 64), (40, 300)])
def test_validation_sees_exactly_what_torchvisions_reference_sees(size):
    data = encoded(picture(*size), quality=95)
    seen = draw(EvalView(56, decoder="pil"), data)
    reference = v2.Compose([v2.Resize(64, antialias=True), v2.CenterCrop(56)])
    assert torch.equal(seen, reference(by_pil(data)))
    on_pil = v2.Compose([v2.Resize(64), v2.CenterCrop(56), v2.PILToTensor()])
    assert difference(seen, on_pil(Image.open(io.BytesIO(data)))) < 0.5


def generated(**options):
    sizes = {"pool_size": 4, "width": 64, "height": 48, "kilobytes": 3, "num_workers": 0}
    data = SyntheticJpegs(4, 2, **sizes, **options)
    data.setup()
    return data, next(iter(data.val_dataloader()))


def test_validation_may_have_a_crop_and_a_size_of_its_own():
    """As torchvision's later recipes: trained at 176, evaluated at 224 out of 232; in small."""
    sizes = {"image_size": 22, "val_crop_size": 28, "val_resize_size": 29}
    data, batch = generated(**sizes)
    assert batch["image"].shape == (4, 3, 28, 28)
    reference = v2.Compose([v2.Resize(29, antialias=True), v2.CenterCrop(28)])
    dataset = data.val_dataloader().dataset
    assert torch.equal(batch["image"][0], reference(dataset.view.decode(dataset.read(0))))
    assert next(iter(data.train_dataloader()))["image"].shape == (4, 3, 22, 22)
    assert EvalView(28).short_side == 32
    assert not problems(**sizes) and not problems(val_crop_size=224, val_resize_size=None)


def test_crops_are_drawn_as_torchvision_draws_them():
    seed_all(0)
    ratio, count = (1.0, 2.0), 2000  # the usual ratio is the same upside down
    transform = v2.RandomResizedCrop(224, ratio=ratio)
    image = torch.empty(3, 375, 500, dtype=torch.uint8)
    theirs = [transform.make_params([image]) for _ in range(count)]
    ours = np.array([random_crop(375, 500, (0.08, 1.0), ratio) for _ in range(count)])
    for column, key in zip(ours.T, ("top", "left", "height", "width"), strict=True):
        other = np.array([crop[key] for crop in theirs])
        error = np.hypot(column.std(), other.std()) / count**0.5
        assert abs(column.mean() - other.mean()) < 4 * error
    assert all(t + h <= 375 and x + w <= 500 for t, x, h, w in ours)
    # Nothing fits: the widest centre that is allowed.
    assert random_crop(10, 400, (1.0, 1.0), (3 / 4, 4 / 3)) == (0, 193, 10, 13)
    assert random_crop(400, 10, (1.0, 1.0), (3 / 4, 4 / 3)) == (193, 0, 13, 10)


def test_training_sees_a_crop_resized_and_flipped():
    view, flips = TrainView(32, decoder="pil"), 0
    for seed in range(20):
        seen = draw(view, PLAIN, seed)
        seed_all(seed)
        crop = view.crop(90, 125, 0)
        size = [32, 32]
        expected = v2.functional.resized_crop_image(by_pil(PLAIN), *crop[:4], size, antialias=True)
        assert torch.equal(seen, expected.flip(-1) if crop.flip else expected)
        flips += crop.flip
    assert 3 < flips < 17


@pytest.mark.parametrize("name", [*FAST, "nvjpeg"])
def test_a_header_is_parsed_once_per_image(monkeypatch, name):
    parsed = []
    for module in (decoding, views):
        count = lambda data: parsed.append(data) or jpeg_header(data)  # noqa: E731
        monkeypatch.setattr(module, "jpeg_header", count)
    kinds = [KINDS[kind] for kind in ("plain", "cmyk", "png")]
    for view in (TrainView(16, decoder=name), EvalView(16, decoder=name)):
        parsed.clear()
        for data in kinds:
            view(data)
        assert parsed == kinds


def test_views_travel_to_workers():
    view = TrainView(16, augment={"rand_augment": {"ops": 2, "magnitude": 9}})
    assert torch.equal(draw(pickle.loads(pickle.dumps(view)), PLAIN), draw(view, PLAIN))


def test_sizes_grow_by_the_epoch_alone():
    size = Resizing.from_config({"from": 160, "to": 192, "from_epoch": 10, "until_epoch": 20}).size
    assert [size(epoch) for epoch in range(25)] == [160] * 15 + [192] * 10  # from half-way on
    growing = Resizing.from_config({"from": 96, "to": 224, "until_epoch": 8})
    assert {growing.size(epoch) for epoch in range(9)} == {96, 128, 160, 192, 224}


def test_workers_see_the_epochs_size():
    images = Listed([PLAIN], TrainView(32, resize=RESIZE))
    dataset = KeyedDataset(images, seed=0, with_weight=True)
    keys = [[SampleKey(0, epoch, 1.0)] * 2 for epoch in (0, 1, 2, 0)]
    loader = DataLoader(dataset, batch_sampler=keys, num_workers=2, collate_fn=images.collate)
    assert [batch["image"].shape[-1] for batch in loader] == [32, 64, 96, 32]


@with_torchcodec
def test_a_torchcodec_without_jpegs_is_refused(monkeypatch):
    monkeypatch.delattr("torchcodec.decoders.decode_jpeg")  # as before 0.16
    assert not works("torchcodec")
    for name in ("torchcodec", "nvjpeg"):
        (problem,) = check_views({"decoder": name})
        assert problem.path == "decoder" and "'torchcodec>=0.16'" in problem.remedy


@with_torchcodec
@pytest.mark.parametrize("kind", [EvalView, TrainView])
def test_the_device_decodes_the_pixels_that_a_worker_would_have_decoded(kind):
    names = ("plain", "grey", "cmyk", "png", "rotated by EXIF", "fine colours")

    def batch(view):
        seed_all(0)
        images = Listed([KINDS[name] for name in names], view)
        return images.collate([images[i] for i in range(len(names))])

    shipped, expected = batch(kind(16, decoder="nvjpeg")), batch(kind(16))["image"]
    assert isinstance(shipped["image"], EncodedBatch) and len(shipped["image"]) == len(names)
    is_encoded = [crop[6] > 0 for crop in shipped["image"].crops]
    assert is_encoded == [name not in ("cmyk", "png") for name in names]
    image = ImageData(2, 0).on_before_batch_transfer(shipped, 0)["image"]
    assert torch.equal(image, expected)
    assert image.is_contiguous(memory_format=torch.channels_last)
    damaged = Listed([BROKEN, PLAIN], kind(16, decoder="nvjpeg"))[0]
    assert damaged["weight"] == 0 and "file 0: " in damaged["damaged"]


def test_generated_jpegs_have_the_size_that_was_asked_for():
    files = jpegs(3, 2, 200, 150, 20_000, seed=0)
    assert len(set(files)) == 3 and all(18_000 < len(file) < 22_000 for file in files)
    assert jpeg_header(files[0]) == Header(150, 200, 3)
    assert files == jpegs(3, 2, 200, 150, 20_000, seed=0) != jpegs(3, 2, 200, 150, 20_000, seed=1)


def test_generated_jpegs_become_batches():
    data, batch = generated(image_size=16, train_samples=9, val_samples=5)
    image = batch["image"]
    assert image.shape == (4, 3, 16, 16) and batch["label"].tolist() == [0, 1, 0, 1]
    assert len(data.train_dataloader().dataset) == 9
    assert difference(image[0], image[2]) < difference(image[0], image[1])


def problems(**config):
    return [(p.path, f"{p.what} {p.remedy}") for p in check_views(config)]


@pytest.mark.parametrize(
    ("config", "path", "fragment"),
    [
        ({}, None, ""),
        ({"image_size": 1, "scale": [1, 1], "ratio": (0.5, 2.0)}, None, ""),
        ({"decoder": "pil", "resize": RESIZE, "augment": None}, None, ""),
        ({"decoder": "opencv"}, "decoder", "one of auto, simplejpeg"),
        ({"resize": {"from": 160, "until_epoch": 3}}, "resize", "lacks to"),
        ({"resize": {**RESIZE, "untilepoch": 3}}, "resize.untilepoch", "until_epoch"),
        ({"resize": {**RESIZE, "from": 170}}, "resize.from", "data.resize.from=160"),
        ({"resize": {**RESIZE, "to": "192"}}, "resize.to", "whole number"),
        ({"resize": {**RESIZE, "from_epoch": 2}}, "resize.until_epoch", "not after from_epoch=2"),
        ({"resize": 32}, "resize", "mapping 'data.resize={from"),
        ({"image_size": 100_000}, "image_size", "to 8,192"),
        ({"val_crop_size": 0}, "val_crop_size", "data.val_crop_size=224"),
        ({"val_resize_size": 223}, "val_resize_size", "less than the 224 pixels"),
        ({"val_crop_size": 192, "val_resize_size": 176}, "val_resize_size", "=219"),
        ({"scale": 0.5}, "scale", "is 0.5, not two numbers"),
        ({"scale": [0, 1]}, "scale", "above 0, at most 1"),
        ({"scale": [0.9, 0.5]}, "scale", "the smaller one first"),
        ({"ratio": ["a", "b"]}, "ratio", "not two numbers above 0, the"),
        (
            {"decoder": "nvjpeg", "augment": {"random_erasing": {"p": 0.1}}},
            "augment.random_erasing",
            "data.augment.random_erasing=null",
        ),
    ],
)
def test_settings(monkeypatch, config, path, fragment):
    monkeypatch.setattr(views, "works", lambda name: True)
    result = problems(**config)
    assert [p for p, _ in result] == [path] * bool(path)
    assert all(fragment in text for _, text in result)


def test_a_decoder_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(views, "works", lambda name: False)
    (problem,) = check_views({"decoder": "nvjpeg"})
    assert problem.path == "decoder" and problem.remedy.startswith("pip install 'torchcodec")
    assert list(check_views({"decoder": "nvjpeg"}, local=False)) == problems(decoder="pil") == []
