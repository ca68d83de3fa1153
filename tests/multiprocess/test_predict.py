"""task=predict: each sample's row once, at any number of ranks, after any kill."""

import csv
import json
import os
import re
import shutil
from pathlib import Path

import boto3
import pytest
from pyarrow import parquet

from distdl.data.encoded import MOST_IN_A_ROW
from tests import aws
from tests.conftest import DISTDL, NETWORK, UNCHECKED, distdl, status
from tests.unit.sample_data import write_photographs

moto, s3 = aws.moto, aws.s3  # fixtures

CLASSES = ("ant", "bee", "cat")
TRAIN = 3
VAL = 7
DATA = ("data=imagenet", "data.root=images", "data.num_classes=3", "data.image_size=32")
SMALL = (*NETWORK, "data.batch_size=4", "data.num_workers=0", "trainer.accelerator=cpu")
BARE = ("tracking=none", "trainer.max_epochs=1", "schedule.warmup_epochs=0", "name=r")
RUN = Path("outputs/default/r")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder of photographs, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("predict")
    write_photographs(folder / "images", CLASSES, train=TRAIN, val=VAL)
    done = distdl(*DATA, *SMALL, *BARE, cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def predict(project, *words, code=0, module=UNCHECKED):
    """What the command prints; on one rank, if `words` say nothing else."""
    words = ("resume", str(RUN), "task=predict", "trainer.devices=1", *words)
    done = distdl(*words, cwd=project, module=module)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(project, name):
    """The rows, as pandas and Spark read them: the folder as one table."""
    folder = project / RUN / name
    manifest = json.loads((folder / "_manifest.json").read_text())
    assert sorted(os.listdir(folder)) == ["_manifest.json", *manifest["parts"]]
    found = parquet.read_table(folder).to_pylist()
    assert len(found) == manifest["rows"]
    return found


@pytest.fixture(scope="module")
def alone(project):
    """The rows of one rank, in one part."""
    predict(project)
    return rows(project, "predictions")


def test_rows_are_what_the_validation_saw(project, alone):
    assert [row["name"] for row in alone] == [f"{c}/{i}.jpg" for c in CLASSES for i in range(VAL)]
    assert [row["label"] for row in alone] == [c for c in CLASSES for _ in range(VAL)]
    hits = [row["label"] == row["class_1"] for row in alone]
    metrics = status(project / RUN)["metrics"]
    assert re.fullmatch(r"\w{12}-\w{12}", status(project / RUN)["data"]), "for comparisons"
    assert sum(hits) / len(hits) == pytest.approx(metrics["val/acc1"], abs=1e-6)
    printed = status(project / RUN, 2)["metrics"]
    assert (printed["predict/acc1"], printed["predict/damaged"]) == (sum(hits) / len(hits), 0)
    for row in alone:
        chances = [row[f"probability_{place}"] for place in (1, 2, 3)]
        assert sum(chances) == pytest.approx(1, abs=1e-5)
        assert chances == sorted(chances)[::-1]
        assert {row[f"class_{place}"] for place in (1, 2, 3)} == set(CLASSES)


def near(some, others):
    """Equal, but for the last bits of a probability, which depend on the size of a batch."""
    assert [row["name"] for row in some] == [row["name"] for row in others]
    for one, other in zip(some, others, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


# When a file gets its name: {0} is the file's name, {1} the number of a part, {2} what happens.
AT_NAMING = """
import os, signal
from pathlib import Path
replace = os.replace
def replaced(temporary, path):
    part = Path(path).with_name("part-0000{1}.parquet")
    if Path(path).name == {0!r}.format({1}) and (part.exists() or {0!r} != "_progress.json"):
        {2}
    replace(temporary, path)
os.replace = replaced
"""
HALF = "os.truncate(temporary, os.path.getsize(temporary) // 2)"
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
FULL = "raise OSError(28, 'No space left on device')"
# In the middle of the first part; after a part, before it is recorded; the disk is full.
MOMENTS = [
    ("part-0000{}.parquet", 0, f"{HALF}; {KILL}"),
    ("_progress.json", 2, KILL),
    ("part-0000{}.parquet", 4, FULL),
]


def test_whatever_ends_it_it_loses_and_repeats_nothing(project, alone):
    folder = project / RUN / "killed"
    stored = {}
    words = ("task.output=killed", "task.part_samples=2", "data.batch_size=2")
    for moment, recorded, code in zip(MOMENTS, (0, 2, 4), (-9, -9, 2), strict=True):
        module = ("-c", AT_NAMING.format(*moment) + UNCHECKED[1])
        printed = predict(project, *words, code=code, module=module)
        parts = json.loads((folder / "_progress.json").read_text())["parts"]
        assert len(parts) == recorded
        assert not (folder / "_manifest.json").exists()
        stored |= {name: (folder / name).stat().st_mtime_ns for name in parts}
    assert "task.output: cannot write" in printed
    assert "No space left on device" in printed
    assert "Traceback" not in printed
    predict(project, *words)
    near(rows(project, "killed"), alone)
    assert stored == {name: (folder / name).stat().st_mtime_ns for name in stored}
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "21 of 21" in predict(project, *words), "a finished prediction is not repeated"
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


ENDED = """
from distdl.tasks.predict import Collector
before = Collector.on_predict_batch_end
def then(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
    if batch_idx == 10:
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
    before(self, trainer, module, outputs, batch, batch_idx)
Collector.on_predict_batch_end = then
"""


def test_asked_to_end_it_stores_what_it_has(project, alone):
    """And resumes on another number of ranks: ten images are no multiple of three, nor of a part's
    four."""
    words = ("task.output=ended", "data.batch_size=1")
    printed = predict(project, *words, code=75, module=("-c", ENDED + UNCHECKED[1]))
    assert "task=predict trainer.devices=1 task.output=ended data.batch_size=1\n" in printed
    (part,) = (project / RUN / "ended").glob("part-*")
    first = part.stat().st_mtime_ns
    assert parquet.read_table(part).num_rows == 11
    predict(project, *words, "trainer.devices=3", "strategy=ddp", "task.part_samples=4")
    near(rows(project, "ended"), alone)
    assert len([*part.parent.glob("part-*")]) > 2
    assert part.stat().st_mtime_ns == first


def test_a_prepared_data_set_as_json(project, alone, tmp_path):
    to = tmp_path / "out"
    done = distdl("prepare", "folder", "--source", "images", "--to", str(to), cwd=project)
    assert done.returncode == 0, done.stderr
    predict(project, f"data.root={to}", "task.output=shards", "task.format=jsonl")
    text = (project / RUN / "shards/part-00000.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    answers = [sorted((r["label"], r["class_1"]) for r in each) for each in (found, alone)]
    assert answers[0] == answers[1]


def test_a_bucket(project, alone, s3):
    """One that holds the images, and one that is not there."""
    box = boto3.client("s3")
    words = ("data.root=s3://box/mine", "task.output=bucket")
    for path in sorted((project / "images/val").rglob("*.jpg")):
        box.upload_file(str(path), "box", f"mine/{path.relative_to(project / 'images/val')}")
    predict(project, *words)
    near(rows(project, "bucket"), alone)
    printed = predict(project, "data.root=s3://nobox/mine", "task.output=no", code=2)
    assert "distdl: data.root: s3://nobox/mine" in printed
    assert "Traceback" not in printed


def test_images_of_which_all_or_none_are_damaged_in_a_part(project, tmp_path):
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


def test_csv_and_what_is_refused(project, alone, tmp_path):
    """Images without labels are predicted into CSV. Then six folders are refused, as something else
    is in them, and keep their files."""
    flat = shutil.copytree(project / "images/val/bee", tmp_path / "flat")
    words = (f"data.root={flat}", "task.output=flat", "task.format=csv", "task.top_k=1")
    predict(project, *words, "data.max_pixels=60000000", module=DISTDL)  # what it accepts, too
    with (project / RUN / "flat/part-00000.csv").open() as file:
        found = list(csv.DictReader(file))
    assert list(found[0]) == ["name", "label", "class_1", "probability_1", "error"]
    predicted = {f"bee/{row['name']}": row["class_1"] for row in found}
    assert predicted == {row["name"]: row["class_1"] for row in alone if row["label"] == "bee"}

    def listed():
        """When each file was written."""
        files = []
        for name in ("checkpoints", "predictions", "flat"):
            files += (project / RUN / name).iterdir()
        return {file: file.stat().st_mtime_ns for file in files}

    other = shutil.copytree(flat, tmp_path / "other")  # the same names
    before = listed()
    torn = project / RUN / "torn"
    torn.mkdir()
    (torn / "_manifest.json").write_text('{"rows": "x"}')
    for refused, message in (
        ([f"data.root={other}", *words[1:]], "holds rows of data 7 samples"),
        (["task.top_k=2"], "holds rows of top_k 5, not 2"),
        (["task.output=checkpoints"], "holds other files"),
        (["task.output=torn"], "_manifest.json: is damaged: "),
        (["task.output=../x"], "task.output: '../x' leads out of the folder"),
        ([f"data.root={RUN}/attempts", "task.output=none"], "holds no image"),
    ):
        assert message in predict(project, *refused, code=2, module=DISTDL)
    assert before == listed()


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
OWN = (
    "~model",
    "~data",
    "+model._target_=mine.Doubles",
    "+data._target_=mine.Data",
    "optimizer=none",
    "schedule=none",
    "task=predict",
    "task.checkpoint=none",
    "tracking=none",
    "trainer.accelerator=cpu",
)


def test_any_module_with_a_predict_step_on_two_ranks(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    done = distdl(*OWN, "trainer.devices=2", "name=m", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = (tmp_path / "outputs/default/m/predictions").glob("part-*.parquet")
    numbers = [float(i) for i in range(7)]
    assert parquet.read_table(part).to_pydict() == {
        "index": [*range(7)],
        "double": [2 * n for n in numbers],
        "pair": [[n, -n] for n in numbers],
    }
    done = distdl(*OWN, "+model.wrong=true", "name=w", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    assert "predict_step returned a tensor of shape [5] for 2 samples" in done.stderr
