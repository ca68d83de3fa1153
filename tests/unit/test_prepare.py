"""`python -m distdl prepare`: from ImageNet's tars and from folders to shards."""

from __future__ import annotations

import io
import json
import shlex
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from distdl.cli.prepare import main
from distdl.config.compose import compose
from distdl.datasets.format import Manifest
from distdl.datasets.imagenet import ImageNet, val_labels
from distdl.datasets.next_steps import override
from distdl.datasets.shard_plan import Keys
from tests.miniature import (
    CLASSES,
    SUBSET,
    encoded,
    everything,
    imagenet,
    images,
    photograph,
    prepare,
    stored,
    tar,
    unpack,
    val_images,
)
from tests.prepared import refusal

ONE = ("--workers", "1")


def as_jpg(found: dict[str, bytes]) -> dict[str, bytes]:
    return {name.replace(".JPEG", ".jpg"): data for name, data in found.items()}


def test_each_image_is_stored_with_its_label(prepared):
    import webdataset

    shards = sorted(str(path) for path in prepared.glob("train-*.tar"))
    data = webdataset.WebDataset(shards, shardshuffle=False).decode("pil")
    labels = Counter(label for _, label in data.to_tuple("jpg", "cls"))
    assert labels == {0: 12, 1: 12, 2: 12}
    train, val = stored(prepared, "train"), stored(prepared, "val")
    wanted = as_jpg({n: data for of_class in images(12).values() for n, data in of_class.items()})
    assert train.keys() == wanted.keys()
    changed = {name for name, (data, _) in train.items() if wanted[name] != data}
    assert changed == {"n01440764_1.jpg", "n01440764_2.jpg"}
    for name, (data, label) in train.items():
        image = Image.open(io.BytesIO(data))
        assert name.startswith(list(CLASSES)[label]) and image.format == "JPEG"
        assert image.mode in ("RGB", "L")
    assert {name: data for name, (data, _) in val.items()} == as_jpg(val_images())
    truth = {f"ILSVRC2012_val_{n:08}.jpg": i for i, c in enumerate(CLASSES.values()) for n in c}
    assert {name: label for name, (_, label) in val.items()} == truth


def test_shards_are_shuffled_and_equal_and_the_manifest_describes_them(prepared):
    labels = [label for _, label in stored(prepared, "train").values()]
    assert labels != sorted(labels)
    manifest = Manifest.from_json((prepared / "dataset.json").read_bytes(), "it")
    sizes = [shard.bytes for shard in manifest.splits["train"].shards]
    assert len(sizes) > 3 and max(sizes) < 1.5 * min(sizes)
    assert manifest.classes == tuple(CLASSES)
    assert manifest.made["mended"] == {
        "CMYK as RGB": {"images": 1, "names": ["n01440764_2.JPEG"]},
        "PNG named JPEG": {"images": 1, "names": ["n01440764_1.JPEG"]},
    }
    assert manifest.made["settings"]["source"]["kind"] == "imagenet"
    assert not (prepared / ".preparing").exists()


@pytest.mark.parametrize(("train", "val"), [("tars", "flat"), ("folders", "sorted")])
def test_an_unpacked_imagenet_gives_the_same(train, val, prepared, tmp_path):
    source = unpack(tmp_path / "in", 12)
    if train == "tars":
        for wnid, members in images(12).items():
            (source / "train" / f"{wnid}.tar").write_bytes(tar(members))
            shutil.rmtree(source / "train" / wnid)
    for name, data in val_images().items():
        inner = val_labels()[int(name[-13:-5])] if val == "sorted" else ""
        (source / "val" / inner).mkdir(parents=True, exist_ok=True)
        (source / "val" / inner / name).write_bytes(data)
    prepare("imagenet", source, tmp_path / "out", *SUBSET)
    for split in ("train", "val"):  # in the same order, too
        of_tars = stored(prepared, split)
        assert [*stored(tmp_path / "out", split).items()] == [*of_tars.items()]


def test_incomplete_and_damaged_tars_are_refused(tars, tmp_path, capsys):
    problem = refusal(prepare, "imagenet", tars, tmp_path / "out")
    assert problem.path == "--source" and "36 training images instead of 1,281,167" in problem.what
    assert prepare("imagenet", tars, tmp_path / "out", *SUBSET, "--dry-run") == 0
    assert "36 images" in capsys.readouterr().out
    train = imagenet(tmp_path / "in") / "ILSVRC2012_img_train.tar"
    train.write_bytes(train.read_bytes()[:20_000])
    problem = refusal(prepare, "imagenet", tmp_path / "in", tmp_path / "out", *SUBSET)
    assert problem.path == "--source" and "1d675b47d978889d74fa0da5fadfb00e" in problem.remedy
    assert not (tmp_path / "out").exists()


def test_a_subset_leaves_out_validation_images_of_other_classes(tmp_path):
    inner = {"n02102040.tar": tar(images(3)["n02102040"])}
    (imagenet(tmp_path) / "ILSVRC2012_img_train.tar").write_bytes(tar(inner))
    samples = ImageNet(tmp_path, subset=True).scan(lambda done, total: None)
    val = {(int(s.name[-13:-5]), s.label) for s in samples if s.split == "val"}
    assert val == {(number, 0) for number in CLASSES["n02102040"]}


def test_the_table_of_validation_labels():
    labels = val_labels()
    assert sorted(labels) == list(range(1, 50_001))
    assert set(Counter(labels.values()).values()) == {50}
    classes = sorted(set(labels.values()))
    # As published with many a network: ILSVRC2012_val_00000001.JPEG is a sea snake.
    assert [classes.index(labels[n]) for n in range(1, 8)] == [65, 970, 230, 809, 516, 57, 334]
    timm = find_spec("timm")  # imported, it would load torch
    assert timm is not None and timm.origin is not None
    names = Path(timm.origin).parent / "data/_info/imagenet_synsets.txt"
    assert classes == names.read_text().split()


@pytest.fixture
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared") / "out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes; images of each are numbered from 1, and one is a PNG."""
    for split, first in (("train", 0), ("val", 500)):
        for label, name in enumerate(("cat", "a dog", "emu")):
            (tmp_path / split / name).mkdir(parents=True)
            for n in (1, 2, 3):
                data = encoded(photograph(first + 10 * label + n))
                (tmp_path / split / name / f"{n}.jpg").write_bytes(data)
    (tmp_path / "train" / "emu" / "4.png").write_bytes(encoded(photograph(4), "PNG"))
    (tmp_path / "train" / "emu" / "._4.png").write_bytes(b"macOS")
    return tmp_path


def test_a_damaged_image_is_reported_and_left_out_on_request(folder, out):
    bad = folder / "train" / "cat" / "2.jpg"
    bad.write_bytes(bad.read_bytes()[:-300])
    link = folder / "train" / "emu" / "lost.jpg"
    link.symlink_to("/nowhere/lost.jpg")
    problem = refusal(prepare, "folder", folder, out, *ONE)
    assert problem.path == "--source" and "2 images are damaged" in problem.what
    assert "train: emu_lost.jpg (No such file or directory)" in problem.what
    assert not (out / "dataset.json").exists()
    prepare("folder", folder, out, *ONE, "--skip-damaged")
    assert len(stored(out, "train")) == 9
    damaged = json.loads((out / "dataset.json").read_text())["made"]["damaged"]
    assert sorted(name for name, _ in damaged) == ["train: cat_2.jpg", "train: emu_lost.jpg"]


def test_a_folder_as_shards_and_an_image_that_can_be_read_again(folder, out):
    image = folder / "train" / "cat" / "2.jpg"
    intact = image.read_bytes()
    image.write_bytes(bytes(len(intact)))
    assert "the same command" in refusal(prepare, "folder", folder, out, *ONE).remedy
    image.write_bytes(intact + b"x")  # another image is another source
    problem = refusal(prepare, "folder", folder, out, *ONE)
    assert problem.path == "--to" and f"rm -r {out}" in problem.remedy
    image.write_bytes(intact)
    prepare("folder", folder, out, *ONE)
    train = stored(out, "train")
    assert len(train) == 10 and train["cat_2.jpg"] == (intact, 1)
    assert train["emu_4.png"] == ((folder / "train/emu/4.png").read_bytes(), 2)
    assert train["a_dog_2.jpg"] == ((folder / "train/a dog/2.jpg").read_bytes(), 0)


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
    train = images(12).items()
    wanted = {f"train/{wnid}/{n}": data for wnid, c in train for n, data in as_jpg(c).items()}
    for name, data in as_jpg(val_images()).items():
        wanted[f"val/{val_labels()[int(name[-12:-4])]}/{name}"] = data
    assert contents.keys() == wanted.keys()
    changed = {name for name in contents if contents[name] != wanted[name]}
    assert changed == {f"train/n01440764/n01440764_{n}.jpg" for n in (1, 2)}
    prepare("imagenet", tars, out, *options)
    assert refusal(prepare, "imagenet", tars, out, "--subset").path == "--to"


@pytest.mark.parametrize(
    ("words", "path", "text"),
    [
        ([], "prepare", "python -m distdl prepare imagenet"),
        (["imagnet"], "imagnet", "did you mean: python -m distdl prepare imagenet"),
        (["imagenet"], "prepare imagenet", "required: --source, --to"),
        (["imagenet", "--shard-md", "3"], "prepare imagenet", "required"),
        (["imagenet", "--source", "/nowhere", "--to", "x"], "--source", "no such folder"),
        (["folder", "--source", ".", "--to", "../x"], "--source", "must hold train/<class>/"),
        (
            ["folder", "--source", ".", "--to", "x", "--shard-md", "3"],
            "prepare folder",
            "--shard-mb",
        ),
        (["folder", "--source", ".", "--to", "x", "--workers", "0"], "--workers", "less than 1"),
        (
            ["folder", "--source", ".", "--to", "x", "--max-side", "0"],
            "--max-side",
            "not a number of pixels",
        ),
        (["folder", "--source", ".", "--to", "x", "--quality", "101"], "--quality", "1 to 100"),
        (["folder", "--source", "", "--to", "x"], "prepare folder", "--source: is empty"),
        (["folder", "--source", ".", "--to", "azure://a/b"], "--to", "--upload azure://a/b"),
        (["folder", "--source", ".", "--to", "x", "--upload", "ftp://b"], "ftp://b", "form"),
    ],
)
def test_wrong_options_are_explained(words, path, text):
    problem = refusal(main, words)
    assert problem.path == path and text in str(problem)


def test_unsuitable_folders_are_refused_before_anything_is_written(folder, out):
    image = str(folder / "train" / "emu" / "4.png")
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.tex").write_text("years of work")
    for path, kind, source, to, *options in (
        ("--upload", "folder", folder, out, "--upload", str(folder / "mine")),
        ("--upload", "folder", folder, out, "--upload", image, "--dry-run"),
        ("--to", "folder", folder, folder / "train" / ".." / "out"),
        ("--source", "folder", Path(image), out),
        ("--source", "imagenet", Path(image), out),
    ):
        assert refusal(prepare, kind, source, to, *options).path == path
    assert not out.exists() and not (folder / "out").exists()


@pytest.mark.parametrize(
    "path", ["out", "/data/my images", "/daten/Bilder ä", "a'b", 'a "b"', "a\\", "7", "x,y", "null"]
)
def test_a_printed_override_can_be_pasted(path):
    (word,) = shlex.split(override("data.root", path))
    assert compose([word, "data=imagenet"]).data.root == path
    assert ("'" in override("data.root", path)) == (path != "out")


def test_keys_are_safe_and_differ():
    keys = Keys()
    names = ["a/b.c.JPEG", "a_b_c.png", "a/b.c", "über.jpg", "", "", "x" * 300, "y" + "x" * 300]
    result = [keys.make(name) for name in names]
    assert result[:5] == ["a_b_c", "a_b_c_2", "a_b_c_3", "_ber", "image"]
    assert len(set(result)) == len(names)
    assert all(len(key) < 90 and "." not in key for key in result)
