"""`python -m distdl prepare coco`: every annotation once, every byte of every image, and damage.

What is in a prepared set is read here by COCO's definition and tar alone, not by distdl's readers.
"""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import zipfile

import pytest

from distdl.datasets import zips
from distdl.datasets.format import Manifest
from distdl.datasets.reading import Shards, open_data_set
from distdl.util.errors import UserError
from tests.conftest import ROOT, environment
from tests.drawn_coco import CATEGORIES, draw
from tests.miniature import everything, prepare
from tests.prepared import refusal
from tests.waiting import until

ONE = ("--workers", "1", "--shard-mb", "0.02")
TRAIN = "annotations/instances_train2017.json"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return draw(tmp_path_factory.mktemp("drawn"), train=20, val=8, keypoints=True)


@pytest.fixture
def coco(drawn, tmp_path):
    return shutil.copytree(drawn, tmp_path / "coco")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def content(folder, name=TRAIN):
    return json.loads((folder / name).read_text())


def change(folder, edit, name=TRAIN):
    """Writes an annotation file again after `edit` has changed it."""
    value = content(folder, name)
    changed = edit(value)
    (folder / name).write_text(json.dumps(value if changed is None else changed))


def independent(out, split):
    """Images and records by the names in the tars, and how often each annotation is there."""
    images, found = {}, {}
    for path in sorted(out.glob(f"{split}-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                data = tar.extractfile(member).read()
                key, _, ending = member.name.partition(".")
                if ending == "json":
                    found[key] = json.loads(data)
                else:
                    images[key] = data
    assert images.keys() == found.keys()
    return {record["image"]["id"]: (record, images[key]) for key, record in found.items()}


def assert_complete(out, folder, split, name):
    """Every annotation once with every value, and every byte of every image."""
    truth = content(folder, f"annotations/{name}")
    held = independent(out, split)
    assert sorted(held) == sorted(image["id"] for image in truth["images"])
    for image in truth["images"]:
        record, data = held[image["id"]]
        assert record["image"] == image
        assert data == (folder / f"{split}2017" / image["file_name"]).read_bytes()
    if "annotations" not in truth:
        assert all("annotations" not in record for record, _ in held.values())
        return
    stored = [(each["id"], each) for record, _ in held.values() for each in record["annotations"]]
    assert len(stored) == len(truth["annotations"])
    assert dict(stored) == {each["id"]: each for each in truth["annotations"]}
    for record, _ in held.values():
        assert {each["image_id"] for each in record["annotations"]} <= {record["image"]["id"]}


def zipped(folder, method=zipfile.ZIP_STORED):
    """The set as it is downloaded: zips of images, and one of annotations."""
    for name, parts in (("annotations_trainval2017", ["annotations"]), *((n, [n]) for n in SETS)):
        with zipfile.ZipFile(folder / f"{name}.zip", "w", method) as archive:
            for path in sorted((folder / parts[0]).iterdir()):
                archive.write(path, f"{parts[0]}/{path.name}")
    for name in ("annotations", *SETS):
        shutil.rmtree(folder / name)
    return folder


SETS = ("train2017", "val2017")


def test_every_annotation_once_and_every_byte(coco, drawn, out, capsys):
    """From folders; from the zips, which may be packed; and as several files of one set."""
    test = content(coco, "annotations/instances_val2017.json")
    del test["annotations"]
    (coco / "annotations/image_info_test2017.json").write_text(json.dumps(test))
    shutil.copytree(coco / "val2017", coco / "test2017")
    assert prepare("coco", coco, out, *ONE) == 0
    printed = capsys.readouterr().out
    assert f"+experiment=maskrcnn_coco data.root={out} data.num_classes=5" in printed
    assert "test has no annotations: it can be predicted" in printed
    for split in ("train", "val"):
        assert_complete(out, drawn, split, f"instances_{split}2017.json")
    assert_complete(out, coco, "test", "image_info_test2017.json")
    manifest = Manifest.from_json((out / "dataset.json").read_bytes(), "it")
    assert manifest.domain == "detection"
    assert {c["id"]: c["name"] for c in manifest.categories} == CATEGORIES
    assert [split.labelled for split in manifest.splits.values()] == [True, True, False]
    data = open_data_set(str(out))
    for split in ("train", "val", "test"):
        shards = Shards(data, split)
        for row, index in zip(shards.rows, range(len(shards)), strict=True):
            record = json.loads(shards.record(index))
            assert (row["width"], row["height"]) == (
                record["image"]["width"],
                record["image"]["height"],
            )
            crowds = sum(each["iscrowd"] for each in record.get("annotations", ()))
            assert row["label"] == len(record.get("annotations", ())) - crowds
    (coco / "annotations/image_info_test2017.json").unlink()
    shutil.rmtree(coco / "test2017")
    zipped(coco, zipfile.ZIP_DEFLATED)
    prepare("coco", coco, out.parent / "zipped", *ONE)
    for split in ("train", "val"):
        assert_complete(out.parent / "zipped", drawn, split, f"instances_{split}2017.json")


def test_boxes_and_keypoints_of_two_files_are_one_annotation(coco, out):
    prepare("coco", coco, out, *ONE, "--labels", "instances,person_keypoints")
    points = content(coco, "annotations/person_keypoints_train2017.json")["annotations"]
    truth = {each["id"]: each for each in content(coco)["annotations"]}
    for each in points:
        truth[each["id"]] = {**truth[each["id"]], **each}
    held = independent(out, "train")
    stored = [each for record, _ in held.values() for each in record["annotations"]]
    assert len(stored) == len(truth)
    assert {each["id"]: each for each in stored} == truth
    manifest = Manifest.from_json((out / "dataset.json").read_bytes(), "it")
    assert len(manifest.categories[0]["keypoints"]) == 17
    assert manifest.categories[0]["supercategory"] == "shape"


def test_a_federated_set_is_prepared_and_said_to_be_one(coco, out, capsys):
    """LVIS: no file_name, images of both folders, categories of which an image shows any."""

    def as_lvis(value):
        for image in value["images"]:
            image["coco_url"] = f"http://host/train2017/{image.pop('file_name')}"
            image |= {"neg_category_ids": [3], "not_exhaustive_category_ids": []}

    change(coco, as_lvis)
    (coco / TRAIN).rename(coco / "lvis_v1_train.json")
    shutil.rmtree(coco / "annotations")
    prepare("coco", coco, out, *ONE, "--labels", "lvis_v1")
    printed = capsys.readouterr().out
    assert "train is federated" in printed
    assert "no training yet: validation images are missing" in printed
    assert Manifest.from_json((out / "dataset.json").read_bytes(), "it").federated
    assert len(independent(out, "train")) == 20


def first(value):
    return value["annotations"][0]


def edits():
    """Damage to an annotation file, and what is said of it."""

    def put(key, new):
        return lambda value: first(value).__setitem__(key, new)

    def drop(key):
        return lambda value: value.pop(key) and None

    def image(key, new):
        return lambda value: value["images"][0].__setitem__(key, new)

    yield "unknown image", put("image_id", 77), "of an image that no file lists: 10007 (image 77)"
    yield "unknown category", put("category_id", 2), "10007 (category 2)"
    yield (
        "an id twice",
        lambda v: v["annotations"].append(dict(first(v))),
        "ids are of more than one annotation: 10007",
    )
    yield (
        "image twice",
        lambda v: v["images"].append(dict(v["images"][0])),
        "ids are of more than one image: 1000",
    )
    yield (
        "category twice",
        lambda v: v["categories"].append({"id": 1, "name": "x"}),
        "ids are of more than one category: 1",
    )
    yield "no box", lambda v: first(v).pop("bbox") and None, "annotation 10007 has the bbox None"
    yield "three numbers", put("bbox", [1, 2, 3]), "not four numbers"
    yield "negative box", put("bbox", [1, 2, -3, 4]), "annotation 10007 has a box of -3 x 4"
    yield "box of text", put("bbox", [1, 2, "3", 4]), "not four numbers"
    yield "infinite", put("bbox", [1, 2, 1e999, 4]), "Infinity is not a number of JSON"
    yield "short polygon", put("segmentation", [[1, 2, 3, 4]]), "a polygon has 4 numbers"
    yield "far polygon", put("segmentation", [[1, 2, 3, 4e9, 5, 6]]), "far outside"
    yield "runs", put("segmentation", {"size": [96, 96], "counts": [1]}), "10007: its runs"
    yield "keypoints", put("keypoints", [1, 2]), "10007: its keypoints are no numbers"
    yield "no images", drop("images"), "has no 'images', only"
    yield "captions", lambda v: v["annotations"].__setitem__(0, {"caption": "a dog"}), "captions"
    yield "results", lambda v: v["annotations"], "'[' instead of '{'"
    yield "panoptic", lambda v: v["annotations"].__setitem__(0, {"segments_info": []}), "panoptic"
    yield "traversal", image("file_name", "../../etc/passwd"), "leads out of the folder"
    yield "absolute", image("file_name", "/etc/passwd"), "is absolute"
    yield "no size", lambda v: v["images"][0].pop("width") and None, "image 1000 has no 'width'"
    yield "text id", image("id", "a"), "not a whole number"
    yield "lost image", image("file_name", "lost.jpg"), "lost.jpg (image 1000)"


EDITS = list(edits())


@pytest.mark.parametrize(("edit", "text"), [e[1:] for e in EDITS], ids=[e[0] for e in EDITS])
def test_damage_is_refused_before_anything_is_written(coco, out, edit, text):
    change(coco, edit)
    problem = refusal(prepare, "coco", coco, out, *ONE)
    assert problem.path == "--source"
    assert text in problem.what
    assert problem.remedy
    assert not out.exists()


def test_images_and_files_that_are_damaged_are_named(coco, out):
    names = [image["file_name"] for image in content(coco)["images"]]
    names = [names[0], names[3], names[2], names[-1]]
    cut, other, lost = (coco / "train2017" / name for name in names[:3])
    cut.write_bytes(cut.read_bytes()[:-200])
    other.write_bytes((coco / "train2017" / names[-1]).read_bytes())
    lost.unlink()
    change(coco, lambda v: v["images"][3].update(width=7))
    problem = refusal(prepare, "coco", coco, out, *ONE)
    assert f"1 image of train is not in {coco}" in problem.what
    assert names[2] in problem.what
    prepare("coco", coco, out, *ONE, "--skip-damaged")
    damaged = dict(json.loads((out / "dataset.json").read_text())["made"]["damaged"])
    assert damaged.keys() == {f"train: {name}" for name in names[:3]}
    assert "truncated" in damaged[f"train: {names[0]}"]
    assert "and its annotations are of an image of 7 x" in damaged[f"train: {names[1]}"]
    assert damaged[f"train: {names[2]}"] == "is missing"
    assert len(independent(out, "train")) == 17
    text = (coco / TRAIN).read_text()
    for broken in (text[:-3000], text[:3000] + "}" + text[3000:], "", "[" * 100_000):
        (coco / TRAIN).write_text(broken)
        problem = refusal(prepare, "coco", coco, out.parent / "other", *ONE)
        assert TRAIN in problem.what
        assert "at byte" in problem.what


def test_zips_of_somebody_else(coco, out):
    """Damaged, encrypted, with a bomb, with a name twice."""
    name = content(coco)["images"][0]["file_name"]
    member = f"train2017/{name}"
    zipped(coco)
    archive = coco / "train2017.zip"
    intact = archive.read_bytes()
    place = zips.members(archive, "it")[member]
    begin = place.offset + 30 + len(member)
    archive.write_bytes(intact[: begin + 50] + b"x" + intact[begin + 51 :])
    problem = refusal(prepare, "coco", coco, out, *ONE)
    assert "do not fit their checksum" in problem.what
    assert name in problem.what
    shutil.rmtree(out)
    archive.write_bytes(intact[:-100])
    assert "is damaged, or no zip" in refusal(prepare, "coco", coco, out, *ONE).what
    # The zip's own list says: encrypted; of 4 GB; elsewhere.
    entry = intact.index(b"PK\x01\x02")
    for at, value, what in (
        (8, struct.pack("<H", 1), "is encrypted"),
        (24, struct.pack("<I", 1 << 30), "bytes in its zip, more than"),
        (42, struct.pack("<I", 3), "is not where the zip's list says"),
    ):
        archive.write_bytes(intact[: entry + at] + value + intact[entry + at + len(value) :])
        assert what in refusal(prepare, "coco", coco, out, *ONE).what
        shutil.rmtree(out)
    archive.write_bytes(intact)
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(archive, "a") as again:
        again.writestr(member, b"another")
    assert f"{member!r} twice" in refusal(prepare, "coco", coco, out, *ONE).what


def test_wrong_options_and_folders(coco, out, tmp_path):
    for option in ("--max-side", "--short-side", "--quality"):
        assert "in pixels" in refusal(prepare, "coco", coco, out, option, "90").what
    assert refusal(prepare, "coco", coco, out, "--format", "folder").path == "--format"
    (tmp_path / "empty").mkdir()
    assert "no annotation file" in refusal(prepare, "coco", tmp_path / "empty", out).what
    assert "no such file" in refusal(prepare, "coco", coco, out, "--train", "x.json").what
    (coco / "annotations/instances_train2014.json").write_text("{}")
    assert "which one is meant" in refusal(prepare, "coco", coco, out).what
    options = (*ONE, "--train", TRAIN, "--train-images", "train2017", "--dry-run")
    assert prepare("coco", coco, out, *options) == 0
    assert not out.exists()


def test_killed_and_run_again_it_ends_the_same(drawn, out, tmp_path):
    command = ["prepare", "coco", "--source", str(drawn), "--to", str(out), *ONE]
    words = [sys.executable, "-m", "distdl", *command]
    process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL)
    until(lambda: list((out / ".preparing").glob("train-*.json")) or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -9
    assert not (out / "dataset.json").exists()
    prepare("coco", drawn, out, *ONE)
    prepare("coco", drawn, tmp_path / "in_one_go", *ONE)
    assert everything(out) == everything(tmp_path / "in_one_go")
    assert_complete(out, drawn, "train", "instances_train2017.json")


def test_more_images_are_appended_if_they_can_be_told_from_the_others(coco, out, tmp_path):
    """Nothing is written if a metric would take two images for one, or a split would be mixed."""
    more = shutil.copytree(coco, tmp_path / "more")
    assert prepare("coco", coco, out, *ONE) == 0
    before = everything(out)
    val = "annotations/instances_val2017.json"

    def refused():
        problem = refusal(prepare, "coco", more, out, *ONE, "--append")
        assert everything(out) == before
        assert problem.path == "--source"
        return problem.what

    def renumbered(value):
        for image in value["images"]:
            image["id"] += 10**6
        for each in value["annotations"]:
            each["id"] += 10**8
            each["image_id"] += 10**6

    def without_masks(value):
        for each in value["annotations"]:
            del each["segmentation"]

    change(more, lambda value: {**value, "info": "not the same file"})
    assert "20 images of train have ids that are in" in refused()
    change(more, renumbered)
    assert "8 images of val have ids that are in" in refused()
    change(more, renumbered, val)
    right = {name: (more / name).read_text() for name in (TRAIN, val)}
    change(more, lambda value: value.pop("annotations") and None, val)
    assert "its images of val lack annotations, and those of the data set have" in refused()
    (more / val).write_text(right[val])
    change(more, without_masks)
    assert "its objects have boxes alone, and those of the data set segmentation" in refused()
    for name in (TRAIN, val):
        change(more, lambda value: value["categories"][0].update(name="plate"), name)
    assert "is of other categories" in refused()
    for name, text in right.items():
        (more / name).write_text(text)
    # Validation alone, of which the manifest would say that its objects have masks.
    (more / TRAIN).unlink()
    change(
        more,
        lambda value: [each.pop("segmentation") for each in value["annotations"]] and None,
        val,
    )
    assert "its objects have boxes alone, and those of the data set segmentation" in refused()
    change(more, lambda value: value["annotations"].clear(), val)
    shutil.copytree(out, tmp_path / "with_empty")
    assert prepare("coco", more, tmp_path / "with_empty", *ONE, "--append") == 0
    assert open_data_set(str(tmp_path / "with_empty")).manifest.holds == ("segmentation",)
    for name, text in right.items():
        (more / name).write_text(text)
    assert prepare("coco", more, out, *ONE, "--append") == 0
    for split, name in (("train", TRAIN), ("val", val)):
        both = independent(out, split)
        for folder in (coco, more):
            for image in content(folder, name)["images"]:
                record, data = both.pop(image["id"])
                assert record["image"] == image
                assert data == (folder / f"{split}2017" / image["file_name"]).read_bytes()
        assert not both
        shards = Shards(open_data_set(str(out)), split)
        assert {json.loads(shards.record(n))["image"]["id"] for n in range(len(shards))} == {
            image["id"] for f in (coco, more) for image in content(f, name)["images"]
        }
    after = everything(out)
    kept = [name for name in before if name != "dataset.json"]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def test_what_reads_classes_refuses_boxes_and_an_older_distdl_both(coco, out):
    prepare("coco", coco, out, *ONE)
    text = (out / "dataset.json").read_bytes()
    with pytest.raises(UserError, match="prepared by a newer distdl, as version 3"):
        Manifest.from_json(text.replace(b'"version": 2', b'"version": 3'), "it")
    for old, new in ((b'"domain"', b'"dom"'), (b'"federated"', b'"f"'), (b'"id": 1', b'"id": []')):
        if new != b'"id": []':
            with pytest.raises(UserError, match="is not a manifest"):
                Manifest.from_json(text.replace(old, new), "it")
