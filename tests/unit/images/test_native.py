"""`distdl-native`: the pixels of the usual way or none, and nothing for a hostile file."""

from __future__ import annotations

import ctypes.util
import logging
import os
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from distdl.data.drawing import seed_all
from distdl.datasets.image_headers import MOST_PIXELS, DamagedImage, examine
from distdl.images import decoding, native
from distdl.images.crop import Crop, central_crop, random_crop
from distdl.images.decoding import CropDecoder, decode_simplejpeg, works
from distdl.images.draws import CounterDraws
from distdl.images.native import PLAIN_C, WHOLE
from distdl.images.views import EvalView, TrainView, check_views
from distdl.tools.serving.model_folder import write_package
from tests.conftest import ROOT, matrix_only
from tests.miniature import encoded, photograph
from tests.unit.sample_data import PLAIN

MATRIX = "DISTDL_MATRIX" in os.environ
IMAGES = Path(os.environ.get("DISTDL_PHOTOGRAPHS", ROOT.parent / "shared/images"))
PHOTOGRAPHS = sorted(path for path in IMAGES.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
FUZZ = ROOT / "native/fuzz"
SAMPLINGS = ["444", "422", "420", "440"]
needs_simplejpeg = pytest.mark.skipif(not works("simplejpeg"), reason="no simplejpeg")


@pytest.fixture(scope="module")
def library():
    made = decoding.native_library()
    if made is None:
        pytest.skip(
            "distdl-native is not installed (make setup, with a C compiler and libjpeg's headers)"
        )
    return made


def noise(rng, height, width):
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def jpeg(rng, height, width, kind):
    """Of noise, in which each wrong value of a neighbour shows."""
    import simplejpeg

    pixels = noise(rng, height, width)
    quality = int(rng.choice([20, 90]))
    if kind == "grey":
        return encoded(Image.fromarray(pixels).convert("L"), quality=quality)
    if kind == "restarts":
        blocks = int(rng.integers(1, 6))
        return encoded(Image.fromarray(pixels), quality=quality, restart_marker_blocks=blocks)
    return simplejpeg.encode_jpeg(pixels, quality, colorsubsampling=kind)


def cut(library, data, crop, flags):
    """The crop, uint8 [3, S, S]; None: the library leaves it to others."""
    out = torch.empty(crop.size, crop.size, 3, dtype=torch.uint8)
    (done,) = library.crops([data], [crop], [out.data_ptr()], out.numel(), [flags], MOST_PIXELS)
    return out.permute(2, 0, 1) if done else None


def boxes(height, width):
    """A crop in each corner and two others, of any size."""
    h, w = random.randint(1, height), random.randint(1, width)
    inside = random.randint(0, height - h), random.randint(0, width - w)
    for top, left in ((0, 0), (0, width - w), (height - h, 0), (height - h, width - w), inside):
        to = random.randint(1, 100), random.randint(1, 100)
        size = random.randint(1, min(to))
        yield Crop(top, left, h, w, *to, size, random.random() < 0.5)
    yield Crop(0, 0, height, width, 64, 64, 64)


@needs_simplejpeg
@pytest.mark.parametrize("kind", [*SAMPLINGS, "grey", "restarts"])
def test_pixels_are_those_of_the_whole_image_resized_by_torch(library, kind):
    random.seed(kind)
    rng = np.random.default_rng(0)
    for _ in range(500 if MATRIX else 40):
        data = jpeg(rng, *rng.integers(1, 100, 2).tolist(), kind)
        image = decode_simplejpeg(data)
        assert library.sizes([data], MOST_PIXELS) == [tuple(image.shape[1:])]
        for crop in boxes(*image.shape[1:]):
            flags = random.choice([0, WHOLE]) + random.choice([0, PLAIN_C])
            seen = cut(library, data, crop, flags)
            assert seen is not None
            assert torch.equal(seen, crop.apply(image)), (image.shape, crop, flags)


@needs_simplejpeg
@pytest.mark.skipif(not PHOTOGRAPHS, reason="no photographs")
def test_photographs_have_the_same_pixels_in_every_corner(library):
    random.seed(0)
    for path in random.sample(PHOTOGRAPHS, 2000 if MATRIX else 10):
        data = path.read_bytes()
        image = decode_simplejpeg(data)
        height, width = image.shape[1:]
        drawn = [random_crop(height, width, (0.08, 1.0), (3 / 4, 4 / 3)) for _ in range(2)]
        crops = [Crop(*box, 224, 224, 224, True) for box in drawn]
        crops += [central_crop(height, width, 256, 224), *boxes(height, width)]
        for crop in crops:
            seen = cut(library, data, crop, WHOLE)
            assert seen is not None
            assert torch.equal(seen, crop.apply(image)), (path, crop)


def changed_copy(draw, path):
    """A photograph as some camera or program would have stored a part of it, and whether
    distdl-native decodes that."""
    import simplejpeg

    picture = Image.open(path).convert("RGB")
    if draw.random() < 0.3:  # small, with odd sides
        size = draw.randint(1, 40), draw.randint(1, 40)
    else:
        size = draw.randint(8, picture.width), draw.randint(8, picture.height)
    left, top = (draw.randint(0, a - min(a, b)) for a, b in zip(picture.size, size, strict=True))
    picture = picture.crop((left, top, left + size[0], top + size[1]))
    if draw.random() < 0.2:
        picture = picture.resize((2 * picture.width, max(1, picture.height // 2)))
    exif = Image.Exif()
    exif[0x0112] = draw.randint(1, 8)
    quality = draw.randint(5, 100)
    kind = draw.choice([*SAMPLINGS, "grey", "restarts", "rows", "exif", "plain", "odd"])
    if kind in SAMPLINGS:
        data = simplejpeg.encode_jpeg(np.asarray(picture), quality, colorsubsampling=kind)
        return data, True
    if kind == "odd":
        other = draw.choice([{"progressive": True}, {"form": "PNG"}, {"form": "PPM"}, {}])
        image = picture if other else picture.convert("CMYK")
        return encoded(image, **other), False
    how = {
        "restarts": {"restart_marker_blocks": draw.randint(1, 40)},
        "rows": {"restart_marker_rows": draw.randint(1, 3)},
        "exif": {"exif": exif},
    }.get(kind, {})
    image = picture.convert("L") if kind == "grey" else picture
    return encoded(image, quality=quality, optimize=draw.random() < 0.5, **how), True


@needs_simplejpeg
@pytest.mark.skipif(not PHOTOGRAPHS, reason="no photographs")
def test_changed_copies_of_photographs_have_the_pixels_that_they_had(library):
    """Cut, enlarged, grey, of any quality and sampling, turned by EXIF, with restarts, and odd."""
    draw = random.Random(int(os.environ.get("DISTDL_SEED", 0)))
    auto, usual = CropDecoder("auto"), CropDecoder("simplejpeg")
    for number in range(2000 if MATRIX else 20):
        data, native_too = changed_copy(draw, draw.choice(PHOTOGRAPHS))
        (size,) = library.sizes([data], MOST_PIXELS)
        header = examine(data)
        assert (size == (header.height, header.width)) == native_too, number
        random.seed(number)
        crops = [*boxes(header.height, header.width)]
        crops.append(central_crop(header.height, header.width, 40, 32))
        for crop in crops:
            choose = lambda height, width, crop=crop: crop  # noqa: E731
            assert torch.equal(auto(data, choose), usual(data, choose)), (number, crop)
            if native_too:
                assert cut(library, data, crop, WHOLE) is not None


def odd_files():
    import simplejpeg

    picture = photograph(0, 125, 90)
    yield "cmyk", encoded(picture.convert("CMYK"))
    yield "progressive", encoded(picture, progressive=True)
    yield "png", encoded(picture, "PNG")
    yield "4:1:1", simplejpeg.encode_jpeg(np.asarray(picture), colorsubsampling="411")
    yield "colours kept as RGB", encoded(picture, keep_rgb=True)
    at = PLAIN.index(b"\xff\xc0")
    yield "arithmetic", PLAIN[: at + 1] + b"\xc9" + PLAIN[at + 2 :]
    yield "12 bits", PLAIN[: at + 4] + b"\x0c" + PLAIN[at + 5 :]
    yield "without height", PLAIN[: at + 5] + b"\0\0" + PLAIN[at + 7 :]
    scan = PLAIN.index(b"\xff\xda")
    yield "scans of one component", PLAIN[: scan + 4] + b"\x01" + PLAIN[scan + 5 :]
    yield "501 comments", PLAIN[:2] + b"\xff\xfe\0\2" * 501 + PLAIN[2:]
    yield "fill bytes", PLAIN[:2] + b"\xff" + PLAIN[2:]
    yield "too long and narrow", encoded(Image.new("RGB", (1002, 2)))
    yield "empty", b""
    yield "two bytes", PLAIN[:2]


@needs_simplejpeg
@pytest.mark.parametrize(("kind", "data"), [*odd_files()])
def test_what_is_odd_goes_the_way_it_went(library, kind, data):
    def outcome(name):
        try:
            return CropDecoder(name)(data, lambda h, w: Crop(0, 0, h, w, 20, 20, 20)).tolist()
        except DamagedImage as error:
            return str(error)

    assert outcome("auto") == outcome("simplejpeg")
    if kind != "colours kept as RGB":  # which only libjpeg sees
        assert library.sizes([data], MOST_PIXELS) == [None]
    assert library.sizes([PLAIN], 90 * 125 - 1) == [None]


def mutated(rng, data):
    """A file with some bytes changed, or its end missing."""
    changed = bytearray(data)
    for _ in range(rng.integers(0, 4)):
        changed[rng.integers(0, len(changed))] = rng.integers(0, 256)
    cut_at = rng.choice([len(changed), len(changed) - 1, int(rng.integers(1, len(changed)))])
    return bytes(changed[:cut_at])


@needs_simplejpeg
def test_a_broken_file_has_the_pixels_and_the_damage_that_it_had(library):
    """Also if the crop lies before the damage; and what was drawn in vain is drawn again."""
    rng = np.random.default_rng(1)
    native_too, usual = TrainView(24), TrainView(24, decoder="simplejpeg")
    damaged = 0
    for number in range(3000 if MATRIX else 300):
        data = mutated(rng, PLAIN)
        outcomes = []
        for view in (native_too, usual):
            seed_all(number)
            try:
                outcomes.append(view(data)["image"].tolist())
            except DamagedImage as error:
                outcomes.append(str(error))
                damaged += 1
            outcomes.append(random.random())
        assert outcomes[:2] == outcomes[2:], number
        for size in library.sizes([data], MOST_PIXELS):  # no limit is passed over
            if size is not None:
                header = examine(data)
                assert size == (header.height, header.width)
                assert header.passes == 1
    assert damaged > 200


def test_impossible_crops_are_refused(library):
    image = 90, 125
    fine = Crop(0, 0, *image, 20, 20, 20)
    assert cut(library, PLAIN, fine, 0) is not None
    for wrong in (
        {"top": -1}, {"left": 1}, {"height": 91}, {"width": 2**31 - 1}, {"height": 0},
        {"to_height": 19}, {"to_width": 65536}, {"to_height": -1},
    ):  # fmt: skip
        assert cut(library, PLAIN, fine._replace(**wrong), 0) is None
    out = torch.zeros(3 * 20 * 20, dtype=torch.uint8)
    room = out.numel() - 1
    assert library.crops([PLAIN], [fine], [out.data_ptr()], room, [0], MOST_PIXELS) == [False]
    assert not out.any()


def test_a_batch_is_decoded_to_its_places(library):
    files = [PLAIN, b"", encoded(photograph(1, 60, 50)), PLAIN[:800]]
    view = EvalView(16)
    out = torch.full((4, 16, 16, 3), 7, dtype=torch.uint8)
    choose = [view.choose(0)] * 4
    assert view.decode.squares(files, choose, [False] * 4, out) == [True, False, True, False]
    for row in (0, 2):
        assert torch.equal(out[row].permute(2, 0, 1), view(files[row])["image"])
    assert (out[1] == 7).all()
    # Damage behind the crop is found, unless the file was decoded to its end before.
    top = Crop(0, 0, 8, 125, 16, 16, 16)
    cut_short = [PLAIN[:-60]] * 2
    choose = [lambda h, w: top] * 2
    assert view.decode.squares(cut_short, choose, [True, False], out[:2]) == [True, False]


def test_views_are_pickled_and_name_what_is_missing(monkeypatch, library):
    view = pickle.loads(pickle.dumps(TrainView(16, decoder="native")))
    assert view(PLAIN)["image"].shape == (3, 16, 16)
    decoding.native_library.cache_clear()
    monkeypatch.setattr(decoding, "installed", lambda: None)
    (problem,) = check_views({"decoder": "native"})
    assert "distdl-native" in str(problem)
    with pytest.raises(ImportError):
        CropDecoder("native")
    decoding.native_library.cache_clear()


@pytest.mark.parametrize("wrong", ["another", "text", "pixels", "absent"])
def test_without_the_library_or_with_a_wrong_one_all_works_and_it_is_said_once(
    monkeypatch, caplog, tmp_path, wrong, library
):
    path = tmp_path / "libdistdl_native.so"
    path.write_text("no library")
    if wrong == "another":
        path = Path(ctypes.util.find_library("c") or "libc.so.6")
    if wrong == "pixels":  # as one that was built with another libjpeg
        path = native.installed()
        honest = native.Library.crops
        monkeypatch.setattr(
            native.Library,
            "crops",
            lambda self, f, c, o, *a: honest(self, f, [c[0]._replace(flip=False)], o, *a),
        )
    monkeypatch.setattr(decoding, "installed", lambda: None if wrong == "absent" else path)
    decoding.native_library.cache_clear()
    caplog.set_level(logging.INFO)
    usual = TrainView(16, decoder="simplejpeg")
    for _ in range(3):
        seed_all(0)
        seen = TrainView(16)(PLAIN)["image"]
        seed_all(0)
        assert torch.equal(seen, usual(PLAIN)["image"])
    decoding.native_library.cache_clear()
    (said,) = [r.getMessage() for r in caplog.records if "distdl-native" in r.getMessage()]
    assert ("not used" in said) == (wrong != "absent")


def test_draws_of_a_sample_depend_on_its_key_alone():
    view = TrainView(16, draws="counter", augment={"random_erasing": {"p": 0.5, "fill": "noise"}})
    assert view.draws_apart
    seed_all(0)
    first = [view.of_sample(key)(PLAIN)["image"] for key in range(20)]
    state = random.getstate()
    again = [view.of_sample(key)(PLAIN)["image"] for key in reversed(range(20))]
    assert all(torch.equal(a, b) for a, b in zip(first, reversed(again), strict=True))
    assert len({a.numpy().tobytes() for a in first}) == 20
    assert random.getstate() == state, "the process's generators are not used"
    numbers = np.array([CounterDraws(key).random() for key in range(10_000)])
    assert abs(numbers.mean() - 0.5) < 0.015
    assert np.histogram(numbers, 10)[0].min() > 880
    whole = [CounterDraws(key).randint(3, 5) for key in range(300)]
    assert sorted(set(whole)) == [3, 4, 5]


def test_a_run_of_an_earlier_version_draws_what_it_drew():
    """Frozen without `data.draws`: these numbers are of the commit before there was that key."""
    view = TrainView(32, decoder="pil")
    assert not view.draws_apart
    seed_all(7)
    drawn = [tuple(view.crop(90, 125, 0)) for _ in range(3)]
    assert drawn == [
        (1, 9, 72, 59, 32, 32, 32, False),
        (32, 27, 42, 44, 32, 32, 32, True),
        (1, 35, 83, 65, 32, 32, 32, True),
    ]


@pytest.mark.timeout(1500)  # libjpeg-turbo is compiled
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize(
    "jpeg_turbo", ["of the system", pytest.param("sanitized", marks=matrix_only)]
)
def test_mutated_files_find_nothing_under_the_sanitizers(tmp_path, jpeg_turbo):
    """With the libjpeg of the system, and with one from Debian's sources (`make matrix`) that is
    built with the sanitizers as well."""
    sources = os.environ.get("DISTDL_JPEG_SOURCES", str(ROOT / ".servers/libjpeg-turbo"))
    if jpeg_turbo == "sanitized" and not Path(sources).exists():
        pytest.skip("no sources of libjpeg-turbo: make .servers/libjpeg-turbo")
    build = [str(FUZZ / "build.sh"), str(tmp_path)]
    build += [sources] if jpeg_turbo == "sanitized" else []
    built = subprocess.run(build, capture_output=True, text=True)
    if built.returncode and ("jpeglib.h" in built.stderr or "asan" in built.stderr):
        pytest.skip(f"the harness cannot be built: {built.stderr[-300:]}")
    assert built.returncode == 0, built.stderr
    rng = np.random.default_rng(0)
    seeds = []
    for kind in ("444", "420", "grey", "restarts"):
        seeds.append(tmp_path / f"{kind}.jpg")
        seeds[-1].write_bytes(jpeg(rng, 90, 130, kind))
    count = 10_000 if MATRIX else 100
    command = [str(tmp_path / "harness"), str(count), "1", *map(str, seeds)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = dict(zip(done.stdout.split()[::2], map(int, done.stdout.split()[1::2]), strict=True))
    assert counts["files"] == count
    assert counts["done"] > count // 2
    assert counts["broken"] > count // 10


def test_an_exported_folder_decodes_by_it_as_well(library, tmp_path):
    """Its code is a copy, which runs where distdl is not installed."""
    write_package(tmp_path)
    (tmp_path / "image.jpg").write_bytes(PLAIN)
    code = (
        "import sys; sys.modules['distdl'] = None\n"
        "from distdl_scoring.decoding import CropDecoder\n"
        "from distdl_scoring.crop import central_crop\n"
        "decode = CropDecoder(); assert decode.native is not None\n"
        "data = open('image.jpg', 'rb').read()\n"
        "print(decode(data, lambda h, w: central_crop(h, w, 18, 16)).sum().item())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    expected = EvalView(16, 18, decoder="simplejpeg")(PLAIN)["image"].sum().item()
    assert done.stdout.split() == [str(expected)]
