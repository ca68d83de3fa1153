"""task=predict: each sample's row once, at any number of ranks, after any kill."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from pyarrow import parquet

from distdl.data.encoded import MOST_IN_A_ROW
from distdl.tasks.prediction_rows import Rows
from distdl.util.errors import UserError
from tests import prepared
from tests.conftest import DISTDL, UNCHECKED, distdl, status
from tests.unit import test_stores
from tests.unit.sample_data import write_photographs

small_disk, s3 = prepared.small_disk, test_stores.s3  # fixtures

CLASSES, TRAIN, VAL = ("ant", "bee", "cat"), 3, 7
DATA = ("data=imagenet", "data.root=images", "data.num_classes=3", "data.image_size=32")
SMALL = ("model=resnet18", "data.batch_size=4", "data.num_workers=0", "trainer.accelerator=cpu")
BARE = ("tracking=none", "trainer.max_epochs=1", "schedule.warmup_epochs=0", "name=r")
RUN = Path("outputs/default/r")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder of photographs, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("predict")
    write_photographs(folder / "images", CLASSES, train=TRAIN, val=VAL)
    done = distdl(*DATA, *SMALL, *BARE, cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def predict(project: Path, *words: str, code: int = 0, module: tuple[str, ...] = UNCHECKED) -> str:
    """What the command prints; on one rank, if `words` say nothing else."""
    words = ("resume", str(RUN), "task=predict", "trainer.devices=1", *words)
    done = distdl(*words, cwd=project, module=module)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(project: Path, name: str) -> list[dict[str, Any]]:
    """The rows, as pandas and Spark read them: the folder as one table."""
    folder = project / RUN / name
    manifest = json.loads((folder / "_manifest.json").read_text())
    assert sorted(os.listdir(folder)) == ["_manifest.json", *manifest["parts"]]
    found = parquet.read_table(folder).to_pylist()
    assert len(found) == manifest["rows"]
    return found


@pytest.fixture(scope="module")
def alone(project: Path) -> list[dict[str, Any]]:
    """The rows of one rank, in one part."""
    predict(project)
    return rows(project, "predictions")


def test_rows_are_what_the_validation_saw(project, alone) -> None:
    assert [row["name"] for row in alone] == [f"{c}/{i}.jpg" for c in CLASSES for i in range(VAL)]
    assert [row["label"] for row in alone] == [c for c in CLASSES for _ in range(VAL)]
    hits = [row["label"] == row["class_1"] for row in alone]
    metrics = status(project / RUN)["metrics"]
    assert sum(hits) / len(hits) == pytest.approx(metrics["val/acc1"], abs=1e-6)
    printed = status(project / RUN, 2)["metrics"]
    assert (printed["predict/acc1"], printed["predict/damaged"]) == (sum(hits) / len(hits), 0)
    for row in alone:
        chances = [row[f"probability_{place}"] for place in (1, 2, 3)]
        assert sum(chances) == pytest.approx(1, abs=1e-5) and chances == sorted(chances)[::-1]
        assert {row[f"class_{place}"] for place in (1, 2, 3)} == set(CLASSES)


def near(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Equal, but for the last bits of a probability, which depend on the size of a batch."""
    assert [row["name"] for row in some] == [row["name"] for row in others]
    for one, other in zip(some, others, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_gives_the_same_rows(project, alone, ranks) -> None:
    """21 images on three ranks are no multiple of a batch, and 4 no multiple of three."""
    words = (f"trainer.devices={ranks}", f"task.output=on-{ranks}", "strategy=ddp")
    predict(project, *words, "task.part_samples=5")
    near(rows(project, f"on-{ranks}"), alone)


# Ends this process when a file gets its name: {0} is the file's name, {1} the number of a part.
KILLED = """
import os, signal
from pathlib import Path
replace = os.replace
def replaced(temporary, path):
    part = Path(path).with_name("part-0000{1}.parquet")
    if Path(path).name == {0!r}.format({1}) and (part.exists() or {0!r} != "_progress.json"):
        {2}
        os.kill(os.getpid(), signal.SIGKILL)
    replace(temporary, path)
os.replace = replaced
"""
HALF = "os.truncate(temporary, os.path.getsize(temporary) // 2)"
MOMENTS = {
    "in the middle of the first part": ("part-0000{}.parquet", 0, HALF),
    "after a part, before it is recorded": ("_progress.json", 2, ""),
    "after it is recorded": ("_progress.json", 4, "replace(temporary, path)"),
}


def test_killed_at_three_moments_it_loses_and_repeats_nothing(project, alone) -> None:
    folder, stored = project / RUN / "killed", dict[str, Any]()
    words = ("task.output=killed", "task.part_samples=2", "data.batch_size=2")
    for moment, recorded in zip(MOMENTS.values(), (0, 2, 5), strict=True):
        code = KILLED.format(*moment) + UNCHECKED[1]
        predict(project, *words, code=-9, module=("-c", code))
        parts = json.loads((folder / "_progress.json").read_text())["parts"]
        assert len(parts) == recorded and not (folder / "_manifest.json").exists()
        stored |= {name: (folder / name).stat().st_mtime_ns for name in parts}
    predict(project, *words)
    near(rows(project, "killed"), alone)
    assert stored == {name: (folder / name).stat().st_mtime_ns for name in stored}
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "21 of 21" in predict(project, *words), "a finished prediction is not repeated"
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_full_disk_tears_nothing(project, alone, small_disk) -> None:
    (project / RUN / "full").symlink_to(small_disk)
    filler = small_disk / ".filler"
    with filler.open("wb", buffering=0) as file:
        size = sum(iter(lambda: _written(file), 0))
        file.truncate(size - (32 << 10))
    words = ("task.output=full", "task.part_samples=2", "data.batch_size=2")
    printed = predict(project, *words, code=2, module=UNCHECKED)
    assert "task.output: cannot write" in printed and "No space left on device" in printed
    assert "Traceback" not in printed
    left = {path.name for path in small_disk.iterdir()} - {".filler", "_progress.json"}
    parts = json.loads((small_disk / "_progress.json").read_text())["parts"]
    assert 0 < len(parts) < 10 and {*parts} <= left
    filler.unlink()
    predict(project, *words)
    near(rows(project, "full"), alone)


def _written(file: Any) -> int:
    try:
        return file.write(bytes(4096))
    except OSError:
        return 0


def test_asked_to_end_it_stores_what_it_has(project, alone) -> None:
    """And resumes on another number of ranks."""
    code = """
from distdl.tasks.predict import Collector
before = Collector.on_predict_batch_end
def then(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
    if batch_idx == 10:
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
    before(self, trainer, module, outputs, batch, batch_idx)
Collector.on_predict_batch_end = then
"""
    words = ("task.output=ended", "data.batch_size=1")
    printed = predict(project, *words, code=75, module=("-c", code + UNCHECKED[1]))
    assert "task=predict trainer.devices=1 task.output=ended data.batch_size=1\n" in printed
    (part,) = (project / RUN / "ended").glob("part-*")
    first = part.stat().st_mtime_ns
    assert parquet.read_table(part).num_rows == 11
    predict(project, *words, "trainer.devices=2", "strategy=ddp")
    near(rows(project, "ended"), alone)
    assert part.stat().st_mtime_ns == first


def test_other_images_in_other_formats(project, alone, tmp_path) -> None:
    """A flat folder with a damaged file: no labels, and a row that says what is wrong."""
    flat = tmp_path / "flat"
    shutil.copytree(project / "images/val/bee", flat)
    (flat / "0.jpg").write_bytes((flat / "0.jpg").read_bytes()[:300])
    words = (f"data.root={flat}", "task.output=flat", "task.format=csv", "task.top_k=1")
    predict(project, *words, module=DISTDL)
    with (project / RUN / "flat/part-00000.csv").open() as file:
        damaged, *others = csv.DictReader(file)
    assert list(damaged) == ["name", "label", "class_1", "probability_1", "error"]
    assert (damaged["name"], damaged["class_1"]) == ("0.jpg", "")
    assert "truncated" in damaged["error"].lower()
    expected = {row["name"]: row["class_1"] for row in alone if row["label"] == "bee"}
    predicted = {f"bee/{row['name']}": row["class_1"] for row in others}
    assert expected == {"bee/0.jpg": expected["bee/0.jpg"], **predicted}
    other = shutil.copytree(flat, tmp_path / "other")  # the same names
    (flat / "8.jpg").write_bytes((flat / "1.jpg").read_bytes())
    for root in (flat, other):
        printed = predict(project, f"data.root={root}", *words[1:], code=2)
        assert "holds rows of data 7 samples" in printed


def test_a_prepared_data_set(project, alone, tmp_path) -> None:
    to = tmp_path / "out"
    done = distdl("prepare", "folder", "--source", "images", "--to", str(to), cwd=project)
    assert done.returncode == 0, done.stderr
    predict(project, f"data.root={to}", "task.output=shards", "task.format=jsonl")
    text = (project / RUN / "shards/part-00000.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert sorted((r["label"], r["class_1"]) for r in found) == sorted(
        (r["label"], r["class_1"]) for r in alone
    )


def test_a_bucket(project, alone, s3) -> None:
    """One that holds the images, and one that is not there."""
    box, words = boto3.client("s3"), ("data.root=s3://box/mine", "task.output=bucket")
    for path in sorted((project / "images/val").rglob("*.jpg")):
        box.upload_file(str(path), "box", f"mine/{path.relative_to(project / 'images/val')}")
    predict(project, *words)
    near(rows(project, "bucket"), alone)
    printed = predict(project, "data.root=s3://nobox/mine", "task.output=no", code=2)
    assert "distdl: data.root: s3://nobox/mine" in printed and "Traceback" not in printed


def test_images_of_which_all_or_none_are_damaged_in_a_part(project, tmp_path) -> None:
    """All parts have columns of the same types, so that they can be read as one table."""
    flat = tmp_path / "flat"
    flat.mkdir()
    bad = MOST_IN_A_ROW + 1  # a training would end
    for index in range(bad):
        (flat / f"0{index}.jpg").write_bytes(b"\xff\xd8no image")
    for index in range(3):
        shutil.copy(project / f"images/val/ant/{index}.jpg", flat / f"{index + 3}.jpg")
    (flat / "zoo").mkdir()
    shutil.copy(flat / "3.jpg", flat / "zoo/0.jpg")  # the only one with a label
    (flat / os.fsdecode(b"\xff.jpg")).write_bytes(b"")
    words = (f"data.root={flat}", "task.output=mixed", "task.part_samples=3")
    predict(project, *words, "task.checkpoint=none", "data.batch_size=3")
    found = rows(project, "mixed")
    assert [bool(row["error"]) for row in found] == [True] * bad + [False] * 4 + [True]
    assert [row["label"] for row in found] == [None] * (bad + 3) + ["zoo", None]
    assert [row["class_1"] is None for row in found] == [bool(row["error"]) for row in found]
    assert found[-1]["name"] == "\\xff.jpg"
    assert {row["class_1"] for row in found} <= {"0", "1", "2", None}, "no checkpoint names them"


REFUSED = {
    "other rows": (["task.top_k=2"], "holds rows of top_k 5, not 2"),
    "other files": (["task.output=checkpoints"], "holds other files"),
    "a file": (["task.output=config.yaml"], "Not a directory"),
    "no image": ([f"data.root={RUN}/attempts", "task.output=none"], "holds no image"),
    "no folder": (
        ["data.root=nowhere", "task.output=none"],
        "data.root: no such folder: nowhere",
    ),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(project, alone, words, message) -> None:
    def listed() -> dict[Path, int]:
        folders = (project / RUN / name for name in ("checkpoints", "predictions"))
        return {path: path.stat().st_mtime_ns for f in folders for path in f.iterdir()}

    before = listed()
    assert message in predict(project, *words, code=2)
    assert before == listed()


DAMAGE = {
    "no JSON": ('{"parts"', "it is not JSON"),
    "a list": ("[]", ""),
    "no number": ('{"rows": "x"}', "rows"),
}


@pytest.mark.parametrize(("text", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_noticed(tmp_path, text, message) -> None:
    stored = Rows(tmp_path / "rows", "parquet")
    stored.describe("1 samples")
    stored.add({"name": np.array(["0"], dtype=object)}, {})
    stored.finish()
    (tmp_path / "rows/_manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"_manifest\.json: is damaged: ") as refused:
        Rows(tmp_path / "rows", "parquet").open()
    assert message in str(refused.value)


MINE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Data(LightningDataModule):
    def predict_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(7.0)), 2, drop_last=True)

class Doubles(LightningModule):
    def __init__(self, wrong=False):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.wrong = wrong
    def predict_step(self, batch, batch_idx):
        if self.wrong:
            return torch.zeros(5)
        half = batch[0].to(torch.bfloat16)
        return {"double": 2 * half, "pair": torch.stack([batch[0], -batch[0]], 1)}
"""
OWN = ("+model._target_=mine.Doubles", "+data._target_=mine.Data", "optimizer=none")
OWN += ("schedule=none", "task=predict", "task.checkpoint=none", "trainer.accelerator=cpu")
OWN += ("tracking=none", "name=m")


@pytest.mark.parametrize("ranks", [1, 2])
def test_any_module_with_a_predict_step(tmp_path, ranks) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = distdl("~model", "~data", *OWN, f"trainer.devices={ranks}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = (tmp_path / "outputs/default/m/predictions").glob("part-*.parquet")
    numbers = [float(i) for i in range(7)]
    assert parquet.read_table(part).to_pydict() == {
        "index": [*range(7)],
        "double": [2 * n for n in numbers],
        "pair": [[n, -n] for n in numbers],
    }


WRONG = {
    "an output of another length": (
        ["+model.wrong=true"],
        ["model: predict_step did not return tensors of 2 rows, one for each sample"],
    ),
    "arguments": (
        ["task.format=xlsx", "task.part_samples=0"],
        ["task.format: must be", "task.part_samples: must be an integer of at least 1, not 0"],
    ),
    "a folder outside the run": (
        ["task.output=../x"],
        ["task.output: '../x' leads out of the folder"],
    ),
    "an absolute folder": (["task.output=/x"], ["task.output: '/x' is absolute"]),
}


@pytest.mark.parametrize(("words", "messages"), WRONG.values(), ids=WRONG)
def test_wrong_words(tmp_path, words, messages) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    done = distdl("~model", "~data", *OWN, *words, cwd=tmp_path)
    printed = done.stdout + done.stderr
    assert done.returncode == 2 and "Traceback" not in printed, printed
    assert [message for message in messages if message not in printed] == [], printed
