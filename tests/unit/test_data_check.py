"""`data check`: one screen that says what a data set holds and whether it feeds the GPUs."""

from __future__ import annotations

import ctypes
import io
import math
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image

from distdl.data import StoredImages
from distdl.data_check import needs, sources, throughput
from distdl.data_check.check import gpu_of_this_machine
from distdl.data_check.image_files import look
from distdl.datasets.format import MANIFEST
from distdl.util.errors import UserError
from tests.conftest import Said
from tests.prepared import flip, jpeg, prepare

Command = Callable[..., Said]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "SECONDS", 0.05)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for split, count in (("train", 4), ("val", 1)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for number in range(count + (name == "dog")):
                (root / split / name / f"{number}.jpg").write_bytes(jpeg(number, 30 + number))
    return root


def row(said: Said, word: str) -> list[str]:
    """What stands in a table's line beside a word."""
    line = next(line for line in said.out.splitlines() if line.strip().startswith(word))
    return line.split()


def test_a_folder(command: Command, folder: Path) -> None:
    said = command("data", "check", str(folder), "--gpu", "K80", "--gpus", "1")
    assert said.code == 0, said.err
    assert row(said, "train")[1:3] == ["9", "9"] and said.out.count("4 / 4 / 5") == 1
    assert row(said, "val")[1:3] == ["3", "3"] and said.out.count("1 / 1 / 2") == 1
    assert "from 38 x 30 to 42 x 34" in said.out and "none of 12\n" in said.out
    assert "53 img/s for each GPU: resnet50 on one K80" in said.out
    assert f"data=imagenet data.num_classes=2 data.root={folder}" in said.out


def test_shards_by_their_index(command: Command, tmp_path: Path) -> None:
    prepare(tmp_path / "data")
    said = command("data", "check", str(tmp_path / "data"), "--rate", "1000000")
    assert said.code == 0, said.err
    assert row(said, "train")[1:3] == ["40", "5"] and "4 / 4 / 4" in said.out
    assert "val: 3 classes have no image: class 7, class 8, class 9" in said.out
    assert "verdict  starved" in said.out and "(data.decoder=nvjpeg)" in said.out
    assert "1,000,000 img/s for each GPU: as you say" in said.out


@pytest.mark.parametrize("every", [[], ["--all"]])
def test_damage_is_named(command: Command, tmp_path: Path, folder: Path, every: list[str]) -> None:
    prepare(tmp_path / "data")
    image = (tmp_path / "data" / "train-00001.tar").read_bytes()
    # Its last bytes: what PIL still decodes differs from what was prepared all the same.
    flip(tmp_path / "data" / "train-00001.tar", image.index(jpeg(9)) + len(jpeg(9)) - 4)
    said = command("data", "check", str(tmp_path / "data"), *every)
    assert said.code == 1 and "1 of 47" in said.out
    assert "train: train-00001.tar:image_9.jpg: its bytes are not those of the index" in said.out

    (folder / "val" / "dog" / "0.jpg").write_bytes(jpeg(0)[:-40])
    (folder / "train" / "cat" / "0.jpg").write_bytes(b"words")
    said = command("data", "check", str(folder), *every)
    assert said.code == 1 and "2 of 12" in said.out
    assert "train: train/cat/0.jpg: no image" in said.out
    assert "val: val/dog/0.jpg: image file is truncated" in said.out


def test_a_sample_is_spread_and_says_that_it_is_one(command: Command, folder: Path) -> None:
    said = command("data", "check", str(folder), "--sample", "2")
    assert ("this machine has none: --gpu names" in said.out) == (gpu_of_this_machine() is None)
    assert "a sample of 4" in said.out and "none of 4 (every image: --all)" in said.out
    found = sources.find(str(folder))
    with found.reading(found.splits["train"], None) as reader:
        assert [reader.name(i) for i in (0, 8)] == ["train/cat/0.jpg", "train/dog/4.jpg"]


@pytest.mark.parametrize("every", [[], ["--all"]])
def test_a_store_is_asked_for_one_shard_or_for_all(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: list[str]
) -> None:
    """A folder stands for a store here; a real server is in tests/cluster."""
    from distdl.stores.files import FileStore

    prepare(tmp_path / "data")
    came: list[str] = []
    real = FileStore.download
    monkeypatch.setattr(sources, "is_remote", lambda uri: True)
    monkeypatch.setattr(
        FileStore, "download", lambda self, name, to: (came.append(name), real(self, name, to))[1]
    )
    said = command("data", "check", str(tmp_path / "data"), *every)
    assert said.code == 0 and "download" in said.out
    assert "img/s: the first epoch of a node goes no faster" in said.out
    assert ("all 47" if every else "a sample of 15") in said.out
    assert len(came) == (7 if every else 2)
    assert not list(Path(sources.tempfile.gettempdir()).glob("distdl-check-*/train-*"))


def test_what_is_no_data_set_is_refused(command: Command, tmp_path: Path, folder: Path) -> None:
    def refused(*arguments: str) -> str:
        said = command("data", "check", *arguments)
        assert (said.code, said.out) == (2, ""), said
        return said.err

    assert "no such folder" in refused(str(tmp_path / "none"))
    assert "an empty address" in refused("")
    assert "must hold train/<class>/" in refused(str(tmp_path))
    (tmp_path / "ILSVRC2012_img_train.tar").touch()
    assert f"prepare imagenet --source {tmp_path} --to OUT" in refused(str(tmp_path))
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "train-00000-of-01024").touch()
    assert "prepare tfrecord --source" in refused(str(tmp_path / "records"))
    (tmp_path / "half" / ".preparing").mkdir(parents=True)
    assert "was interrupted" in refused(str(tmp_path / "half"))
    assert f"{folder}/val/cat/0.jpg: is a file" in refused(str(folder / "val" / "cat" / "0.jpg"))
    assert "--smaple: is not an option" in refused(str(folder), "--smaple", "3")
    assert "did you mean: --sample" in refused(str(folder), "--smaple=3")
    assert "names no account" in refused("azure://container/data")
    assert "not understood" in refused("ftp://somewhere/data")
    assert "--gpu h100" in refused(str(folder), "--gpu", "h10")
    assert "no rate of resnext is known" in refused(str(folder), "--model", "resnext")
    assert "--sample: must be 1 or more" in refused(str(folder), "--sample", "0")
    assert "--rate: must be more than 0" in refused(str(folder), "--rate", "-1")
    shutil.rmtree(folder / "val" / "dog")
    assert "only one of the two has dog" in refused(str(folder))

    prepare(tmp_path / "data")
    whole = (tmp_path / "data" / MANIFEST).read_text()
    (tmp_path / "data" / MANIFEST).write_text(whole.replace('"class 9"', "").replace('8",', '8"'))
    fewer = "the index of 'train' holds label 9, dataset.json names 9 classes"
    assert fewer in refused(str(tmp_path / "data"))
    (tmp_path / "data" / MANIFEST).write_text(whole.replace('"samples": 40', '"samples": 39'))
    assert "holds 40 samples, dataset.json speaks of 39" in refused(str(tmp_path / "data"))
    (tmp_path / "data" / MANIFEST).write_text(whole)
    (tmp_path / "data" / "train-00001.tar").write_bytes(b"short")
    assert "train-00001.tar has 5 of" in refused(str(tmp_path / "data"))
    flip(tmp_path / "data" / "train.index.npy", 300)
    assert "train.index.npy is not the index" in refused(str(tmp_path / "data"))
    (tmp_path / "data" / MANIFEST).write_text(whole.replace('"version": 1', '"version": 2'))
    assert "by a newer distdl, as version 2\n      update distdl" in refused(str(tmp_path / "data"))
    (tmp_path / "data" / MANIFEST).write_text("{}")
    assert "is not a manifest" in (text := refused(str(tmp_path / "data")))
    assert "data.root" not in text


def test_what_is_printed_next_can_be_pasted(command: Command, folder: Path) -> None:
    spaced = folder.rename(folder.parent / "my (own) images")
    said = command("data", "check", str(spaced))
    (line,) = [line for line in said.out.splitlines() if line.startswith("next")]
    (given,) = [word for word in shlex.split(line) if word.startswith("data.root=")]
    parsed = OverridesParser.create().parse_override(given)
    assert parsed.value() == str(spaced)
    (spaced / "ILSVRC2012_img_train.tar").touch()
    (spaced / "train").rename(folder)
    assert f"--source '{spaced}' --to OUT" in command("data", "check", str(spaced)).err


def test_links_to_nowhere_are_all_damaged(command: Command, folder: Path) -> None:
    for image in folder.glob("*/*/*.jpg"):
        image.unlink()
        image.symlink_to("/nowhere")
    said = command("data", "check", str(folder), "--all")
    assert (said.code, said.err) == (1, "")
    assert "12 of 12" in said.out and "none of the images that were looked at" in said.out
    assert "train: train/cat/0.jpg: cannot be read: No such file or directory\n" in said.out


@pytest.fixture
def no_override() -> Iterator[None]:
    """Takes from root the right to read what nobody may (CAP_DAC_OVERRIDE and _READ_SEARCH)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    less = (ctypes.c_uint32 * 6)(*before)
    less[0] &= ~0b110
    assert libc.capset(header, less) == 0
    yield
    assert libc.capset(header, before) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's capabilities")
@pytest.mark.parametrize("inside", ["", "train", "train/dog"])
def test_a_folder_that_cannot_be_read_is_refused(
    command: Command, folder: Path, inside: str, no_override: None
) -> None:
    place = folder / inside
    place.chmod(0)
    said = command("data", "check", str(folder))
    refused = command("prepare", "folder", "--source", str(folder), "--to", str(folder) + "-out")
    with pytest.raises(UserError) as trained:
        StoredImages(str(folder), 2, 2, num_workers=0).setup()
    found = list(StoredImages.check({"root": str(folder)}))
    place.chmod(0o755)
    assert (said.code, said.out) == (2, "") and refused.code == 2
    assert len(found) == (inside != "train/dog")  # no check lists a million images
    for text in (said.err, refused.err, str(trained.value), *map(str, found)):
        assert "cannot be read: Permission denied" in text and str(place) in text
    assert f"  {folder}: " in said.err and "  --source: " in refused.err


def test_mean_and_std_are_those_of_the_pixels(folder: Path) -> None:
    for name in ("cat", "dog"):
        for path in (folder / "train" / name).iterdir():
            image = Image.new("RGB", (40, 20), (255, 51, 0))
            image.paste((255, 51, 255), (0, 0, 20, 20))
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            path.write_bytes(buffer.getvalue())
    found = sources.find(str(folder))
    with found.reading(found.splits["train"], None) as reader:
        mean, std = look(reader, range(9)).average()
    assert mean == pytest.approx([1, 0.2, 0.5]) and std == pytest.approx([0, 0, 0.5], abs=1e-6)


def test_a_busy_machine_is_no_slow_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    used = 0.0

    def view(data: bytes) -> dict[str, Any]:  # a hundredth of a second of CPU time
        nonlocal used
        used += float(data)
        return {"image": torch.zeros(3)}

    monkeypatch.setattr(time, "process_time", lambda: used)
    slow, fast = throughput._decode([[b"0.01"], [b"0.0025"]], view)
    assert (slow, fast) == (pytest.approx(100), pytest.approx(400))


def test_verdicts() -> None:
    wanted = needs.Need(1000, "")
    plain, small = needs.Format("as they are", 230), needs.Format("smaller", 1150, "prepare ...")
    # 1,000 img/s at 230 per core and 15 % on top are 5 cores, and one trains.
    fed = needs.judge(wanted, [plain, small], math.inf, 12, 2)
    assert fed.fed and not fed.overrides and "5 workers and the training itself, on 6" in fed.text
    starved = needs.judge(wanted, [plain, small], 1e9, 11, 2)
    assert (
        not starved.fed
        and starved.before == "prepare ..."
        and "Smaller, 2 are enough" in starved.text
    )
    assert "decode 80 % of what it trains; 6 are needed" in starved.text  # 4 whole workers
    hopeless = needs.judge(wanted, [plain, small], 1e9, 1, 1)
    assert "starved: 1 core per GPU has the training itself to do; 6 are" in hopeless.text
    nearly = needs.judge(needs.Need(801, ""), [plain], 1e9, 5, 1)
    assert not nearly.fed and "5 cores per GPU decode 99 % of" in nearly.text
    far = needs.judge(needs.Need(1e6, ""), [plain], 1e9, 5, 1)
    assert "decode less than 1 % of" in far.text
    assert hopeless.overrides == ("data.decoder=nvjpeg",)
    # A slow disk asks for more workers, and not for more cores.
    cold = needs.judge(wanted, [plain], 100, 8, 1)
    assert (
        cold.fed and cold.overrides == ("data.num_workers=15",) and "15 workers while" in cold.text
    )
    # 2.5 GFLOP scale the known rate.
    assert needs.need("resnet18", "a100", None).rate == pytest.approx(2470 * 4.09 / 1.81)


def test_shared_memory_holds_what_loaders_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = needs.shm(workers=8, gpus=2, batch=256, image_size=224)
    assert memory.needed == 2 * (8 * 2 + 1) * 256 * 3 * 224 * 224
    assert needs.Shm(memory.needed, memory.needed).fits
    assert not needs.Shm(64 << 20, memory.needed).fits  # docker's own
    assert needs.Shm(None, memory.needed).fits
