"""From bytes to pixels: decoders against PIL, views and augmentation against torchvision, and
settings that are refused."""

import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor, to_pil_image

from distdl.data.drawing import seed_all
from distdl.data.images import ImageData
from distdl.data.keyed import KeyedDataset
from distdl.data.sampling import SampleKey
from distdl.datasets.image_headers import DamagedImage
from distdl.images import views
from distdl.images.augment import IMAGENET_MEAN, IMAGENET_STD, Augment
from distdl.images.crop import random_crop
from distdl.images.decoding import CPU_DECODERS, decoder, works
from distdl.images.nvjpeg import EncodedBatch
from distdl.images.views import EvalView, TrainView, check_views
from tests.conftest import ROOT
from tests.miniature import encoded, photograph
from tests.unit.sample_data import BROKEN, GREY, PICTURE, PLAIN, Listed

PHOTOGRAPHS = sorted((ROOT.parent / "shared/images/imagenet_sample").rglob("*.jpg"))[::5]
ROTATED = Image.Exif()
ROTATED[0x0112] = 6  # orientation: a quarter to the right
KINDS = {
    "plain": PLAIN,
    "grey": GREY,
    "cmyk": encoded(PICTURE.convert("CMYK"), quality=95),
    "progressive": encoded(PICTURE, progressive=True),
    "fine colours": encoded(PICTURE, subsampling=0),
    "restart markers": encoded(PICTURE, restart_marker_rows=1),
    "rotated by EXIF": encoded(PICTURE, exif=ROTATED),
    "png": encoded(PICTURE, "PNG"),
    "palette": encoded(PICTURE.convert("P"), "PNG"),
    "transparent": encoded(PICTURE.convert("RGBA"), "PNG"),
    "webp": encoded(PICTURE, "WEBP"),
}
RESIZE = {"from": 32, "to": 96, "from_epoch": 1, "until_epoch": 3}


def by_pil(data):
    return pil_to_tensor(Image.open(io.BytesIO(data)).convert("RGB"))


def difference(left, right):
    """Mean, of 255."""
    assert left.shape == right.shape
    return float((left.float() - right.float()).abs().mean())


@pytest.mark.parametrize("name", [name for name in CPU_DECODERS if works(name)])
def test_all_decoders_see_what_pil_sees_and_fill_in_nothing(name):
    for kind, data in KINDS.items():
        pixels = decoder(name)(data)
        assert pixels.dtype == torch.uint8
        assert pixels[None].is_contiguous(memory_format=torch.channels_last)
        assert difference(pixels, by_pil(data)) < 0.01, kind
    for path in PHOTOGRAPHS:
        assert difference(decoder(name)(path.read_bytes()), by_pil(path.read_bytes())) < 1, path
    flat = PLAIN.replace(bytes((8, 0, 90, 0, 125)), bytes((8, 0, 0, 0, 125)))  # no rows
    cut = [flat, *(KINDS[kind][:-1] for kind in ("plain", "grey", "progressive"))]
    for kind in ("plain", "grey", "progressive", "png"):
        cut += [KINDS[kind][: int(len(KINDS[kind]) * s)] for s in (0.0, 0.01, 0.4, 0.99)]
    for data in cut:
        with pytest.raises(DamagedImage):
            decoder(name)(data)
    with pytest.raises(DamagedImage, match="is not an image"):
        decoder(name)(b"<html>404</html>")


def draw(view, data, seed=0):
    seed_all(seed)
    return view(data)["image"]


@pytest.mark.parametrize("size", [(125, 90), (90, 125), (64, 64), (40, 300)])
@pytest.mark.parametrize(("crop", "short", "resized"), [(56, None, 64), (28, 29, 29)])
def test_validation_sees_exactly_what_torchvisions_reference_sees(size, crop, short, resized):
    data = encoded(photograph(0, *size), quality=95)
    seen = draw(EvalView(crop, short, decoder="pil"), data)
    reference = v2.Compose([v2.Resize(resized, antialias=True), v2.CenterCrop(crop)])
    assert torch.equal(seen, reference(by_pil(data)))
    on_pil = v2.Compose([v2.Resize(resized), v2.CenterCrop(crop), v2.PILToTensor()])
    assert difference(seen, on_pil(Image.open(io.BytesIO(data)))) < 0.5


def test_crops_are_drawn_as_torchvision_draws_them():
    seed_all(0)
    ratio = (1.0, 2.0)  # the usual ratio is the same upside down
    image = torch.empty(3, 375, 500, dtype=torch.uint8)
    make = v2.RandomResizedCrop(224, ratio=ratio).make_params
    theirs = np.array([[*make([image]).values()] for _ in range(2000)])  # top, left, height, width
    ours = np.array([random_crop(375, 500, (0.08, 1.0), ratio) for _ in range(2000)])
    error = np.hypot(ours.std(0), theirs.std(0)) / 2000**0.5
    assert (abs(ours.mean(0) - theirs.mean(0)) < 4 * error).all()
    assert all(t + h <= 375 and x + w <= 500 for t, x, h, w in ours)
    # Nothing fits: the widest centre that is allowed.
    assert random_crop(10, 400, (1.0, 1.0), (3 / 4, 4 / 3)) == (0, 193, 10, 13)
    assert random_crop(400, 10, (1.0, 1.0), (3 / 4, 4 / 3)) == (193, 0, 13, 10)


def test_training_sees_a_crop_resized_and_flipped():
    view = TrainView(32, decoder="pil")
    flips = 0
    for seed in range(20):
        seen = draw(pickle.loads(pickle.dumps(view)), PLAIN, seed)  # as workers get it
        seed_all(seed)
        crop = view.crop(90, 125, 0)
        size = [32, 32]
        expected = v2.functional.resized_crop_image(by_pil(PLAIN), *crop[:4], size, antialias=True)
        assert torch.equal(seen, expected.flip(-1) if crop.flip else expected)
        flips += crop.flip
    assert 3 < flips < 17


def test_sizes_grow_by_the_epoch_alone():
    dataset = KeyedDataset(Listed([PLAIN], TrainView(32, resize=RESIZE)), seed=0)
    seen = [dataset[SampleKey(0, epoch, 1.0)]["image"].shape[-1] for epoch in (0, 1, 2, 3, 4, 0)]
    assert seen == [32, 32, 64, 96, 96, 32]
    finer = {"from": 32, "to": 64, "until_epoch": 4, "multiple": 16}
    assert not list(check_views({"resize": finer}))
    view = TrainView(32, resize=finer)
    assert [view.resizing.size(epoch) for epoch in range(6)] == [32, 32, 48, 64, 64, 64]


@pytest.mark.skipif(not works("torchcodec"), reason="no torchcodec")
@pytest.mark.parametrize("kind", [EvalView, TrainView])
def test_the_device_decodes_the_pixels_that_a_worker_would_have_decoded(kind):
    names = ("plain", "grey", "cmyk", "png", "rotated by EXIF", "fine colours")

    def batch(view):
        seed_all(0)
        images = Listed([KINDS[name] for name in names], view)
        return images.collate([images[i] for i in range(len(names))])

    shipped = batch(kind(16, decoder="nvjpeg"))
    expected = batch(kind(16))["image"]
    assert isinstance(shipped["image"], EncodedBatch)
    assert len(shipped["image"]) == len(names)
    is_encoded = [crop[6] > 0 for crop in shipped["image"].crops]
    assert is_encoded == [name not in ("cmyk", "png") for name in names]
    image = ImageData(2, 0).on_before_batch_transfer(shipped, 0)["image"]
    assert torch.equal(image, expected)
    assert image.is_contiguous(memory_format=torch.channels_last)
    damaged = Listed([BROKEN, PLAIN], kind(16, decoder="nvjpeg"))[0]
    assert damaged["weight"] == 0
    assert "file 0: " in damaged["damaged"]


COLOURS = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 32, 32), dtype=np.uint8))
MEAN, STD = (torch.tensor(values)[:, None] for values in (IMAGENET_MEAN, IMAGENET_STD))
OFF = dict.fromkeys(("rand_augment", "trivial_augment", "color_jitter", "random_erasing"))


def augmented(config, seed=0, image=COLOURS):
    seed_all(seed)
    return Augment(config)(image)


def test_by_default_an_image_is_only_flipped():
    for config, flip in ((None, 0.5), (OFF, 0.5), ({"horizontal_flip": None}, 0)):
        assert Augment(config).flip == flip
        assert torch.equal(augmented(config), COLOURS)


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        ({"rand_augment": {"ops": 3, "magnitude": 12}}, v2.RandAugment(3, 12)),
        ({"trivial_augment": True}, v2.TrivialAugmentWide()),
        ({"color_jitter": {"contrast": 0.3}}, v2.ColorJitter(contrast=0.3)),
    ],
)
def test_they_are_torchvisions(config, theirs):
    for seed in range(5):
        torch.manual_seed(seed)
        expected = pil_to_tensor(theirs(to_pil_image(COLOURS)))
        assert torch.equal(augmented(config, seed), expected)


def test_erasing_fills_a_rectangle_with_what_becomes_zero_or_noise():
    erased = 0
    for seed in range(30):
        image = torch.full((3, 64, 64), 255, dtype=torch.uint8)
        result = augmented({"random_erasing": {"p": 0.5}}, seed, image)
        assert image.min() == 255, "the decoded image is not written to"
        hole = (result != 255).all(0)
        if hole.any():
            erased += 1
            assert torch.equal(hole, hole.any(1)[:, None] & hole.any(0)[None])
            assert 0.015 < hole.float().mean() < 0.35
            assert ((result[:, hole] / 255 - MEAN) / STD).abs().max() < 0.01
    assert 7 < erased < 23
    image = torch.zeros(3, 224, 224, dtype=torch.uint8)
    result = augmented({"random_erasing": {"p": 1.0, "fill": "noise"}}, 1, image)
    normalised = (result[:, result.sum(0) > 0] / 255 - MEAN) / STD
    assert abs(normalised.mean()) < 0.1
    assert 0.85 < normalised.std() < 1.05


REFUSED = [
    ({"decoder": "opencv"}, "decoder: is 'opencv'", "one of auto, native, simplejpeg"),
    ({"resize": {"from": 160, "until_epoch": 3}}, "resize: lacks to", ""),
    ({"resize": {**RESIZE, "untilepoch": 3}}, "resize.untilepoch:", "until_epoch"),
    ({"resize": {**RESIZE, "from": 170}}, "resize.from:", "data.resize.from=160"),
    ({"resize": {**RESIZE, "to": "192"}}, "resize.to:", "whole number"),
    ({"resize": {**RESIZE, "from_epoch": 3}}, "resize.until_epoch:", "not after from_epoch=3"),
    ({"resize": {**RESIZE, "to": 100, "multiple": 16}}, "resize.to:", "data.resize.to=96"),
    ({"resize": {**RESIZE, "multiple": 0}}, "resize.multiple:", "data.resize.multiple=32"),
    ({"resize": 32}, "resize:", "mapping\n    'data.resize={from"),
    ({"image_size": 100_000}, "image_size:", "to 8,192"),
    ({"val_resize_size": 223}, "val_resize_size:", "less than the 224 pixels"),
    ({"scale": [0, 1]}, "scale:", "above 0, at most 1"),
    ({"scale": [0.9, 0.5]}, "scale:", "the smaller one first"),
    ({"ratio": ["a", "b"]}, "ratio:", "not two numbers above 0, the"),
    ({"decoder": "nvjpeg", "augment": {"trivial_augment": True}}, "augment.trivial", "=null or"),
]
REFUSED += [
    ({"augment": value}, f"augment{path}:", text)
    for value, path, text in (
        ({"randaugment": {}}, ".randaugment", "did you mean rand_augment?"),
        ("rand_augment", "", "'data.augment={rand_augment: {ops: 2, magnitude: 9}}'"),
        ({"rand_augment": 9}, ".rand_augment", "{ops: 2, magnitude: 9}"),
        ({"rand_augment": {"op": 2}}, ".rand_augment.op", "did you mean ops?"),
        ({"rand_augment": {"ops": 1.5}}, ".rand_augment.ops", "whole number"),
        ({"rand_augment": {"magnitude": 31}}, ".rand_augment.magnitude", "up to 30"),
        ({"random_erasing": {"fill": "black"}}, ".random_erasing.fill", "=mean or"),
        ({"horizontal_flip": 2}, ".horizontal_flip", "probability"),
        ({"trivial_augment": 1}, ".trivial_augment", "=true"),
        ({"trivial_augment": True, "rand_augment": {"ops": 2}}, "", "choose one of them"),
    )
]


@pytest.mark.parametrize(("config", "path", "text"), REFUSED)
def test_refused_settings(monkeypatch, config, path, text):
    monkeypatch.setattr(views, "works", lambda name: True)
    (problem,) = map(str, check_views(config))
    assert problem.startswith(path)
    assert text in problem


def test_accepted_settings_and_decoders_that_are_not_installed(monkeypatch):
    for config in ({"scale": [1, 1], "ratio": (0.5, 2.0)}, {"decoder": "pil", "resize": RESIZE}):
        assert list(check_views(config)) == []
    monkeypatch.setattr(views, "works", lambda name: False)
    (problem,) = check_views({"decoder": "nvjpeg"})
    assert problem.path == "decoder"
    assert problem.remedy.startswith("pip install 'torchcodec>=0.16'")
    assert list(check_views({"decoder": "nvjpeg"}, local=False)) == []
    monkeypatch.delattr("torchcodec.decoders.decode_jpeg", raising=False)  # as before 0.16
    assert not works("torchcodec")
