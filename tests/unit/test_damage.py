"""Damaged images: replaced, repaired, reported once, or the end of the run."""

from __future__ import annotations

import csv

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.loggers import CSVLogger

from distdl.callbacks import Progress, StepMetrics
from distdl.callbacks.progress import remedy
from distdl.config.recipe import CHANGEABLE
from distdl.data.images import ImageData
from distdl.data.loading import KeyedDataset
from distdl.data.sampling import SampleKey
from distdl.util.errors import UserError
from tests.prepared import quiet_trainer
from tests.unit.sample_data import BROKEN, GREY, PLAIN, Listed, classifier, share


@pytest.mark.parametrize(
    ("files", "repaired", "index", "label", "weight", "damaged"),
    [
        ([PLAIN, BROKEN], None, 0, 0, 1, ""),
        ([PLAIN, BROKEN, BROKEN, GREY], None, 1, 3, 0, "file 1: "),
        ([PLAIN, BROKEN], None, 1, 0, 0, "file 1: "),  # past the end is the beginning
        ([BROKEN, GREY], PLAIN, 0, 0, 1, ""),
        ([BROKEN, GREY], BROKEN, 0, 1, 0, "file 0: "),
    ],
    ids=["intact", "next", "wraps", "repaired", "unrepaired"],
)
def test_the_next_intact_image_replaces_a_damaged_one(
    files, repaired, index, label, weight, damaged
):
    sample = Listed(files, repaired=repaired)[index]
    assert (sample["label"], sample["weight"]) == (label, weight)
    assert sample["damaged"][:8] == damaged
    shown = repaired if repaired and label == index else files[label]
    assert torch.equal(sample["image"], Listed([shown])[0]["image"])


def test_many_in_a_row_are_refused():
    with pytest.raises(UserError, match="20 images in a row cannot be decoded, from file 0"):
        Listed([BROKEN] * 50)[0]


def test_a_filler_stays_one():
    dataset = KeyedDataset(Listed([PLAIN, BROKEN]), 0, with_weight=True)
    samples = [dataset[SampleKey(*key)] for key in ((0, 0, 1.0), (1, 0, 1.0), (0, 0, 0.0))]
    assert [(s["weight"], s["index"]) for s in samples] == [(1, 0), (0, 1), (0, 0)]


def batch_of(*files):
    dataset = Listed(files)
    return dataset.collate([dataset[i] for i in range(len(files))])


def test_batches_are_channels_last_and_report_damage_once(caplog):
    data, batch = ImageData(2, 0), batch_of(PLAIN, BROKEN, GREY)
    assert batch["image"].shape == (3, 3, 16, 16)
    assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        seen = data.on_before_batch_transfer(batch, 0)
        assert "damaged" not in seen and seen["weight"].tolist() == [1, 0, 1]
    assert data.damage.in_epoch == 2 and caplog.text.count("file 1: ") == 1


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
    data.on_before_batch_transfer(batch_of(PLAIN), 0)
    for batch, advice in (
        (batch_of(PLAIN, BROKEN), "replace or remove it"),
        ({"damaged": ["/data/val-00000.tar:a.jpg: cut off"]}, "copy or prepare its shard again"),
    ):
        with pytest.raises(UserError, match="cannot decode ") as error:
            data.on_before_batch_transfer(batch, 0)
        (problem,) = error.value.problems
        assert problem.path == "data.root" and problem.remedy.startswith(advice)
        assert problem.remedy.endswith("data.on_damaged=skip")
    assert "data.on_damaged" in CHANGEABLE  # so a resume can


class Theirs(LightningDataModule):
    def __init__(self, num_workers=1):
        super().__init__()
        self.save_hyperparameters()


def test_waiting_for_data_names_the_numbers(monkeypatch):
    monkeypatch.setattr("distdl.callbacks.progress.default_workers", lambda: 8)
    assert remedy(ImageData(2, 3)).startswith("data.num_workers=8 uses")
    assert "--short-side 256" in remedy(ImageData(2, 8)) and "nvjpeg" in remedy(ImageData(2, 8))
    assert remedy(object()).startswith("num_workers=8 of its DataLoader uses")
    assert remedy(Theirs()).startswith("data.num_workers=8 uses this process's CPU cores (now 1)")


class Images(ImageData):
    def train_dataloader(self):
        return self.loader(Listed([PLAIN, BROKEN, PLAIN, PLAIN, BROKEN, PLAIN]), shuffle=True)


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("hint_after, limit, hints", [(0, 0, 1), (600, 0, 0), (0, 1, 0)])
def test_a_training_counts_damage_and_advises_once(
    tmp_path, caplog, monkeypatch, hint_after, limit, hints
):
    """Not in its first seconds, in which workers start."""
    monkeypatch.setattr("distdl.callbacks.progress.HINT_AFTER", hint_after)
    monkeypatch.setattr("distdl.callbacks.progress.DATA_WAIT_LIMIT", limit)
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
