"""One decision about an image file, by its content: in training, validation, predict, prepare,
`data check`, the server and an exported folder; and what lists of files leave out."""

import io
import os
import re
import time

import pytest
import torch
from PIL import Image

from distdl.data.folder import FolderImages
from distdl.data.listed import ListedImages
from distdl.data.stored import StoredImages
from distdl.datasets import image_files
from distdl.datasets.image_headers import (
    MOST_PIXELS,
    MOST_SCANS,
    DamagedImage,
    TooLarge,
    examine,
)
from distdl.datasets.left_out import LeftOut
from distdl.images.views import EvalView, TrainView
from distdl.tools.data_check.image_files import inspect_images
from distdl.tools.data_check.sources import ImageReader, SplitImages
from distdl.tools.prepare.folder import Folder
from distdl.tools.prepare.images import Treatment
from distdl.tools.prepare.source import Sample
from distdl.tools.serving.scorer import Scorer
from tests.conftest import ROOT
from tests.miniature import encoded, photograph
from tests.prepared import refusal
from tests.serving import hostile
from tests.serving.colours import write_model

PHOTO = photograph(1, 64, 48)
READ = {
    "jpeg": encoded(PHOTO),
    "progressive": encoded(PHOTO, progressive=True),
    "cmyk": encoded(PHOTO.convert("CMYK")),
    "png": encoded(PHOTO, "PNG"),
    "png of 16 bits": encoded(Image.new("I;16", (64, 48), 9000), "PNG"),
    "webp": encoded(PHOTO, "WEBP"),
    "webp without loss": encoded(PHOTO, "WEBP", lossless=True),
    "webp of two frames": encoded(PHOTO, "WEBP", save_all=True, append_images=[PHOTO] * 2),
    "bmp": encoded(PHOTO, "BMP"),
    "ppm": encoded(PHOTO, "PPM"),
    "pgm in text": b"P2 # a comment\n64 48\n255\n" + b"7 " * (64 * 48),
    "pgm of 16 bits": b"P5 64 48 4095\n" + bytes(2 * 64 * 48),
    "tiff": encoded(PHOTO, "TIFF"),
    "tiff of two pages": encoded(PHOTO, "TIFF", save_all=True, append_images=[PHOTO]),
    **{
        f"tiff, {how}": encoded(PHOTO, "TIFF", compression=how)
        for how in ("tiff_lzw", "jpeg", "tiff_adobe_deflate", "packbits")
    },
}
OTHERS = {
    "gif": encoded(PHOTO, "GIF"),
    "tga": encoded(PHOTO, "TGA"),
    "jpeg 2000": encoded(PHOTO, "JPEG2000"),
    "ico": encoded(PHOTO, "ICO"),
    "eps": hostile.EPS,
    "heic": b"\0\0\0\x18ftypheic" + bytes(100),
    "words": b"words",
    "nothing": b"",
    "51 megapixels": encoded(Image.new("1", (8500, 6000)), "PNG"),
    "a scan 20,000 times": hostile.many_scans(20_000, 512, 512),
    "long and narrow": encoded(Image.new("L", (60_000, 1)), "PNG"),
}


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """What reads encoded images, by its place: each raises DamagedImage, or else accepts."""
    folder = write_model(tmp_path_factory.mktemp("headers") / "model")
    scorer = Scorer(folder)

    def checked(data):
        (folder / "image").write_bytes(data)
        sample = Sample("val", "image", 0, len(data), ("image",))
        reader = ImageReader(SplitImages([0], [len(data)], 1, [sample]), folder)
        if damaged := inspect_images(reader, [0]).damaged:
            raise DamagedImage(damaged[0])

    return {
        "training": TrainView(32),
        "validation": EvalView(32),
        "PIL": EvalView(32, decoder="pil"),
        "prepare": lambda data: Treatment(short_side=32).apply(data, "image"),
        "data check": checked,
        "server": scorer.pixels,
    }


@pytest.mark.parametrize("name", READ)
def test_what_one_reads_all_read_with_the_pixels_of_pil(readers, name):
    data = READ[name]
    for read in readers.values():
        read(data)
    with Image.open(io.BytesIO(data)) as image:
        expected = image_files.converted(image, "RGB")
        header = examine(data)
        assert (header.width, header.height) == image.size
    seen = EvalView(48, 48, decoder="pil").decode.whole(data)
    assert seen.permute(1, 2, 0).numpy().tobytes() == expected.tobytes()
    assert torch.equal(EvalView(32, 36)(data)["image"], readers["server"](data))


@pytest.mark.parametrize("name", OTHERS)
def test_what_one_refuses_all_refuse_whatever_its_name(readers, name, monkeypatch):
    monkeypatch.setattr(Image, "preinit", pytest.fail)  # no reader of PIL looks at it
    for place, read in readers.items():
        with pytest.raises(DamagedImage):
            pytest.fail(f"{place} reads {name}: {read(OTHERS[name])}")


def test_no_other_file_opens_an_image():
    """Or it would have to decide, too; and PIL without a list of formats starts Ghostscript."""
    opens = re.compile(r"\bImage\.open\(|decode_jpeg\(|MAX_IMAGE_PIXELS")
    found = {
        path.relative_to(ROOT / "src/distdl").as_posix()
        for folder in ("src", "launchers")
        for path in (ROOT / folder).rglob("*.py")
        if opens.search(path.read_text())
    }
    assert found == {"datasets/image_files.py", "images/decoding.py", "images/nvjpeg.py"}
    assert "formats=FORMATS" in (ROOT / "src/distdl/datasets/image_files.py").read_text()


def test_the_limit_is_one_and_can_be_raised():
    large = encoded(Image.new("1", (15_000, 12_500)), "PNG")  # PIL's own limit is 179 megapixels
    for view in (TrainView(32), EvalView(32)):
        with pytest.raises(TooLarge, match=r"187.5 megapixels, more than 50 \(max_pixels\)"):
            view(large)
    before = Image.MAX_IMAGE_PIXELS
    try:
        assert EvalView(32, max_pixels=200_000_000)(large)["image"].shape == (3, 32, 32)
    finally:
        Image.MAX_IMAGE_PIXELS = before
    data = StoredImages("images", 2, 2, num_workers=0, max_pixels=3000)
    for view in (data.train_view, data.val_view):
        with pytest.raises(TooLarge):
            view(READ["jpeg"])  # 3,072


@pytest.mark.parametrize(
    ("mode", "side", "scans", "most"), [("CMYK", 64, 18, MOST_SCANS), ("RGB", 7000, 10, 20)]
)
def test_honest_scans_are_read_and_only_those(mode, side, scans, most):
    """libjpeg writes 18 scans at most. Those of a thumbnail, and behind the image, do not count."""
    image = Image.new(mode, (side, side))
    honest = encoded(image, progressive=True)
    thumbnail = b"\xff\xe1" + (4000).to_bytes(2, "big") + b"\xff\xda" * 1999
    odd = honest[:2] + thumbnail + honest[2:] + b"\xff\xda" * 500
    assert examine(honest).passes == scans
    assert examine(odd).passes == scans
    scan = honest[honest.rfind(b"\xff\xda") : -2]
    missing = most - scans
    assert examine(honest[:-2] + scan * missing + honest[-2:]).passes == most
    with pytest.raises(TooLarge, match=f"more than {most} scans"):
        examine(honest[:-2] + scan * (missing + 1) + honest[-2:])


@pytest.mark.parametrize("name", [name for name in hostile.IMAGES if "MB of" in name])
def test_a_decision_takes_no_time(name):
    data = hostile.IMAGES[name][0]()
    started = time.process_time()
    with pytest.raises(DamagedImage):
        examine(data)
    assert time.process_time() - started < 5  # it took 65 s


# What a list of files leaves out.


@pytest.fixture
def mixed(tmp_path):
    """A folder of files of all kinds; `read`: those that are images, in order."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name, kind in {
        "a.JPG": "jpeg",
        "b.jfif": "jpeg",
        "c.jpe": "jpeg",
        "d.gif": "gif",
        "e.heic": "heic",
        "f.tga": "tga",
        "g": "png",
        "h": "gif",
        "i.gif.jpg": "gif",
        "j.dat": "webp",
        ".hidden": "jpeg",
    }.items():
        (folder / name).write_bytes({**READ, **OTHERS}[kind])
    (folder / "k.txt").write_bytes(READ["jpeg"])  # its ending says what it is
    (folder / os.fsdecode(b"l\xff.jpg")).write_bytes(READ["jpeg"])
    os.mkfifo(folder / "m.jpg")
    (folder / "n.jpg").symlink_to("/nowhere")
    (folder / "o").symlink_to("o")
    (folder / "up").symlink_to(folder)
    return folder


DAMAGED = ["i.gif.jpg", "m.jpg", "n.jpg", "o"]
IMAGES = ["a.JPG", "b.jfif", "c.jpe", "g", "j.dat", os.fsdecode(b"l\xff.jpg")]
NAMED_IMAGES = sorted([*IMAGES, *DAMAGED])


def rows(images):
    images.replaces = False
    found = [
        (images.sample_name(i).rpartition("/")[2], images[i]["damaged"]) for i in range(len(images))
    ]
    return dict(found)


def test_a_prediction_has_a_row_for_each_file(mixed):
    (mixed / "below/.cache").mkdir(parents=True)
    (mixed / "below/.cache/p.jpg").write_bytes(READ["jpeg"])
    listed = ListedImages(str(mixed), EvalView(16))
    found = rows(listed)
    assert sorted(found) == sorted([*NAMED_IMAGES, "d.gif", "e.heic", "f.tga", "h"])
    assert sorted(name for name, error in found.items() if not error) == sorted(IMAGES)
    assert "but GIF" in found["d.gif"]
    assert "but HEIC" in found["e.heic"]
    assert "not a regular file" in found["m.jpg"]
    assert "Too many levels" in found["o"]
    assert [line.partition(" (")[0] for line in listed.left_out.lines()] == ["1 file left out"]
    assert listed.left_out.lines()[0].endswith(": .txt 1")
    for path in mixed.iterdir():
        if path.name != "k.txt":
            path.rename(mixed / f".{path.name}")
    problem = refusal(ListedImages, str(mixed), EvalView(16))
    assert "holds no image (left out: .txt 1)" in problem.what


def as_splits(mixed):
    for split in ("train", "val"):
        (mixed.parent / split).mkdir()
        (mixed.parent / split / "cat").symlink_to(mixed)
    (mixed.parent / "val" / "cat").unlink()
    (mixed.parent / "val" / "cat").mkdir()
    (mixed.parent / "val/cat/0.jpg").write_bytes(READ["jpeg"])
    (mixed.parent / "train/stray.jpg").write_bytes(READ["jpeg"])
    return mixed.parent


def test_training_prepare_and_data_check_say_what_they_leave_out(mixed, caplog, command):
    root = as_splits(mixed)
    left_out = [
        "1 file left out (beside the class folders): .jpg 1",
        "5 files left out (no JPEG, PNG, PPM, BMP, TIFF or WEBP): "
        ".gif 1, .heic 1, .tga 1, no ending 1, .txt 1",
    ]
    data = StoredImages(str(root), 2, 1, image_size=16, num_workers=0)
    data.setup()
    assert [record.getMessage() for record in caplog.records] == [f"data: {x}" for x in left_out]
    found = rows(data.splits["train"])
    assert sorted(name for name, error in found.items() if not error) == sorted(IMAGES)
    assert sorted(name for name, error in found.items() if error) == DAMAGED
    source = Folder(root)
    train = [s for s in source.scan(lambda *_: None) if s.split == "train"]
    assert sorted(str(s.where[0]).rpartition("/")[2] for s in train) == NAMED_IMAGES
    assert source.left_out.lines() == left_out
    prepared = command(
        "prepare", "folder", "--source", str(root), "--to", f"{root}-out", "--skip-damaged"
    )
    assert prepared.code == 0
    assert all(f"note: {line}\n" in prepared.out for line in left_out)
    checked = command("data", "check", str(root))
    assert all(f"note     {line}\n" in checked.out for line in left_out)


def test_a_class_without_an_image_is_refused(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat/a.gif").write_bytes(OTHERS["gif"])
    what = "train/cat holds no image (left out so far: .gif 1)"
    assert what in refusal(FolderImages, tmp_path / "train", EvalView(16)).what
    assert what in refusal(list, Folder(tmp_path).scan(lambda *_: None)).what
    for split in ("train", "val"):
        (tmp_path / split / "cat/a.gif").unlink()
        (tmp_path / split / "cat").rmdir()
    assert "train has no class folder" in refusal(Folder, tmp_path).what
    (problem,) = StoredImages.check({"root": str(tmp_path)})
    assert "train has no class folder" in str(problem)
    for split in ("train", "val"):
        (tmp_path / split / "dog").symlink_to("/nowhere")
    (problem,) = StoredImages.check({"root": str(tmp_path)})
    assert "train/dog cannot be read: No such file" in str(problem)


def test_endings_are_shown_without_what_a_terminal_obeys():
    left_out = LeftOut()
    for name in ("a.\x1b[31m", "b", "c.tar gz", *(f"{i}.x{i % 9}" for i in range(30))):
        left_out.add(name, "here")
    assert left_out.lines() == [
        "33 files left out (here): "
        ".x0 4, .x1 4, .x2 4, no ending 3, .x3 3, .x4 3, .x5 3, .x6 3, others 6"
    ]


def test_the_limit_of_pixels_is_in_the_shipped_config():
    text = (ROOT / "conf/data/imagenet.yaml").read_text()
    assert f"max_pixels: {MOST_PIXELS}\n" in text
