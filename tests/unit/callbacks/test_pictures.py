"""What a validation looks like: files in the run, on the report's page, in MLflow's outbox."""

import base64
import json
import re

import pytest
from lightning.pytorch import Trainer
from torch import nn

from distdl.callbacks.pictures import Pictures
from distdl.data import SyntheticJpegs
from distdl.data.loading import distribute
from distdl.data.sampling import TrainPosition
from distdl.models import ImageClassifier
from distdl.tools.report import pictures


@pytest.fixture
def run(tmp_path):
    """A run whose second attempt has validated a classifier that has learnt nothing."""
    data = SyntheticJpegs(
        4, 3, 16, train_samples=12, val_samples=11, width=40, height=30, kilobytes=2, num_workers=0
    )
    distribute(data, rank=0, world_size=1, seed=0, position=TrainPosition())
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    module = ImageClassifier(network, num_classes=3, channels_last=False)
    attempt = tmp_path / "attempts/002"
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[Pictures(tmp_path, attempt)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["val/acc1"] < 1, "there is a mistake"
    return tmp_path


def test_an_evaluation_is_drawn_into_its_attempt_and_shown_by_the_report(run):
    folder = run / "attempts/002/pictures"
    contents = json.loads((folder / "pictures.json").read_text())
    listed = [image["file"] for section in contents["sections"] for image in section["images"]]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*listed, "pictures.json"])
    assert "confusion.png" in listed
    mistakes, matrix = pictures.drawn(run)
    assert mistakes.title == "Most confident mistakes (attempt 002, validate)"
    assert len(mistakes.images) == len(listed) - 1 > 0
    caption = r"\d [\d.]+ %, but it is \d \(generated image \d+\)"
    assert all(re.fullmatch(caption, image.caption) for image in mistakes.images)
    kind, content = matrix.images[0].address.split(";base64,")
    assert kind == "data:image/png"
    assert base64.b64decode(content) == (folder / "confusion.png").read_bytes()


def test_the_report_shows_nothing_that_is_no_small_image_of_the_run(run):
    folder = run / "attempts/002/pictures"
    for path in folder.glob("*.jpg"):
        path.write_text("<svg onload=alert(1)>")
    secret = run.parent / f"{run.name}-secret.png"
    secret.write_bytes((folder / "confusion.png").read_bytes())
    (folder / "confusion.png").unlink()
    (folder / "confusion.png").symlink_to(secret)
    shown = pictures.drawn(run)
    assert [part.images for part in shown] == [[], []]
    assert all("missing or damaged" in part.note for part in shown)
    hostile = {"title": 1, "images": [{"file": "../../config.yaml"}, 7], "rows": "x", "curves": 1}
    (folder / "pictures.json").write_text(json.dumps({"sections": [hostile, 3, None]}))
    assert [part.images for part in pictures.drawn(run)] == [[], [], []]
    (folder / "pictures.json").write_text("{")
    assert pictures.drawn(run) == []


def test_curves_and_tables_of_any_domain_are_shown(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    section = {
        "title": "Precision",
        "head": ["category", "AP"],
        "rows": [["dog", "0.5"], ["cut off"]],
        "axes": ["recall", "precision"],
        "curves": {"dog": [[0, 1], [1, 0.5], ["x", None]]},
    }
    (folder / "pictures.json").write_text(json.dumps({"epoch": 3, "sections": [section]}))
    (part,) = pictures.drawn(tmp_path)
    assert part.title == "Precision (epoch 4)"
    assert part.rows == [["dog", "0.5"]]
    assert part.curves is not None
    assert "recall" in part.curves.svg
    assert [label for label, _ in part.curves.legend] == ["dog"]
