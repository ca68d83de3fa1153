"""A row for each detection, and COCO's result JSON of them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from distdl.domains.detection.categories import Categories
from distdl.domains.detection.detections import Detections, decoded, encoded
from distdl.domains.detection.rows import DetectionRows, PredictedObjects
from distdl.domains.rows import Predicted
from distdl.tasks.prediction_rows import Rows
from tests.prepared import refusal

CATEGORIES = Categories((1, 18), ("disc", "dog, small"))


def found(*labels):
    count = len(labels)
    masks = torch.zeros(count, 1, 6, 8)
    for row in range(count):
        masks[row, 0, : row + 2, 1:5] = 0.9
    corners = torch.tensor([[1.1, 0.2, 5.3, 2.7]] * count).reshape(-1, 4)
    return Detections(corners, torch.tensor(labels), torch.rand(count), encoded(masks))


ONE = np.array([0])


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
def test_a_row_for_each_detection_and_cocos_result_json(form, tmp_path):
    torch.manual_seed(0)
    images = [found(1, 2), found(), found(2), found(1)]
    rows = DetectionRows(named=True)
    columns = rows.of_batch(PredictedObjects(images, CATEGORIES), 4)
    samples = Predicted(
        np.arange(4),
        np.array(["a.jpg", "b.jpg", "broken.jpg", "d.jpg"], dtype=object),
        {"image_id": np.array([7, 8, 9, 10])},
        np.array(["", "", "is no image", ""], dtype=object),
    )
    table = rows.table(columns, samples)
    assert table.counts == {"samples": 4, "detections": 3, "damaged": 1}
    stored = Rows(tmp_path / "rows", form)
    stored.open()
    stored.describe("4 samples")
    stored.add(table.columns, table.missing, **table.counts)
    assert Rows(tmp_path / "rows", form).open() == 4  # a resume goes on behind all four
    read = [*stored.read()]
    assert [row["name"] for row in read] == ["a.jpg", "a.jpg", "broken.jpg", "d.jpg"]
    assert [row["category"] for row in read][:2] == ["disc", "dog, small"]
    assert [row["error"] in (None, "") for row in read] == [True, True, False, True]
    assert read[2]["score"] in (None, "")
    files = ["coco_bbox.json", "coco_segm.json"]
    assert rows.finish(stored.folder, stored.read, stored.columns) == files
    boxes = json.loads((stored.folder / "coco_bbox.json").read_text())
    results = images[0].results(7, CATEGORIES) + images[3].results(10, CATEGORIES)
    expected = [{k: v for k, v in each.items() if k != "segmentation"} for each in results]
    assert boxes == expected  # to the bit
    masks = json.loads((stored.folder / "coco_segm.json").read_text())
    assert [each["segmentation"] for each in masks] == [each["segmentation"] for each in results]
    assert decoded([masks[1]["segmentation"]])[0, :3, 1:5].all()
    assert rows.metrics(table.counts, 4) == {"predict/damaged": 1.0, "predict/detections": 3.0}


def test_nothing_found_and_images_without_ids(tmp_path):
    rows = DetectionRows(named=False)
    columns = rows.of_batch(PredictedObjects([found(), found(1)], CATEGORIES), 2)
    table = rows.table(columns, Predicted(np.array([3, 5])))
    assert table.columns["index"].tolist() == [5]
    empty = rows.table({"found": columns["found"][:1]}, Predicted(np.array([3])))
    assert all(len(column) == 0 for column in empty.columns.values())
    assert empty.counts["samples"] == 1
    stored = Rows(tmp_path / "rows", "parquet")
    stored.open()
    stored.add(table.columns, table.missing, **table.counts)
    assert rows.finish(stored.folder, stored.read, stored.columns) == []


@pytest.mark.parametrize("form", ["parquet", "csv", "jsonl"])
@pytest.mark.parametrize("error", ["", "is no image"])
def test_nothing_found_is_an_empty_list_of_each_kind(error, form, tmp_path):
    """COCO's program and its server take no missing file. Also behind an interruption, where this
    process has seen no image."""
    rows = DetectionRows(named=True)
    columns = rows.of_batch(PredictedObjects([found()], CATEGORIES), 1)
    names = np.array(["a.jpg"], dtype=object)
    known = {"image_id": np.array([7])}
    errors = np.array([error], dtype=object)
    table = rows.table(columns, Predicted(np.array([0]), names, known, errors))
    before = Rows(tmp_path / "rows", form)
    before.open()
    before.describe("1 sample")
    before.add(table.columns, table.missing, **table.counts)
    stored = Rows(tmp_path / "rows", form)
    stored.open()
    files = DetectionRows(named=True).finish(stored.folder, stored.read, stored.columns)
    assert files == ["coco_bbox.json", "coco_segm.json"]
    assert [json.loads((stored.folder / name).read_text()) for name in files] == [[], []]


def test_a_part_without_rows_is_still_of_its_checkpoint(tmp_path):
    rows = DetectionRows(named=False)
    table = rows.table(rows.of_batch(PredictedObjects([found()], CATEGORIES), 1), Predicted(ONE))
    stored = Rows(tmp_path / "rows", "parquet", checkpoint="one")
    stored.open()
    stored.describe("2 samples")
    stored.add(table.columns, table.missing, **table.counts)
    other = Rows(tmp_path / "rows", "parquet", checkpoint="another")
    assert other.open() == 1
    assert "rows of checkpoint one, not another" in refusal(other.describe, "2 samples").what


def test_keypoints_have_a_list_in_each_row():
    points = torch.rand(2, 17, 3)
    image = Detections(
        torch.rand(2, 4), torch.tensor([1, 1]), torch.rand(2), None, keypoints=points
    )
    rows = DetectionRows(named=False)
    columns = rows.of_batch(PredictedObjects([image], CATEGORIES), 1)
    table = rows.table(columns, Predicted(np.array([0])))
    assert table.columns["keypoints"].shape == (2, 51)
    assert np.allclose(table.columns["keypoints"][1], points[1].flatten())
    assert "mask" not in table.columns
