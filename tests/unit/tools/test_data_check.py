"""`data check`: one screen about a data set, and whether it loads fast enough for the GPUs."""

import ctypes
import json
import math
import re
import sys
import tempfile
from pathlib import Path

import pytest
from PIL import Image

from distdl.data import StoredImages
from distdl.datasets.format import MANIFEST
from distdl.images import decoding
from distdl.stores.files import FileStore
from distdl.tools.data_check import needs, profile, sources, throughput
from distdl.tools.data_check.check import gpu_of_this_machine
from tests.drawn_coco import draw
from tests.miniature import encoded
from tests.miniature import prepare as prepare_set
from tests.prepared import flip, jpeg, prepare, refusal
from tests.unit.sample_data import write_photographs

EVERY = pytest.mark.parametrize("every", [[], ["--all"]])


@pytest.fixture
def folder(tmp_path):
    write_photographs(tmp_path / "images", ("cat", "dog"), train=4, val=2)
    return tmp_path / "images"


@pytest.fixture
def shards(tmp_path):
    prepare(tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def check(command, monkeypatch):
    monkeypatch.setattr(throughput, "SECONDS", 0.05)
    return lambda *arguments: command("data", "check", *map(str, arguments))


def row(result, word):
    """The cells of the table's row that starts with a word."""
    return next(line for line in result.out.splitlines() if line.strip().startswith(word)).split()


def test_a_folder(check, folder):
    (folder / "val/cat/1.jpg").unlink()
    image = Image.new("RGB", (40, 20), (255, 51, 0))
    image.paste((255, 51, 255), (0, 0, 20, 20))
    for path in folder.glob("train/*/*"):
        path.write_bytes(encoded(image, "PNG"))
    result = check(folder, "--gpu", "K80", "--gpus", "1")
    assert result.code == 0, result.err
    assert row(result, "train")[1:3] == ["8", "8"]
    assert result.out.count("4 / 4 / 4") == 1
    assert row(result, "val")[1:3] == ["3", "3"]
    assert result.out.count("1 / 1 / 2") == 1
    assert "from 40 x 20 to 41 x 36" in result.out
    assert "none of 11\n" in result.out
    assert "data.mean=[1.000, 0.200, 0.500] data.std=[0.000, 0.000, 0.500]" in result.out
    assert "53 img/s for each GPU: resnet50 on one K80" in result.out
    assert f"data=imagenet data.num_classes=2 data.root={folder}" in result.out


def test_shards_by_their_index(check, shards, monkeypatch):
    monkeypatch.setattr(needs, "PREFETCH", 1 << 20)  # more than /dev/shm holds
    result = check(shards, "--rate", "1000000")
    assert result.code == 0, result.err
    assert row(result, "train")[1:3] == ["40", "5"]
    assert "4 / 4 / 4" in result.out
    assert "val: 3 classes have no image: class 7, class 8, class 9" in result.out
    assert "verdict  starved" in result.out
    assert "(data.decoder=nvjpeg)" in result.out
    assert "1,000,000 img/s for each GPU: your measurement" in result.out
    assert ": too small. docker run --shm-size=" in result.out


@EVERY
def test_damage_is_reported(check, shards, folder, every):
    image = (shards / "train-00001.tar").read_bytes()
    # Its last bytes: what PIL still decodes differs from the prepared image all the same.
    flip(shards / "train-00001.tar", image.index(jpeg(9)) + len(jpeg(9)) - 4)
    result = check(shards, *every)
    assert result.code == 1
    assert "1 of 47" in result.out
    assert "train: train-00001.tar:image_9.jpg: its bytes are not those" in result.out
    (folder / "val/dog/0.jpg").write_bytes(jpeg(0)[:-40])
    (folder / "train/cat/0.jpg").write_bytes(b"words")
    result = check(folder, *every)
    assert result.code == 1
    assert "2 of 12" in result.out
    assert "train: train/cat/0.jpg: is not an image" in result.out
    assert "val: val/dog/0.jpg: image file is truncated" in result.out
    for path in folder.glob("*/*/*.jpg"):
        path.unlink()
        path.symlink_to("/nowhere")
    result = check(folder, *every)
    assert (result.code, result.err) == (1, "")
    assert "12 of 12" in result.out
    assert "none of the inspected images" in result.out
    assert "train: train/cat/0.jpg: cannot be read: No such file or directory\n" in result.out


def test_a_sample_is_spread_and_called_one(check, folder):
    (folder / "train/dog/3.jpg").write_bytes(b"words")  # the last of 8
    result = check(folder, "--sample", "2")
    assert ("this machine has none: --gpu names" in result.out) == (gpu_of_this_machine() is None)
    assert "a sample of 4" in result.out
    assert "1 of 4" in result.out
    assert result.code == 1
    assert "train: train/dog/3.jpg: is not an image" in result.out


@EVERY
def test_of_a_store_one_shard_is_downloaded_or_all(check, shards, monkeypatch, every):
    """A folder stands for a store; tests/cluster has a real server."""
    names = []
    real = FileStore.download

    def recorded(store, name, *more):
        names.append(name)
        return real(store, name, *more)

    monkeypatch.setattr(sources, "is_remote", lambda uri: True)
    monkeypatch.setattr(FileStore, "download", recorded)
    result = check(shards, *every)
    assert result.code == 0
    assert "download" in result.out
    assert "img/s: the first epoch of a node goes no faster" in result.out
    assert ("all 47" if every else "a sample of 15") in result.out
    assert len(names) == (7 if every else 2)
    assert not list(Path(tempfile.gettempdir()).glob("distdl-check-*/train-*"))


@pytest.mark.parametrize(
    ("edit", "target", "text"),
    [
        ((), "{root}/none", "no such folder"),
        ((), "{root}", "must hold train/<class>/"),
        (("ILSVRC2012_img_train.tar",), "{root}", "prepare imagenet --source '{root}' --to OUT"),
        ((".preparing/plan.jsonl",), "{root}", "was interrupted"),
        ((), "{folder}/val/cat/0.jpg", "{folder}/val/cat/0.jpg: is a file"),
        (("../images/val/emu/0.jpg",), "{folder}", "only one of the two has emu"),
        ((), "{folder} --gpu h10", "--gpu h100"),
        ((), "{folder} --model resnext", "no rate of resnext is known"),
        ((), "{folder} --rate -1", "--rate: must be more than 0"),
        ((MANIFEST, b'8",\n  "class 9"', b'8"'), "{shards}", "label 9, dataset.json names 9"),
        ((MANIFEST, b'"samples": 40', b'"samples": 39'), "{shards}", "40 samples, dataset.json"),
        ((MANIFEST, b'"samples": 8', b'"samples": 9'), "{shards}", "does not fit the shards"),
        ((MANIFEST, b"train-00000.tar", b"x/../evil"), "{shards}", "is not a name of a shard"),
        ((MANIFEST, b'"version": 1', b'"version": 3'), "{shards}", "update distdl"),
        ((MANIFEST, b'"format"', b'"shape"'), "{shards}", "is not a manifest"),
        (("train-00001.tar", b"image_9", b""), "{shards}", "train-00001.tar has "),
        (("train.index.npy", b"NUMPY", b"numpy"), "{shards}", "is not the index"),
    ],
)
def test_other_data_is_refused(check, tmp_path, folder, shards, edit, target, text):
    paths = {"root": tmp_path / "my root", "folder": folder, "shards": shards}
    paths["root"].mkdir()
    if len(edit) == 1:
        (paths["root"] / edit[0]).parent.mkdir(parents=True, exist_ok=True)
        (paths["root"] / edit[0]).touch()
    elif edit:
        data = (shards / edit[0]).read_bytes()
        (shards / edit[0]).write_bytes(data.replace(*edit[1:], 1))
    result = check(*(word.format(**paths) for word in target.split()))
    assert (result.code, result.out) == (2, ""), result
    assert text.format(**paths) in result.err
    assert "data.root" not in result.err


@pytest.fixture
def no_override():
    """Takes from root the right to read any file (CAP_DAC_OVERRIDE and _READ_SEARCH)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    less = (ctypes.c_uint32 * 6)(before[0] & ~0b110, *before[1:])
    assert libc.capset(header, less) == 0
    yield
    assert libc.capset(header, before) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's capabilities")
@pytest.mark.parametrize("inside", ["", "train", "train/dog"])
def test_an_unreadable_folder_is_refused(check, command, folder, inside, no_override):
    unreadable = folder / inside
    unreadable.chmod(0)
    result = check(folder)
    prepared = command("prepare", "folder", "--source", str(folder), "--to", f"{folder}-out")
    trained = refusal(StoredImages(str(folder), 2, 2, num_workers=0).setup)
    problems = list(StoredImages.check({"root": str(folder)}))
    unreadable.chmod(0o755)
    assert (result.code, result.out, prepared.code) == (2, "", 2)
    assert len(problems) == (inside != "train/dog")  # no check lists a million images
    for text in (result.err, prepared.err, *map(str, (trained, *problems))):
        assert "cannot be read: Permission denied" in text
        assert str(unreadable) in text
    assert f"  {folder}: " in result.err
    assert "  --source: " in prepared.err


PLAIN = needs.Format("as they are", 230)
SMALL = needs.Format("smaller", 1150, "prepare ...")
NVJPEG = ("data.decoder=nvjpeg",)


# 1,000 img/s at 230 per core and 15 % on top are 5 cores, and one trains.
@pytest.mark.parametrize(
    ("rate", "formats", "reading", "cores", "gpus", "text", "overrides"),
    [
        (1000, [PLAIN, SMALL], math.inf, 12, 2, "5 workers and the training itself, on 6", ()),
        # A slow disk asks for more workers, and not for more cores.
        (1000, [PLAIN], 100, 8, 1, "15 workers while", ("data.num_workers=15",)),
        # 4 complete workers.
        (1000, [PLAIN, SMALL], 1e9, 11, 2, "80 % of what it can train on; 6 are needed", ()),
        (1000, [PLAIN, SMALL], 1e9, 1, 1, "has the training itself to do; 6 are", NVJPEG),
        (1e6, [PLAIN], 1e9, 5, 1, "decode less than 1 % of", NVJPEG),
    ],
)
def test_verdicts(rate, formats, reading, cores, gpus, text, overrides):
    verdict = needs.judge(needs.Need(rate, ""), formats, reading, cores, gpus)
    assert text in verdict.text
    assert verdict.overrides == overrides
    assert verdict.fed == ("workers" in text)
    assert verdict.before == ("prepare ..." if not verdict.fed and not overrides else "")


@pytest.fixture
def coco(tmp_path):
    """A set with two unusual boxes, in a folder; nothing is wrong with it."""
    root = draw(tmp_path / "coco", train=12, val=4)
    edit_coco(root, lambda v: v["annotations"][0].update(bbox=[500, 500, 5, 6]))
    edit_coco(root, lambda v: v["annotations"][1].update(bbox=[-9, 0, 20, 0]))
    return root


def edit_coco(root, edit):
    path = root / "annotations/instances_train2017.json"
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


def test_objects_are_looked_at_in_a_folder_and_in_shards(check, coco, tmp_path):
    out = tmp_path / "out"
    prepare_set("coco", coco, out, "--workers", "1")
    names = [
        image["file_name"]
        for image in json.loads((coco / "annotations/instances_train2017.json").read_text())[
            "images"
        ]
    ]
    outside = "annotation 10007 has a box outside the image (x 500, y 500, 5 x 6)"
    flat = "annotation 10008 has a box without an area (x -9, y 0, 20 x 0)"
    for root, name in ((coco, names[0]), (out, f"train-00000.tar:{names[0]}")):
        result = check(root)
        assert result.code == 0, result.err
        assert f"train: 1 have a box outside the image: {name}: {outside}" in result.out
        assert flat in result.out
        assert "1 image without objects" in result.out
        assert "5 categories" in result.out
        assert f"data=coco data.root={root} data.num_classes=5" in result.out
    tar = out / "train-00000.tar"
    flip(tar, tar.read_bytes().index(b'"bbox"') + 2)
    result = check(out, "--all")
    assert result.code == 1
    assert "its record: its bytes are not those of the index" in result.out


def test_what_is_wrong_with_objects_is_named(check, coco):
    edit_coco(coco, lambda v: v["annotations"][2].update(segmentation=[[1, 2, 3, 4]]))
    edit_coco(coco, lambda v: v["images"][2].update(file_name="lost.jpg"))
    result = check(coco, "--all")
    assert result.code == 1, result.err
    assert "annotation 10009: a polygon has 4 numbers" in result.out
    assert "lost.jpg (image 1006): is missing" in result.out
    edit_coco(coco, lambda v: v["annotations"][2].update(id=10007))
    result = check(coco)
    assert result.code == 2
    assert "instances_train2017.json: 1 ids are of more than one annotation: 10007" in result.err


@pytest.mark.parametrize("name", ["bars.png", "bars", ".", "absent/bars.svg"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_check(
    check, shards, tmp_path, name
):
    result = check(shards, "--profile", tmp_path / name)
    assert result.code == 2
    assert "1 problem, nothing was started\n  --profile: " in result.err
    assert not result.out


@pytest.mark.parametrize("native", [True, False])
def test_a_profile_says_where_the_time_goes(check, shards, monkeypatch, tmp_path, native):
    """Each stage apart, in a table with bars and in a picture."""
    library = decoding.native_library() if native else None
    if native and library is None:
        pytest.skip("no distdl-native")
    monkeypatch.setattr(decoding, "native_library", lambda: library)
    monkeypatch.setattr(profile, "SECONDS", 0.1)
    picture = tmp_path / "bars.svg"
    result = check(shards, "--profile", picture)
    assert result.code == 0, result.err
    divided = native and library.measures
    found = [line.split() for line in result.out.splitlines() if "#" in line]
    names = ["entropy", "IDCT"] if divided else ["decode"]
    assert [words[0] for words in found] == [
        *("read", "header", *names, "resize", "augment", "assemble")
    ]
    total = float(re.search(r"CPU time of one image, by \w+: ([\d.]+) ms", result.out)[1])
    assert sum(float(words[1]) for words in found) == pytest.approx(total, abs=0.01)
    largest = max(found, key=lambda words: float(words[1]))
    assert largest[3] == "#" * 30
    assert "nothing is transferred" in result.out
    assert ("decoded as a whole" in result.out) == (not native)
    assert re.search(r"^helps +\w+ is \d+%: ", result.out, re.MULTILINE)
    text = picture.read_text()
    assert text.count("<svg") == 1
    assert "bars" in result.out
