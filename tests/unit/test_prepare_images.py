"""What `prepare` does to one image: nothing, unless it must or is asked to."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from distdl.datasets.image_files import DamagedImage, load_image
from distdl.datasets.images import Treatment
from tests.miniature import encoded, photograph, prepare
from tests.prepared import refusal

AS_IT_IS = Treatment()
PHOTO = photograph(1)


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def difference(a: Image.Image, b: Image.Image) -> float:
    """Mean, of 255."""
    both = [np.asarray(image.convert("RGB"), dtype=float) for image in (a, b)]
    return float(np.abs(both[0] - both[1]).mean())


@pytest.mark.parametrize(
    ("name", "data", "extension"),
    [
        ("a.JPEG", encoded(PHOTO), ".jpg"),
        ("a.JPEG", encoded(PHOTO.convert("L")), ".jpg"),
        ("a.JPEG", encoded(PHOTO, progressive=True), ".jpg"),
        ("a.png", encoded(PHOTO, "PNG"), ".png"),
        ("a.webp", encoded(PHOTO, "WEBP"), ".webp"),
        ("no name", encoded(PHOTO.convert("P"), "PNG"), ".png"),
        ("wrong.png", encoded(PHOTO), ".jpg"),
    ],
)
def test_most_images_keep_every_byte(name, data, extension):
    assert AS_IT_IS.apply(data, name) == (data, extension, "")


@pytest.mark.parametrize(
    ("image", "form", "name", "result", "most"),
    [
        (PHOTO, "PNG", "n02105855_2933.JPEG", ("JPEG", "RGB", ".jpg", "PNG named JPEG"), 1),
        (PHOTO.convert("CMYK"), "JPEG", "a.JPEG", ("JPEG", "RGB", ".jpg", "CMYK as RGB"), 1),
        (PHOTO, "BMP", "a.bmp", ("PNG", "RGB", ".png", "BMP as PNG"), 0),
        (PHOTO.convert("CMYK"), "TIFF", "a.tif", ("PNG", "RGB", ".png", "TIFF as PNG"), 1),
    ],
)
def test_other_formats_are_converted(image, form, name, result, most):
    before = encoded(image, form, **({"quality": 100} if form == "JPEG" else {}))
    data, extension, oddity = AS_IT_IS.apply(before, name)
    after = opened(data)
    assert (after.format, after.mode, extension, oddity) == result
    assert difference(after, opened(before)) <= most


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_16_bits_are_scaled_to_8_and_not_clipped(mode):
    values = np.tile(np.arange(256, dtype=">u2" if mode == "I;16B" else "<u2"), (16, 1))
    image = Image.frombytes(mode, (256, 16), (values * 257).astype(values.dtype).tobytes())
    data = encoded(image, "TIFF")
    same, extension, _ = AS_IT_IS.apply(data, "a.tif")  # without loss
    assert extension == ".png" and np.array_equal(np.asarray(opened(same)), values * 257)
    jpeg, *_ = AS_IT_IS.apply(same, "a.JPEG")
    smaller, *_ = Treatment(short_side=8, quality=100).apply(data, "a.tif")
    for result, expected in (
        (opened(jpeg), values),
        (opened(smaller), values[:8, ::2]),
        (load_image(same, "RGB"), values),
    ):
        assert np.abs(np.asarray(result.convert("L")).astype(int) - expected).max() < 3


def noise(mode: str, form: str) -> bytes:
    """What a JPEG needs most bytes for: black and white at random."""
    shape = (150, 200, len(mode))
    pixels = np.random.default_rng(0).integers(0, 2, shape, dtype=np.uint8) * 255
    return encoded(Image.fromarray(pixels, mode), form)


@pytest.mark.parametrize(("mode", "form"), [("RGB", "PNG"), ("CMYK", "JPEG"), ("RGB", "TIFF")])
@pytest.mark.parametrize(
    "treatment",
    [AS_IT_IS, Treatment(max_side=180, quality=100), Treatment(short_side=148, quality=94)],
    ids=str,
)
def test_the_finest_grain_is_no_damage(treatment, mode, form):
    data, *_ = treatment.apply(noise(mode, form), "a.JPEG")
    assert opened(data).format == "JPEG"


def test_damaged_images_are_reported_and_unwritable_ones_are_not_damaged(tmp_path):
    for data in (b"", b"hello", encoded(PHOTO)[:-200]):
        with pytest.raises(DamagedImage):
            AS_IT_IS.apply(data, "a.JPEG")
    for split in ("train", "val"):
        (tmp_path / "photos" / split / "cat").mkdir(parents=True)
        wide = Image.new("L", (70_000, 1))  # a JPEG has at most 65,535 pixels
        (tmp_path / "photos" / split / "cat" / "a.JPEG").write_bytes(encoded(wide, "PNG"))
    options = ("--workers", "1", "--skip-damaged")
    problem = refusal(prepare, "folder", tmp_path / "photos", tmp_path / "out", *options)
    assert problem.path.endswith("a.JPEG") and "cannot be written as JPEG" in problem.what


@pytest.mark.parametrize(
    ("treatment", "before", "after"),
    [
        (Treatment(max_side=50), (100, 80), (50, 40)),
        (Treatment(max_side=50), (80, 100), (40, 50)),
        (Treatment(short_side=40), (100, 80), (50, 40)),
        (Treatment(max_side=50, short_side=30), (100, 50), (50, 25)),
        (Treatment(max_side=50), (400, 2), (50, 1)),
        (Treatment(max_side=100, short_side=80), (100, 80), (100, 80)),  # never scaled up
    ],
)
def test_scaled_down(treatment, before, after):
    image, exif = photograph(1, *before), Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: pixels stay, and so does the mark
    original = encoded(image, quality=95, exif=exif)
    data, _, oddity = treatment.apply(original, "a.jpg")
    assert opened(data).size == after and opened(data).getexif().get(0x0112) == 6
    assert not oddity  # it was asked for
    assert difference(opened(data), image.resize(after, Image.Resampling.LANCZOS)) < 3
    assert (data == original) == (before == after)


def test_quality_alone_changes_only_what_gets_much_smaller():
    detailed = Image.effect_noise((200, 150), 40)
    fine, coarse = (encoded(detailed, quality=q) for q in (98, 80))
    treatment = Treatment(quality=80)
    again = treatment.apply(fine, "a.jpg")[0]
    assert len(again) < 0.9 * len(fine) and treatment.apply(again, "a.jpg")[0] == again
    assert treatment.apply(coarse, "a.jpg")[0] == coarse


@pytest.mark.parametrize(("form", "oddity"), [("TIFF", "TIFF as JPEG"), ("PNG", ""), ("WEBP", "")])
def test_scaled_images_become_jpegs(form, oddity):
    treatment, before = Treatment(short_side=24), encoded(PHOTO, form)
    data, *result = treatment.apply(before, f"a.{form.lower()}")
    assert (opened(data).format, *result) == ("JPEG", ".jpg", oddity)
    assert "scaled images as JPEG at quality 90 (lossy)" in str(treatment)
    complete = Treatment(short_side=48).apply(before, f"a.{form.lower()}")
    assert complete[1] != ".jpg" and "JPEG" not in complete[2]
