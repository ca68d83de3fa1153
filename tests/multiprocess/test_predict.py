"""task=predict: each sample's row once, at any number of ranks, after any kill."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet

from tests.conftest import UNCHECKED, distdl, status
from tests.unit.sample_data import encoded, picture

CLASSES, TRAIN, VAL = ("ant", "bee", "cat"), 3, 7
DATA = ("data=imagenet", "data.root=images", "data.num_classes=3", "data.image_size=32")
SMALL = ("model=resnet18", "data.batch_size=4", "data.num_workers=0", "trainer.accelerator=cpu")
BARE = ("tracking=none", "trainer.max_epochs=1", "schedule.warmup_epochs=0", "name=r")


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A folder of photographs, and a run that was trained on them."""
    folder = tmp_path_factory.mktemp("predict")
    for split, count in (("train", TRAIN), ("val", VAL)):
        for number, name in enumerate(CLASSES):
            (folder / "images" / split / name).mkdir(parents=True)
            for index in range(count):
                image = picture(40 + index, 36, seed=100 * number + index)
                (folder / f"images/{split}/{name}/{index}.jpg").write_bytes(encoded(image))
    done = distdl(*DATA, *SMALL, *BARE, cwd=folder, module=UNCHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def predict(project: Path, *words: str, code: int = 0) -> str:
    words = ("resume", "outputs/default/r", "task=predict", *words)
    done = distdl(*words, cwd=project, module=UNCHECKED)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def rows(project: Path, name: str) -> list[dict[str, Any]]:
    folder = project / "outputs/default/r" / name
    manifest = json.loads((folder / "manifest.json").read_text())
    assert {p["name"] for p in manifest["parts"]} | {"manifest.json"} == set(os.listdir(folder))
    return [
        row for p in manifest["parts"] for row in parquet.read_table(folder / p["name"]).to_pylist()
    ]


@pytest.fixture(scope="module")
def alone(project: Path) -> list[dict[str, Any]]:
    """The rows of one rank, in one part."""
    predict(project)
    return rows(project, "predictions")


def test_rows_are_what_the_validation_saw(project, alone) -> None:
    assert [row["name"] for row in alone] == [f"{c}/{i}.jpg" for c in CLASSES for i in range(VAL)]
    assert [row["label"] for row in alone] == [c for c in CLASSES for _ in range(VAL)]
    hits = [row["label"] == row["class_1"] for row in alone]
    metrics = status(project / "outputs/default/r")["metrics"]
    assert sum(hits) / len(hits) == pytest.approx(metrics["val/acc1"], abs=1e-6)
    for row in alone:
        chances = [row[f"probability_{place}"] for place in (1, 2, 3)]
        assert sum(chances) == pytest.approx(1, abs=1e-5) and chances == sorted(chances)[::-1]
        assert {row[f"class_{place}"] for place in (1, 2, 3)} == set(CLASSES)


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_gives_the_same_rows(project, alone, ranks) -> None:
    """21 images on three ranks are no multiple of a batch, and 4 no multiple of three."""
    name = f"task.output=on-{ranks}"
    predict(project, f"trainer.devices={ranks}", name, "task.part_samples=5", "strategy=ddp")
    near(rows(project, f"on-{ranks}"), alone)


def near(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Equal, but for the last bits of a probability, which depend on the size of a batch."""
    assert [row["name"] for row in some] == [row["name"] for row in others]
    for one, other in zip(some, others, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_killed_at_three_moments_it_loses_and_repeats_nothing(project, alone, background) -> None:
    folder = project / "outputs/default/r/killed"
    words = ("task=predict", "task.output=killed", "task.part_samples=2", "data.batch_size=2")
    command = ("resume", "outputs/default/r", *words)
    for parts in (1, 3, 6):
        started = background(*command, cwd=project, module=UNCHECKED)
        while not (folder / f"part-{parts:05d}.parquet").exists():
            assert started.process.poll() is None, started.output()
            time.sleep(0.001)
        os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()
    first = (folder / "part-00000.parquet").stat()
    predict(project, *words[1:])
    near(rows(project, "killed"), alone)
    assert (folder / "part-00000.parquet").stat().st_mtime_ns == first.st_mtime_ns
    before = sorted(os.listdir(folder))
    assert "21 in " in predict(project, *words[1:]), "a finished prediction is not repeated"
    assert sorted(os.listdir(folder)) == before


def test_other_images_in_other_formats(project, alone, tmp_path) -> None:
    """A flat folder with a damaged file: no labels, and a row that says what is wrong."""
    flat = tmp_path / "flat"
    shutil.copytree(project / "images/val/bee", flat)
    (flat / "0.jpg").write_bytes((flat / "0.jpg").read_bytes()[:300])
    printed = predict(
        project, f"task.source={flat}", "task.output=flat", "task.format=csv", "task.top_k=1"
    )
    assert "predict/damaged 1" in printed and "acc1" not in printed
    with (project / "outputs/default/r/flat/part-00000.csv").open() as file:
        damaged, *others = csv.DictReader(file)
    assert list(damaged) == ["name", "label", "class_1", "probability_1", "error"]
    assert (
        damaged["name"] == "0.jpg" and damaged["class_1"] == "" and "truncated" in damaged["error"]
    )
    expected = {row["name"]: row["class_1"] for row in alone if row["label"] == "bee"}
    assert {f"bee/{row['name']}": row["class_1"] for row in others} == {
        name: found for name, found in expected.items() if name != "bee/0.jpg"
    }


def test_a_prepared_data_set(project, alone, tmp_path) -> None:
    done = distdl(
        "prepare", "folder", "--source", "images", "--to", str(tmp_path / "out"), cwd=project
    )
    assert done.returncode == 0, done.stderr
    predict(project, f"task.source={tmp_path / 'out'}", "task.output=shards", "task.format=jsonl")
    text = (project / "outputs/default/r/shards/part-00000.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    assert sorted((r["label"], r["class_1"]) for r in found) == sorted(
        (r["label"], r["class_1"]) for r in alone
    )


REFUSED = {
    "other rows": (["task.top_k=2"], "holds rows of another top_k: 5, not 2"),
    "other files": (["task.output=checkpoints"], "holds other files"),
    "no source": (["task.source=/nothing/here"], "task.source: "),
    "no image": (["task.source=outputs/default/r/attempts"], "holds no image"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(project, alone, words, message) -> None:
    before = sorted(p for p in (project / "outputs/default/r/checkpoints").iterdir())
    assert message in predict(project, *words, code=2)
    assert before == sorted(p for p in (project / "outputs/default/r/checkpoints").iterdir())


def test_damage_to_a_part_is_noticed(project, alone) -> None:
    predict(project, "task.output=cut", "task.part_samples=8")
    folder = project / "outputs/default/r/cut"
    part = folder / "part-00001.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    assert "part-00001.parquet is not what was written" in predict(
        project, "task.output=cut", "task.part_samples=8", code=2
    )


MINE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

class Data(LightningDataModule):
    def predict_dataloader(self):
        return DataLoader(TensorDataset(torch.arange(7.0)), 2)

class Doubles(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def predict_step(self, batch, batch_idx):
        return {"double": 2 * batch[0], "pair": torch.stack([batch[0], -batch[0]], 1)}
"""


def test_any_module_with_a_predict_step(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    words = (
        "model._target_=mine.Doubles",
        "data._target_=mine.Data",
        "optimizer=null",
        "schedule=null",
    )
    words += (
        "task=predict",
        "task.checkpoint=none",
        "trainer.accelerator=cpu",
        "trainer.devices=2",
    )
    done = distdl("model=null", "data=null", *words, "tracking=none", "name=m", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (part,) = (tmp_path / "outputs/default/m/predictions").glob("part-*.parquet")
    table = parquet.read_table(part).to_pydict()
    numbers = [float(i) for i in range(7)]
    assert table == {
        "index": [*range(7)],
        "double": [2 * n for n in numbers],
        "pair": [[n, -n] for n in numbers],
    }
