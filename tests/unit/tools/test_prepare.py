"""`python -m distdl prepare`: ImageNet's tars and folders to shards, and what it does to an image:
nothing, unless it must or is asked to."""

import bz2
import gzip
import io
import json
import shlex
import shutil
import struct
import subprocess
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, JpegImagePlugin

from distdl.cli.prepare import main
from distdl.config.compose import compose
from distdl.data.folder import check_folder
from distdl.datasets.format import Manifest
from distdl.datasets.image_files import load_image
from distdl.datasets.image_headers import DamagedImage
from distdl.datasets.reading import Shards, open_data_set
from distdl.images import decoding
from distdl.tools.prepare.imagenet import ImageNet, val_labels
from distdl.tools.prepare.images import Treatment
from distdl.tools.prepare.next_steps import override
from distdl.tools.prepare.work import Preparation
from distdl.util import unpacking
from tests import miniature
from tests.miniature import (
    CLASSES,
    SUBSET,
    encoded,
    everything,
    photograph,
    prepare,
    stored,
    tar,
    write,
)
from tests.prepared import refusal
from tests.unit.sample_data import write_photographs

ONE = ("--workers", "1")


def as_jpg(found):
    return {name.replace(".JPEG", ".jpg"): data for name, data in found.items()}


def train_images():
    """By class and name, as they should be stored."""
    return {wnid: as_jpg(members) for wnid, members in miniature.images(12).items()}


def test_each_image_is_stored_with_its_label(prepared):
    import webdataset

    shards = sorted(str(path) for path in prepared.glob("train-*.tar"))
    data = webdataset.WebDataset(shards, shardshuffle=False).decode("pil")
    labels = [label for _, label in data.to_tuple("jpg", "cls")]
    assert Counter(labels) == {0: 12, 1: 12, 2: 12}
    assert labels != sorted(labels)
    train, val = stored(prepared, "train"), stored(prepared, "val")
    wanted = {name: data for members in train_images().values() for name, data in members.items()}
    assert train.keys() == wanted.keys()
    changed = {name for name, (data, _) in train.items() if wanted[name] != data}
    assert changed == {"n01440764_1.jpg", "n01440764_2.jpg"}
    for name, (data, label) in train.items():
        image = Image.open(io.BytesIO(data))
        assert name.startswith(list(CLASSES)[label])
        assert image.format == "JPEG"
        assert image.mode in ("RGB", "L")
    images = as_jpg(miniature.val_images())
    truth = {f"ILSVRC2012_val_{n:08}.jpg": i for i, c in enumerate(CLASSES.values()) for n in c}
    assert val == {name: (images[name], label) for name, label in truth.items()}
    manifest = Manifest.from_json((prepared / "dataset.json").read_bytes(), "it")
    sizes = [shard.bytes for shard in manifest.splits["train"].shards]
    assert len(sizes) > 3
    assert max(sizes) < 1.5 * min(sizes)
    assert manifest.classes == tuple(CLASSES)
    assert manifest.made["mended"] == {
        "CMYK as RGB": {"images": 1, "names": ["n01440764_2.JPEG"]},
        "PNG named JPEG": {"images": 1, "names": ["n01440764_1.JPEG"]},
    }
    assert not (prepared / ".preparing").exists()


@pytest.mark.parametrize(("train", "val"), [("tars", "flat"), ("folders", "sorted")])
def test_an_unpacked_imagenet_gives_the_same(train, val, prepared, tmp_path):
    source = miniature.unpack(tmp_path / "in", 12)
    if train == "tars":
        for wnid, members in miniature.images(12).items():
            (source / "train" / f"{wnid}.tar").write_bytes(tar(members))
            shutil.rmtree(source / "train" / wnid)
    for name, data in miniature.val_images().items():
        inner = val_labels()[int(name[-13:-5])] if val == "sorted" else ""
        (source / "val" / inner).mkdir(parents=True, exist_ok=True)
        (source / "val" / inner / name).write_bytes(data)
    prepare("imagenet", source, tmp_path / "out", *SUBSET)
    for split in ("train", "val"):  # in the same order, too
        assert [*stored(tmp_path / "out", split).items()] == [*stored(prepared, split).items()]


def test_compressed_tars_are_refused_with_the_tool(tars, tmp_path):
    """Also one inside another, and one whose name does not say so. The remedy names the tool, and
    does what it says."""
    intact = {path.name: path.read_bytes() for path in tars.iterdir()}
    train = "ILSVRC2012_img_train.tar"
    classes = miniature.images(3)
    inner = tar({f"{wnid}.tar.gz": gzip.compress(tar(each)) for wnid, each in classes.items()})
    unnamed = tar({f"{wnid}.tar": gzip.compress(tar(each)) for wnid, each in classes.items()})
    ways = {
        "outer": (f"{train}.gz", gzip.compress(intact[train]), f"{train}.gz is", "gzip -d"),
        "named tar": (train, bz2.compress(intact[train]), f"{train} is", "bzip2 -d"),
        "inner": (train, inner, "holds n01440764.tar.gz, which is", "gzip -d"),
        "inner, named tar": (train, unnamed, "holds n01440764.tar, which is", "gzip -d"),
        "folder": ("train/n01440764.tar.xz", b"", "n01440764.tar.xz is", "xz"),
    }
    for name, (file, content, what, tool) in ways.items():
        validation = {"ILSVRC2012_img_val.tar": intact["ILSVRC2012_img_val.tar"]}
        write(tmp_path / name, {**validation, file: content})
        problem = refusal(prepare, "imagenet", tmp_path / name, tmp_path / "out", *SUBSET)
        assert problem.path == "--source", problem
        assert f"{what} compressed" in problem.what, problem
        assert tool in problem.remedy, problem
        if name in ("outer", "named tar"):
            subprocess.run(problem.remedy, shell=True, check=True)
            assert (tmp_path / name / train).read_bytes() == intact[train]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_compressed_tfrecords_are_refused_with_what_unpacks_them(compress, suffix, tmp_path):
    content = struct.pack("<Q", 3) + b"abc" * 9
    file = tmp_path / f"train-00000-of-00001{suffix}"
    file.write_bytes(compress(content))
    assert subprocess.run(unpacking.command(file), shell=True).returncode == 0
    unpacked = tmp_path / "train-00000-of-00001" if compress is gzip.compress else file
    assert unpacked.read_bytes() == content


def test_an_archive_in_place_of_a_folder_is_to_be_unpacked(tmp_path):
    file = tmp_path / "photos.tar.gz"
    file.touch()
    problem = refusal(prepare, "folder", file, tmp_path / "out")
    assert problem.remedy.startswith(f"tar xf {file}, then "), problem


def test_what_a_tar_holds_is_read_or_counted_or_refused(tars, tmp_path, capsys):
    """Links and texts are counted; a damaged header, or a second tar behind the end, is refused:
    Python's tarfile stops there without a word."""
    source = tmp_path / "in"
    train = "ILSVRC2012_img_train.tar"
    shutil.copytree(tars, source)
    wnid, members = next(iter(miniature.images(3).items()))
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("again.JPEG")
        link.type = tarfile.SYMTYPE
        link.linkname = name
        file.addfile(link)
        file.addfile(tarfile.TarInfo("readme.txt"))
    plain = inner.getvalue()
    (source / train).write_bytes(tar({f"{wnid}.tar": plain, "n99.tar": b""}))
    assert prepare("imagenet", source, tmp_path / "out", *SUBSET, "--dry-run") == 0
    told = capsys.readouterr()
    told = told.out + told.err
    assert "links inside a tar" in told
    assert ".txt 1" in told
    assert "empty" in told
    header = plain.index(b"n01440764_1.JPEG")
    broken = plain[:header] + b"x" * 300 + plain[header + 300 :]
    for damaged in (broken, plain[:-20_480] + tar(members)[:3000], plain + tar(members)):
        (source / train).write_bytes(tar({f"{wnid}.tar": damaged}))
        problem = refusal(prepare, "imagenet", source, tmp_path / "out", *SUBSET)
        assert "is damaged" in problem.what, problem
        assert wnid in problem.what, problem


def test_kaggles_layout_is_found_and_named(tmp_path):
    source = miniature.unpack(tmp_path / "my set/ILSVRC/Data/CLS-LOC", 12)
    write(source / "val", miniature.val_images())
    write(source / "test", {"ILSVRC2012_test_00000001.JPEG": b""})
    line = f"prepare imagenet --source {shlex.quote(str(source))}"
    for root in (tmp_path / "my set", tmp_path / "my set/ILSVRC", source):
        assert line in next(iter(check_folder(root, None))).remedy
    assert str(source) in refusal(prepare, "imagenet", tmp_path / "my set", tmp_path / "o").remedy
    assert line in refusal(prepare, "folder", source, tmp_path / "o").remedy
    assert prepare("imagenet", source, tmp_path / "out", *SUBSET, "--dry-run") == 0


def test_incomplete_and_damaged_tars_are_refused(tars, tmp_path, capsys):
    problem = refusal(prepare, "imagenet", tars, tmp_path / "out")
    assert problem.path == "--source"
    assert "36 training images instead of 1,281,167" in problem.what
    assert prepare("imagenet", tars, tmp_path / "out", *SUBSET, "--dry-run") == 0
    assert "36 images" in capsys.readouterr().out
    train = miniature.imagenet(tmp_path / "in") / "ILSVRC2012_img_train.tar"
    intact = train.read_bytes()
    train.write_bytes(intact[:20_000])
    problem = refusal(prepare, "imagenet", tmp_path / "in", tmp_path / "out", *SUBSET)
    assert problem.path == "--source"
    assert "1d675b47d978889d74fa0da5fadfb00e" in problem.remedy
    assert not (tmp_path / "out").exists()
    # A subset leaves out validation images of other classes.
    train.write_bytes(tar({"n02102040.tar": tar(miniature.images(3)["n02102040"])}))
    samples = ImageNet(tmp_path / "in", subset=True).scan(lambda done, total: None)
    val = {(int(s.name[-13:-5]), s.label) for s in samples if s.split == "val"}
    assert val == {(number, 0) for number in CLASSES["n02102040"]}


@pytest.fixture
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("prepared") / "out"


@pytest.fixture
def folder(tmp_path):
    """Three classes of three images, and three more in one of them: a PNG, and similar names."""
    write_photographs(tmp_path, ("cat", "a dog", "emu"), train=3, val=3)
    for number, name in enumerate(("ä.b.jpg", "_.b.jpg")):
        (tmp_path / "train/emu" / name).write_bytes(encoded(photograph(number)))
    (tmp_path / "train/emu/4.png").write_bytes(encoded(photograph(4), "PNG"))
    (tmp_path / "train/emu/._4.png").write_bytes(b"macOS")
    return tmp_path


def test_damaged_images_are_read_again_or_left_out_on_request(folder, out):
    image = folder / "train/cat/2.jpg"
    intact = image.read_bytes()
    image.write_bytes(bytes(len(intact)))
    problem = refusal(prepare, "folder", folder, out, *ONE)
    assert problem.path == "--source"
    assert "1 image is damaged: train: cat_2.jpg" in problem.what
    assert "the same command" in problem.remedy
    assert not (out / "dataset.json").exists()
    image.write_bytes(intact + b"x")  # another image is another source
    problem = refusal(prepare, "folder", folder, out, *ONE)
    assert problem.path == "--to"
    assert f"rm -r {out}" in problem.remedy
    image.write_bytes(intact)
    prepare("folder", folder, out, *ONE)
    train = stored(out, "train")
    assert len(train) == 12
    assert train["cat_2.jpg"] == (intact, 1)
    assert train.keys() >= {"emu___b.jpg", "emu___b_2.jpg"}  # webdataset: a key has no dot
    assert train["emu_4.png"] == ((folder / "train/emu/4.png").read_bytes(), 2)
    assert train["a_dog_2.jpg"] == ((folder / "train/a dog/2.jpg").read_bytes(), 0)
    image.write_bytes(intact[:-300])
    (folder / "train/emu/lost.jpg").symlink_to("/nowhere/lost.jpg")
    some = out.parent / "some"
    prepare("folder", folder, some, *ONE, "--skip-damaged")
    damaged = dict(json.loads((some / "dataset.json").read_text())["made"]["damaged"])
    assert len(stored(some, "train")) == 11
    assert damaged.keys() >= {"train: cat_2.jpg"}
    assert len(damaged) == 2
    assert damaged["train: emu_lost.jpg"] == "No such file or directory"


@pytest.mark.parametrize("form", ["shards", "folder"])
def test_without_intact_validation_images_no_training_is_suggested(folder, out, capsys, form):
    for path in (folder / "val").rglob("*.jpg"):
        path.write_bytes(b"")
    prepare("folder", folder, out, *ONE, "--skip-damaged", "--format", form)
    output = capsys.readouterr().out
    assert "next:  no training yet: validation images are all damaged (9)" in output
    assert "data.root=" not in output


def test_tars_as_a_folder(tars, out):
    options = ("--subset", "--format", "folder", "--workers", "2")
    prepare("imagenet", tars, out, *options)
    contents = everything(out)
    del contents["prepared.json"]
    wanted = {f"train/{w}/{n}": data for w, c in train_images().items() for n, data in c.items()}
    for name, data in as_jpg(miniature.val_images()).items():
        wanted[f"val/{val_labels()[int(name[-12:-4])]}/{name}"] = data
    assert contents.keys() == wanted.keys()
    changed = {name for name in contents if contents[name] != wanted[name]}
    assert changed == {f"train/n01440764/n01440764_{n}.jpg" for n in (1, 2)}
    prepare("imagenet", tars, out, *options)
    assert refusal(prepare, "imagenet", tars, out, "--subset").path == "--to"


@pytest.mark.parametrize(
    ("words", "path", "text"),
    [
        ("", "prepare", "python -m distdl prepare imagenet"),
        ("imagnet", "imagnet", "did you mean: python -m distdl prepare imagenet"),
        ("imagenet", "prepare imagenet", "missing: --source, --to"),
        ("imagenet --source /nowhere --to x", "--source", "no such folder"),
        ("folder --source . --to ../x", "--source", "must hold train/<class>/"),
        ("folder --source . --to x --shard-md 3", "--shard-md", "did you mean: --shard-mb"),
        ("folder --source . --to x --workers 0", "--workers", "less than 1"),
        ("folder --source . --to x --quality 101", "--quality", "1 to 100"),
        ("folder --source . --to x --subsampling 444", "--subsampling", "encoded again, and none"),
        ("folder --source . --to x --shard-mb nan", "--shard-mb", "is not a size"),
        ("folder --source . --to x --raw-fraction 1.5", "--raw-fraction", "a share from 0 to 1"),
        ("folder --source '' --to x", "--source", "is empty"),
        ("folder --source . --to azure://a/b", "--to", "--upload azure://a/b"),
        ("folder --source . --to x --upload ftp://b", "ftp://b", "form"),
    ],
)
def test_wrong_options_are_explained(words, path, text):
    problem = refusal(main, shlex.split(words))
    assert problem.path == path
    assert text in str(problem)


def test_unsuitable_folders_are_refused_before_anything_is_written(folder, out):
    image = str(folder / "train/emu/4.png")
    (folder / "mine").mkdir()
    (folder / "mine/thesis.tex").write_text("years of work")
    for path, kind, source, to, *options in (
        ("--upload", "folder", folder, out, "--upload", str(folder / "mine")),
        ("--upload", "folder", folder, out, "--upload", image, "--dry-run"),
        ("--to", "folder", folder, folder / "train" / ".." / "out"),
        ("--source", "folder", Path(image), out),
        ("--source", "imagenet", Path(image), out),
    ):
        assert refusal(prepare, kind, source, to, *options).path == path
    assert not out.exists()
    assert not (folder / "out").exists()


@pytest.mark.parametrize("path", ["out", "/data/my images", "a'b", 'a "b"', "a\\", "x,y", "null"])
def test_a_printed_override_can_be_pasted(path):
    (word,) = shlex.split(override("data.root", path))
    assert compose([word, "data=imagenet"]).data.root == path
    assert ("'" in override("data.root", path)) == (path != "out")


AS_IT_IS = Treatment()
PHOTO = photograph(1)


def opened(data):
    return Image.open(io.BytesIO(data))


def difference(a, b):
    """Mean, of 255."""
    both = [np.asarray(image.convert("RGB"), dtype=float) for image in (a, b)]
    return float(np.abs(both[0] - both[1]).mean())


CMYK = PHOTO.convert("CMYK")
SMALL = Treatment(short_side=24)
# Black and white at random: what a JPEG needs most bytes for.
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 2, (150, 200, 3), np.uint8) * 255)


@pytest.mark.parametrize(
    ("image", "form", "name", "treatment", "result", "most"),
    [
        # Most keep every byte.
        (PHOTO.convert("L"), "JPEG", "a.JPEG", AS_IT_IS, ("JPEG", "L", ".jpg", ""), None),
        (PHOTO, "WEBP", "a.webp", AS_IT_IS, ("WEBP", "RGB", ".webp", ""), None),
        (PHOTO, "JPEG", "wrong.png", AS_IT_IS, ("JPEG", "RGB", ".jpg", ""), None),
        (PHOTO, "BMP", "a.bmp", AS_IT_IS, ("PNG", "RGB", ".png", "BMP as PNG"), 0),
        (CMYK, "TIFF", "a.tif", AS_IT_IS, ("PNG", "RGB", ".png", "TIFF as PNG"), 1),
        (NOISE, "PNG", "a.JPEG", AS_IT_IS, ("JPEG", "RGB", ".jpg", "PNG named JPEG"), 1),
        # What is scaled becomes a JPEG.
        (PHOTO, "TIFF", "a.tif", SMALL, ("JPEG", "RGB", ".jpg", "TIFF as JPEG"), 3),
        (PHOTO, "PNG", "a.png", Treatment(short_side=48), ("PNG", "RGB", ".png", ""), None),
    ],
)
def test_what_becomes_of_an_image(image, form, name, treatment, result, most):
    before = encoded(image, form, **({"quality": 100} if form == "JPEG" else {}))
    data, extension, oddity = treatment.apply(before, name)
    after = opened(data)
    assert (after.format, after.mode, extension, oddity) == result
    original = opened(before).convert("RGB").resize(after.size, Image.Resampling.LANCZOS)
    assert data == before if most is None else difference(after, original) <= most


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_16_bits_are_scaled_to_8_and_not_clipped(mode):
    values = np.tile(np.arange(256, dtype=">u2" if mode == "I;16B" else "<u2"), (16, 1))
    image = Image.frombytes(mode, (256, 16), (values * 257).astype(values.dtype).tobytes())
    data = encoded(image, "TIFF")
    same, extension, _ = AS_IT_IS.apply(data, "a.tif")  # without loss
    assert extension == ".png"
    assert np.array_equal(np.asarray(opened(same)), values * 257)
    jpeg, *_ = AS_IT_IS.apply(same, "a.JPEG")
    smaller, *_ = Treatment(short_side=8, quality=100).apply(data, "a.tif")
    for result, expected in (
        (opened(jpeg), values),
        (opened(smaller), values[:8, ::2]),
        (load_image(same, "RGB"), values),
    ):
        assert np.abs(np.asarray(result.convert("L")).astype(int) - expected).max() < 3


def test_an_image_that_cannot_be_written_is_not_damaged(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "photos" / split / "cat").mkdir(parents=True)
        wide = Image.new("L", (70_000, 200))  # a JPEG has at most 65,535 pixels
        (tmp_path / "photos" / split / "cat/a.JPEG").write_bytes(encoded(wide, "PNG"))
    options = (*ONE, "--skip-damaged")
    problem = refusal(prepare, "folder", tmp_path / "photos", tmp_path / "out", *options)
    assert problem.path.endswith("a.JPEG")
    assert "cannot be written as JPEG" in problem.what


def test_images_are_scaled_down_and_never_up():
    sizes = {(100, 30): (50, 15), (80, 100): (24, 30), (400, 2): (50, 1), (30, 20): (30, 20)}
    treatment = Treatment(max_side=50, short_side=24)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees: pixels stay, and so does the mark
    for before, after in sizes.items():
        image = photograph(1, *before)
        original = encoded(image, quality=95, exif=exif)
        data, _, oddity = treatment.apply(original, "a.jpg")
        assert opened(data).size == after
        assert opened(data).getexif().get(0x0112) == 6
        assert not oddity  # it was asked for
        assert difference(opened(data), image.resize(after, Image.Resampling.LANCZOS)) < 5
        assert (data == original) == (before == after)


def test_colours_of_what_is_encoded_again_are_as_asked_for():
    data = encoded(photograph(1, 90, 60), quality=95)
    sizes = []
    for wanted, sampled in (("444", 0), ("422", 1), ("420", 2), (None, 2)):
        for treatment in (
            Treatment(short_side=24, subsampling=wanted),
            Treatment(quality=50, subsampling=wanted),
        ):
            again, *_ = treatment.apply(data, "a.jpg")
            assert JpegImagePlugin.get_sampling(opened(again)) == sampled
            sizes.append(len(again))
    assert Treatment(subsampling="444").settings()["subsampling"] == "444"
    assert "subsampling" not in SMALL.settings(), "as older versions wrote them"


def test_a_share_of_the_images_is_stored_as_pixels_that_train_the_same():
    files = [encoded(photograph(n, 60, 40), quality=90) for n in range(60)]
    files += [encoded(photograph(60).convert("L")), encoded(photograph(61), "PNG")]
    kinds = [Treatment(raw_fraction=0.3).apply(data, "a.jpg")[1] for data in files]
    assert 8 <= kinds.count(".ppm") <= 28
    assert kinds == [Treatment(raw_fraction=0.3).apply(data, "b.jpg")[1] for data in files]
    for data in files:
        raw, extension, _ = Treatment(raw_fraction=1.0).apply(data, "a.jpg")
        assert extension == {"RGB": ".ppm", "L": ".pgm"}[opened(data).mode]
        for decode in (decoding.decoder("auto"), decoding.decoder("pil")):
            assert torch.equal(decode(raw), decode(data))
        with pytest.raises(DamagedImage):
            decoding.decoder("auto")(raw[:-1])
    small, *_ = Treatment(short_side=24, raw_fraction=1.0).apply(files[0], "a.jpg")
    assert opened(small).size == (36, 24)


def test_quality_alone_changes_only_what_gets_much_smaller():
    detailed = Image.effect_noise((200, 150), 40)
    fine, coarse = (encoded(detailed, quality=q) for q in (98, 80))
    treatment = Treatment(quality=80)
    again = treatment.apply(fine, "a.jpg")[0]
    assert len(again) < 0.9 * len(fine)
    assert treatment.apply(again, "a.jpg")[0] == again
    assert treatment.apply(coarse, "a.jpg")[0] == coarse


def test_images_are_appended_and_old_shards_stay(tmp_path, capsys):
    """Also after an interruption; with classes that were not there."""
    for name, classes, start in (("first", ("ant", "cat"), 0), ("more", ("bee", "cat"), 50)):
        for number, of_class in enumerate(classes):
            for split in ("train", "val") if name == "first" else ("train",):
                for index in range(6):
                    data = encoded(photograph(start + 10 * number + index))
                    write(tmp_path / name / split / of_class, {f"{name}{index}.jpg": data})
    small = ("--shard-mb", "0.005", *ONE)
    out = tmp_path / "out"
    assert prepare("folder", tmp_path / "first", out, *small) == 0
    before = everything(out)
    held = {split: stored(out, split) for split in ("train", "val")}
    # What would be the same images twice, or no data set.
    assert "already" in refusal(prepare, "folder", tmp_path / "first", out, *small, "--append").what
    problem = refusal(prepare, "folder", tmp_path / "more", tmp_path / "new", *small, "--append")
    assert problem.path == "--append"

    def added(*options):
        return prepare("folder", tmp_path / "more", out, *small, "--append", *options)

    added("--dry-run")
    assert everything(out) == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Preparation, "finish", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            added()
    assert {name: everything(out)[name] for name in before} == before, "it is what it was"
    assert {split: stored(out, split) for split in held} == held
    # Its own command says that it is complete, and disturbs nothing.
    assert prepare("folder", tmp_path / "first", out, *small) == 0
    capsys.readouterr()
    assert added() == 0
    said = capsys.readouterr().out
    assert "resuming: " in said
    after = everything(out)
    kept = [name for name in before if name != "dataset.json"]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    manifest = Manifest.from_json(after["dataset.json"], "it")
    assert manifest.classes == ("ant", "cat", "bee")
    train = stored(out, "train")
    assert train.items() >= held["train"].items()
    assert stored(out, "val") == held["val"]
    labels = Counter(label for _, label in train.values())
    assert labels == {0: 6, 1: 12, 2: 6}
    assert {label for name, (_, label) in train.items() if "more" in name} == {1, 2}
    assert added() == 0
    assert "is prepared already, with these images" in capsys.readouterr().out
    assert everything(out) == after
    # The index has the shards in their order, as training expects it.
    data = open_data_set(str(out))
    shards = Shards(data, "train")
    assert {shards.read(index) for index in range(24)} == {image for image, _ in train.values()}
