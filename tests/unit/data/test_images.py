"""Damaged images: the next intact one takes their place, and each is counted and listed."""

from __future__ import annotations

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from distdl.callbacks import Progress, StepMetrics
from distdl.config.recipe import CHANGEABLE
from distdl.data.images import ImageData
from distdl.data.keyed import KeyedDataset
from distdl.data.sampling import SampleKey
from tests.prepared import quiet_trainer, refusal
from tests.unit.sample_data import BROKEN, GREY, PLAIN, Listed, classifier, share

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@pytest.mark.parametrize(
    ("files", "repaired", "index", "label", "damaged"),
    [
        ([PLAIN, BROKEN, BROKEN, GREY], None, 1, 3, "file 1: "),
        ([PLAIN, BROKEN], None, 1, 0, "file 1: "),  # past the end is the beginning
        ([BROKEN, GREY], PLAIN, 0, 0, ""),
        ([BROKEN, GREY], BROKEN, 0, 1, "file 0: "),
    ],
)
def test_the_next_intact_image_replaces_a_damaged_one(files, repaired, index, label, damaged):
    sample = Listed(files, repaired=repaired)[index]
    assert (sample["label"], sample["weight"]) == (label, not damaged)
    assert sample["damaged"][:8] == damaged
    shown = repaired if repaired and label == index else files[label]
    assert torch.equal(sample["image"], Listed([shown])[0]["image"])
    many = refusal(Listed([BROKEN] * 50).__getitem__, 0)
    assert "20 images in a row cannot be decoded, from file 0" in many.what


def test_a_filler_stays_one():
    dataset = KeyedDataset(Listed([PLAIN, BROKEN]), 0, with_weight=True)
    samples = [dataset[SampleKey(*key)] for key in ((0, 0, 1.0), (1, 0, 1.0), (0, 0, 0.0))]
    assert [(s["weight"], s["index"]) for s in samples] == [(1, 0), (0, 1), (0, 0)]


def test_the_list_of_damaged_images_holds_each_once(tmp_path, caplog):
    file = tmp_path / "logs/damaged-rank0.txt"
    for _ in range(2):  # two attempts
        damaged = ["", "a.jpg: cut\noff", "a.jpg: cut\noff", "b.jpg: no image"]
        ImageData(2, 0).damage.note(damaged, file)
    assert file.read_text() == "a.jpg: cut off\nb.jpg: no image\n"
    ImageData(2, 0).damage.note(["c.jpg: cut off"], file / "not a folder" / "file")
    assert "not a folder" in caplog.text, "a list that cannot be written ends nothing"


def test_damage_can_end_the_run():
    data = ImageData(2, 0, on_damaged="error")
    dataset = Listed([PLAIN, BROKEN])
    data.on_before_batch_transfer(dataset.collate([dataset[0]]), 0)
    for batch, advice in (
        (dataset.collate([dataset[0], dataset[1]]), "replace or remove it"),
        ({"damaged": ["/data/val-00000.tar:a.jpg: cut off"]}, "copy or prepare its shard again"),
    ):
        problem = refusal(data.on_before_batch_transfer, batch, 0)
        assert problem.path == "data.root"
        assert "cannot decode " in problem.what
        assert problem.remedy.startswith(advice)
        assert problem.remedy.endswith("on_damaged=skip")
    assert "data.on_damaged" in CHANGEABLE  # so a resume can


class Images(ImageData):
    def train_dataloader(self):
        return self.loader(Listed([PLAIN, BROKEN, PLAIN, PLAIN, BROKEN, PLAIN]), shuffle=True)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("after, hints", [(0, 1), (600, 0)])
def test_a_training_counts_damage_and_advises_once(tmp_path, caplog, monkeypatch, after, hints):
    """Not in its first seconds, in which workers start."""
    monkeypatch.setattr("distdl.callbacks.progress.HINT_AFTER", after)
    monkeypatch.setattr("distdl.callbacks.progress.DATA_WAIT_LIMIT", 0)
    logger = CSVLogger(tmp_path)
    watched = {"logger": logger, "callbacks": [StepMetrics(2), Progress(bar=False)]}
    trainer = quiet_trainer(tmp_path, max_epochs=3, log_every_n_steps=1, **watched)
    module = classifier()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), 0.1)
    trainer.fit(module, datamodule=share(Images(2, 0)))
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        logged = [row["data/damaged"] for row in csv.DictReader(file) if row["data/damaged"]]
    assert logged == ["2.0"] * 3
    names = sorted((tmp_path / "logs/damaged-rank0.txt").read_text().splitlines())
    assert [name.split(":")[0] for name in names] == ["file 1", "file 4"]
    assert caplog.text.count("file 1: ") == 1 == caplog.text.count("file 4: ")
    assert caplog.text.count("2 damaged images were left out") == 3
    advice = "of the time is spent waiting for data: data.num_workers="
    assert caplog.text.count(advice) == hints
