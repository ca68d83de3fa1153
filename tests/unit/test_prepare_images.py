"""What `prepare` does to one image: nothing, unless it must or is asked to."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from distdl.datasets.image_files import DamagedImage
from distdl.datasets.images import Treatment
from distdl.util.errors import UserError
from tests.miniature import encoded, photograph, prepare

AS_IT_IS = Treatment()


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
        ("a.JPEG", encoded(photograph(1)), ".jpg"),
        ("a.JPEG", encoded(photograph(1).convert("L")), ".jpg"),
        ("a.JPEG", encoded(photograph(1), progressive=True), ".jpg"),
        ("a.png", encoded(photograph(1), "PNG"), ".png"),
        ("a.webp", encoded(photograph(1), "WEBP"), ".webp"),
        ("no name", encoded(photograph(1).convert("P"), "PNG"), ".png"),
        ("wrong.png", encoded(photograph(1)), ".jpg"),
    ],
)
def test_most_images_keep_every_byte(name, data, extension):
    assert AS_IT_IS.apply(data, name) == (data, extension, "")


def test_a_png_named_jpeg_becomes_one():
    image = photograph(1)
    data, extension, oddity = AS_IT_IS.apply(encoded(image, "PNG"), "n02105855_2933.JPEG")
    assert (opened(data).format, extension, oddity) == ("JPEG", ".jpg", "PNG named JPEG")
    assert difference(opened(data), image) < 1


def test_cmyk_becomes_rgb_as_pil_sees_it():
    before = encoded(photograph(1).convert("CMYK"), quality=100)
    data, _, oddity = AS_IT_IS.apply(before, "a.JPEG")
    assert (opened(data).mode, oddity) == ("RGB", "CMYK as RGB")
    assert difference(opened(data), opened(before)) < 1


def noise(mode: str, form: str) -> bytes:
    """What a JPEG needs most bytes for: black and white at random."""
    shape = (150, 200, len(mode))
    pixels = np.random.default_rng(0).integers(0, 2, shape, dtype=np.uint8) * 255
    return encoded(Image.fromarray(pixels, mode), form)


@pytest.mark.parametrize(("mode", "form"), [("RGB", "PNG"), ("CMYK", "JPEG"), ("RGB", "TIFF")])
@pytest.mark.parametrize(
    "treatment",
    [
        AS_IT_IS,
        Treatment(quality=100),
        Treatment(max_side=180, quality=100),
        Treatment(short_side=148, quality=94),
    ],
    ids=str,
)
def test_the_finest_grain_is_no_damage(treatment, mode, form):
    data, *_ = treatment.apply(noise(mode, form), "a.JPEG")
    assert opened(data).format == "JPEG"


def test_what_cannot_be_written_is_not_called_damaged(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "photos" / split / "cat").mkdir(parents=True)
        wide = Image.new("L", (70_000, 1))  # a JPEG has at most 65,535 pixels
        (tmp_path / "photos" / split / "cat" / "a.JPEG").write_bytes(encoded(wide, "PNG"))
    with pytest.raises(UserError, match=r"a\.JPEG: cannot be written as JPEG: broken data stream"):
        prepare("folder", tmp_path / "photos", tmp_path / "out", "--workers", "1", "--skip-damaged")


def test_what_only_pil_reads_is_kept_without_loss():
    data, extension, oddity = AS_IT_IS.apply(encoded(photograph(1), "BMP"), "a.bmp")
    assert (extension, oddity) == (".png", "BMP as PNG")
    assert difference(opened(data), photograph(1)) == 0


@pytest.mark.parametrize("data", [b"", b"hello", encoded(photograph(1))[:-200]])
def test_damaged_images_are_told(data):
    with pytest.raises(DamagedImage):
        AS_IT_IS.apply(data, "a.JPEG")


@pytest.mark.parametrize(
    ("treatment", "before", "after"),
    [
        (Treatment(max_side=50), (100, 80), (50, 40)),
        (Treatment(max_side=50), (80, 100), (40, 50)),
        (Treatment(short_side=40), (100, 80), (50, 40)),
        (Treatment(max_side=50, short_side=30), (100, 50), (50, 25)),
        (Treatment(max_side=50), (400, 2), (50, 1)),
    ],
)
def test_scaled_down(treatment, before, after):
    image = photograph(1, *before)
    data, _, oddity = treatment.apply(encoded(image, quality=95), "a.jpg")
    assert opened(data).size == after
    assert not oddity  # it was asked for
    assert difference(opened(data), image.resize(after, Image.Resampling.LANCZOS)) < 3


def test_never_scaled_up():
    data = encoded(photograph(1, 100, 80))
    assert Treatment(max_side=100, short_side=80).apply(data, "a.jpg")[0] == data


def test_quality_alone_changes_what_is_worth_it():
    detailed = Image.effect_noise((200, 150), 40)
    fine, coarse = (encoded(detailed, quality=q) for q in (98, 80))
    treatment = Treatment(quality=80)
    assert len(treatment.apply(fine, "a.jpg")[0]) < 0.9 * len(fine)
    assert treatment.apply(coarse, "a.jpg")[0] == coarse
    again = treatment.apply(fine, "a.jpg")[0]
    assert treatment.apply(again, "a.jpg")[0] == again


def test_exif_orientation_stays_and_pixels_stay():
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    before = encoded(photograph(1, 100, 80), exif=exif)
    after = opened(Treatment(max_side=50).apply(before, "a.jpg")[0])
    assert after.size == (50, 40)
    assert after.getexif().get(0x0112) == 6


@pytest.mark.parametrize(("form", "said"), [("TIFF", "TIFF as JPEG"), ("PNG", ""), ("WEBP", "")])
def test_what_is_scaled_becomes_a_jpeg_and_says_so(form, said):
    treatment = Treatment(short_side=24)
    data, extension, oddity = treatment.apply(encoded(photograph(1), form), f"a.{form.lower()}")
    assert (opened(data).format, extension, oddity) == ("JPEG", ".jpg", said)
    assert "what is scaled as JPEG at quality 90 (lossy)" in str(treatment)
    whole = Treatment(short_side=48).apply(encoded(photograph(1), form), f"a.{form.lower()}")
    assert whole[1] != ".jpg" and "JPEG" not in whole[2]
