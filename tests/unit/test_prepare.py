"""`python -m distdl prepare`: from other people's data sets to shards."""

from __future__ import annotations

import io
import json
import shlex
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from distdl.config.compose import compose
from distdl.datasets.format import Manifest
from distdl.datasets.imagenet import ImageNet, val_labels
from distdl.datasets.next_steps import override
from distdl.util.errors import UserError
from tests.conftest import ROOT
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
    val_images,
)


def test_each_image_is_there_with_its_label(prepared):
    train, val = stored(prepared, "train"), stored(prepared, "val")
    wanted = {name: data for of_class in images(12).values() for name, data in of_class.items()}
    assert {name.replace(".jpg", ".JPEG") for name in train} == wanted.keys()
    changed = {n for n, d in wanted.items() if train[n.replace("JPEG", "jpg")][0] != d}
    assert changed == {"n01440764_1.JPEG", "n01440764_2.JPEG"}
    for name, (data, label) in train.items():
        assert name.startswith(list(CLASSES)[label])
        image = Image.open(io.BytesIO(data))
        assert (image.format, image.mode) in (("JPEG", "RGB"), ("JPEG", "L"))
    assert {f"{n.rpartition('.')[0]}.jpg": d for n, d in val_images().items()} == {
        name: data for name, (data, _) in val.items()
    }
    truth = {f"ILSVRC2012_val_{n:08}.jpg": i for i, c in enumerate(CLASSES.values()) for n in c}
    assert {name: label for name, (_, label) in val.items()} == truth


def test_training_images_are_shuffled_and_shards_about_equal(prepared):
    labels = [label for _, label in stored(prepared, "train").values()]
    assert labels != sorted(labels)
    manifest = Manifest.from_json((prepared / "dataset.json").read_bytes(), "it")
    sizes = [shard.bytes for shard in manifest.splits["train"].shards]
    assert len(sizes) > 3
    assert max(sizes) < 1.5 * min(sizes)


def test_the_manifest_says_how_it_was_made(prepared):
    manifest = Manifest.from_json((prepared / "dataset.json").read_bytes(), "it")
    assert manifest.classes == tuple(CLASSES)
    assert manifest.made["mended"] == {
        "CMYK as RGB": {"images": 1, "names": ["n01440764_2.JPEG"]},
        "PNG named JPEG": {"images": 1, "names": ["n01440764_1.JPEG"]},
    }
    assert manifest.made["settings"]["source"]["kind"] == "imagenet"
    assert not (prepared / ".preparing").exists()


def test_webdataset_reads_it(prepared):
    import webdataset

    shards = sorted(str(path) for path in prepared.glob("train-*.tar"))
    data = webdataset.WebDataset(shards, shardshuffle=False).decode("pil")
    found = Counter(label for _, label in data.to_tuple("jpg", "cls"))
    assert found == {0: 12, 1: 12, 2: 12}


def unpacked(source: Path, folder: Path, train: str, val: str) -> Path:
    for wnid, found in images(12).items():
        (folder / "train" / wnid).mkdir(parents=True)
        for name, data in found.items():
            (folder / "train" / wnid / name).write_bytes(data)
        if train == "tars":
            (folder / "train" / f"{wnid}.tar").write_bytes(tar(found))
            for path in (folder / "train" / wnid).iterdir():
                path.unlink()
            (folder / "train" / wnid).rmdir()
    for name, data in val_images().items():
        inner = val_labels()[int(name[-13:-5])] if val == "sorted" else ""
        (folder / "val" / inner).mkdir(parents=True, exist_ok=True)
        (folder / "val" / inner / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(("train", "val"), [("tars", "flat"), ("folders", "sorted")])
def test_unpacked_it_is_the_same(train, val, tars, prepared, tmp_path):
    source = unpacked(tars, tmp_path / "in", train, val)
    prepare("imagenet", source, tmp_path / "out", *SUBSET)
    for split in ("train", "val"):  # in the same order, too
        found, wanted = stored(tmp_path / "out", split), stored(prepared, split)
        assert list(found.items()) == list(wanted.items())


def test_counts_are_checked_before_anything_is_written(tars, tmp_path):
    with pytest.raises(UserError, match="36 training images instead of 1,281,167"):
        prepare("imagenet", tars, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tar_that_is_cut_short(tars, tmp_path):
    imagenet(tmp_path / "in")
    train = tmp_path / "in" / "ILSVRC2012_img_train.tar"
    train.write_bytes(train.read_bytes()[:20_000])
    with pytest.raises(UserError, match=r"damaged.*\n.*1d675b47d978889d74fa0da5fadfb00e"):
        prepare("imagenet", tmp_path / "in", tmp_path / "out", *SUBSET)


def test_validation_images_of_other_classes_are_left_out_of_a_subset(tmp_path):
    imagenet(tmp_path)
    inner = {"n02102040.tar": tar(images(3)["n02102040"])}
    (tmp_path / "ILSVRC2012_img_train.tar").write_bytes(tar(inner))
    source = ImageNet(tmp_path, subset=True)
    found = [s for s in source.scan(lambda done, total: None) if s.split == "val"]
    assert {int(s.name[-13:-5]) for s in found} == set(CLASSES["n02102040"])
    assert {s.label for s in found} == {0}


@pytest.fixture
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("prepared") / "out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes; images of each are numbered from 1, and one is a PNG."""
    for split, first in (("train", 0), ("val", 500)):
        for place, name in enumerate(("cat", "a dog", "emu")):
            (tmp_path / split / name).mkdir(parents=True)
            for n in (1, 2, 3):
                data = encoded(photograph(first + 10 * place + n))
                (tmp_path / split / name / f"{n}.jpg").write_bytes(data)
    (tmp_path / "train" / "emu" / "4.png").write_bytes(encoded(photograph(4), "PNG"))
    (tmp_path / "train" / "emu" / "._4.png").write_bytes(b"macOS")
    return tmp_path


def test_a_folder_as_shards(folder, out):
    prepare("folder", folder, out, "--workers", "1")
    train = stored(out, "train")
    names = {"a_dog_1.jpg", "a_dog_2.jpg", "a_dog_3.jpg", "cat_1.jpg", "cat_2.jpg", "cat_3.jpg"}
    assert train.keys() == names | {"emu_1.jpg", "emu_2.jpg", "emu_3.jpg", "emu_4.png"}
    assert train["emu_4.png"] == ((folder / "train/emu/4.png").read_bytes(), 2)
    assert train["a_dog_2.jpg"] == ((folder / "train/a dog/2.jpg").read_bytes(), 0)


def test_a_damaged_image_is_named_and_left_out_on_request(folder, out):
    bad = folder / "train" / "cat" / "2.jpg"
    bad.write_bytes(bad.read_bytes()[:-300])
    with pytest.raises(UserError, match=r"1 image is damaged: train: cat_2.jpg .*truncated"):
        prepare("folder", folder, out, "--workers", "1")
    assert not (out / "dataset.json").exists()
    prepare("folder", folder, out, "--workers", "1", "--skip-damaged")
    assert len(stored(out, "train")) == 9
    damaged = json.loads((out / "dataset.json").read_text())["made"]["damaged"]
    assert [name for name, _ in damaged] == ["train: cat_2.jpg"]


@pytest.mark.parametrize("form", ["shards", "folder"])
def test_a_split_that_is_all_damage_trains_nothing(folder, out, capsys, form):
    for path in (folder / "val").rglob("*.jpg"):
        path.write_bytes(b"")
    prepare("folder", folder, out, "--workers", "1", "--skip-damaged", "--format", form)
    said = capsys.readouterr().out
    assert "next:  no training yet: validation images are all damaged (9)" in said
    assert "data.root=" not in said


def test_a_folder_as_a_folder(tars, tmp_path):
    out = tmp_path / "out"
    prepare("imagenet", tars, out, "--subset", "--format", "folder", "--workers", "2")
    found = everything(out)
    del found["prepared.json"]
    wanted = {
        f"train/{wnid}/{name.replace('JPEG', 'jpg')}": data
        for wnid, of_class in images(12).items()
        for name, data in of_class.items()
    }
    wanted |= {
        f"val/{val_labels()[int(name[-13:-5])]}/{name.replace('JPEG', 'jpg')}": data
        for name, data in val_images().items()
    }
    assert found.keys() == wanted.keys()
    changed = {name for name in found if found[name] != wanted[name]}
    assert changed == {f"train/n01440764/n01440764_{n}.jpg" for n in (1, 2)}
    prepare("imagenet", tars, out, "--subset", "--format", "folder")
    with pytest.raises(UserError, match='format was "folder", is "shards"'):
        prepare("imagenet", tars, out, "--subset")


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
    for path in (ROOT.parent / "shared" / "images").rglob("ILSVRC2012_val_*.JPEG"):
        assert labels[int(path.stem[-8:])] == path.parent.name


def test_what_can_be_read_again_is_read_again(folder, out):
    image = folder / "train" / "cat" / "2.jpg"
    whole = image.read_bytes()
    image.write_bytes(bytes(len(whole)))
    with pytest.raises(UserError, match="can be read again: the same command"):
        prepare("folder", folder, out, "--workers", "1")
    image.write_bytes(whole)
    prepare("folder", folder, out, "--workers", "1")
    assert stored(out, "train")["cat_2.jpg"] == (whole, 1)


def test_a_link_to_nowhere_is_a_damaged_image(folder, out):
    link = folder / "train" / "cat" / "lost.jpg"
    link.symlink_to("/nowhere/lost.jpg")
    said = r"1 image is damaged: train: cat_lost.jpg \(No such file or directory\)"
    with pytest.raises(UserError, match=said):
        prepare("folder", folder, out, "--workers", "1")
    # Another image in its place is another source.
    link.unlink()
    link.write_bytes(encoded(photograph(77)))
    with pytest.raises(UserError, match=r"from the beginning: --to DIR, or first rm -r .*out"):
        prepare("folder", folder, out, "--workers", "1")


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_where_it_is_to_be_sent_is_looked_at_first(folder, out, options):
    top = out.parent
    (top / "mine").mkdir()
    (top / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds something else: thesis\.tex"):
        prepare("folder", folder, top / "out", "--upload", str(top / "mine"), *options)
    with pytest.raises(UserError, match="is a file, and no folder"):
        target = str(top / "mine" / "thesis.tex")
        prepare("folder", folder, top / "out", "--upload", target, *options)
    assert not (top / "out").exists()


def test_a_folder_inside_the_source_and_a_file_as_source_are_refused(folder):
    with pytest.raises(UserError, match="is inside the source"):
        prepare("folder", folder, folder / "train" / ".." / "out")
    for kind in ("folder", "imagenet"):
        with pytest.raises(UserError, match=r"4.png is a file, and no folder"):
            prepare(kind, folder / "train" / "emu" / "4.png", folder / "out")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    "path", ["out", "/data/my images", "/daten/Bilder ä", "a'b", 'a "b"', "a\\", "7", "x,y", "null"]
)
def test_what_is_printed_can_be_pasted(path):
    (word,) = shlex.split(override("data.root", path))
    assert compose([word, "data=imagenet"]).data.root == path
    assert ("'" in override("data.root", path)) == (path != "out")
