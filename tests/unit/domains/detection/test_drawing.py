"""The images of a detector that are shown, at any number of ranks, and what is drawn of them."""

import io

import pytest
import torch
from PIL import Image

from distdl.distributed import process_group
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.detections import Detections
from distdl.domains.detection.domain import Detection
from distdl.domains.detection.drawing import SHOWN, Scenes, f1_of
from distdl.domains.detection.metric import CocoMetric, Evaluation

CPU = torch.device("cpu")
CATEGORIES = Categories((3, 18), ("car", "dog"))
SAMPLES = 30


def boxes(*rows):
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 4)


def detections(found, labels, scores=None):
    scores = torch.full((len(found),), 0.9) if scores is None else torch.tensor(scores)
    return Detections(found, torch.tensor(labels, dtype=torch.int64), scores)


BOX = (0, 0, 10, 10)
NEAR = (0, 0, 10, 8)
FAR = (20, 20, 30, 30)
CASES = [
    ([], [], [], [], 1.0),
    ([BOX], [1], [], [], 0.0),
    ([], [], [BOX], [1], 0.0),
    ([BOX], [1], [NEAR], [1], 1.0),
    ([BOX], [1], [NEAR], [2], 0.0),  # of another class
    ([BOX], [1], [NEAR, BOX], [1, 1], 2 / 3),  # one object is found once
    ([BOX, FAR], [1, 2], [FAR], [2], 2 / 3),
]


@pytest.mark.parametrize(("true", "labels", "found", "said", "expected"), CASES)
def test_f1_of_an_image(true, labels, found, said, expected):
    arguments = (boxes(*true), torch.tensor(labels), boxes(*found), torch.tensor(said))
    assert f1_of(*arguments) == pytest.approx(expected)


def scene(number):
    """An image with `number % 5` objects, of which some are found, and a crowd."""
    count = number % 5
    true = boxes(*[(12 * n, 0, 12 * n + 10, 10) for n in range(count)], (0, 40, 60, 60))
    target = {
        "boxes": true,
        "labels": torch.tensor([1 + n % 2 for n in range(count)] + [1]),
        "iscrowd": torch.tensor([0] * count + [1]),
    }
    hits = true[: (number * 7) % (count + 1)]
    found = detections(torch.cat((hits, boxes(FAR))), [1 + n % 2 for n in range(len(hits) + 1)])
    return target, found


def drawn(ranks, monkeypatch):
    each = [Scenes(CocoMetric(CATEGORIES)) for _ in range(ranks)]
    for rank, scenes in enumerate(each):
        scenes.start(CPU)
        # The last row is a filler of the rank's first image.
        mine = [*range(rank, SAMPLES, ranks), rank]
        for place, number in enumerate(mine):
            target, found = scene(number)
            batch = {
                "image": [torch.zeros(3, 64, 64, dtype=torch.uint8)],
                "target": [target],
                "index": torch.tensor([number]),
                "weight": torch.tensor([float(place < len(mine) - 1)]),
            }
            scenes.add(batch, [found])
    own = [[s for kept in one.chosen.values() for s in kept] for one in each]
    monkeypatch.setattr(process_group, "gather", lambda value: own)
    each[0].gather(lambda tensor: tensor)
    return each[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_images_are_chosen_at_any_number_of_ranks(ranks, monkeypatch):
    alone = drawn(1, monkeypatch).chosen
    chosen = drawn(ranks, monkeypatch).chosen
    assert chosen == alone
    assert all(len(scenes) == SHOWN for scenes in alone.values())
    assert {one.objects for one in alone["Most crowded images"]} == {4}, "without crowds"
    worst = max(one.f1 for one in alone["Worst images"])
    assert worst < min(one.f1 for one in alone["Best images"])


def photograph(index):
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), (9, 9, 9)).save(buffer, "PNG")
    return buffer.getvalue(), f"{index}.png"


def test_images_and_the_metrics_tables_and_curves_are_shown(monkeypatch):
    metric = CocoMetric(CATEGORIES)
    scenes = Detection(CATEGORIES).drawing(metric)
    scenes.start(CPU)
    target = {"boxes": boxes((8, 8, 40, 40)), "labels": torch.tensor([2])}
    target["masks"] = torch.zeros(1, 64, 64, dtype=torch.uint8)
    target["masks"][0, 8:40, 8:40] = 1
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    found = detections(boxes((8, 8, 40, 40), (0, 0, 5, 5)), [2, 1], scores=[0.8, 0.2])
    scenes.add({"image": [image], "target": [target], "index": torch.tensor([5])}, [found])
    monkeypatch.setattr(process_group, "gather", lambda value: [value])
    scenes.gather(lambda tensor: tensor)
    of_categories = [
        {"id": 3, "name": "car", "box_ap": -1.0},
        {"id": 18, "name": "dog", "box_ap": 0.5},
    ]
    metric.latest = Evaluation({"box_ap": 0.5}, of_categories, {"box": [1.0, 0.5]})
    best, _, _, curves, table = scenes.sections(photograph, ["car", "dog"])
    assert best.images[0].caption == "5.png: 1 true, 1 found, F1\N{NO-BREAK SPACE}1.00", (
        "an unsure one counts not"
    )
    assert "None of them" not in best.note
    # Twice the larger image: on the left the true object, filled; on the right its box alone.
    pixels = best.images[0].image
    assert pixels.size == (2 * 256 + 4, 256)
    inside = (100, 120)
    assert pixels.getpixel(inside) != (9, 9, 9)
    assert pixels.getpixel((260 + inside[0], inside[1])) == (9, 9, 9), "it has no mask"
    assert pixels.getpixel((260 + 33, 100)) != (9, 9, 9), "the left side of the box"
    assert curves.curves == {"box": [(0.0, 1.0), (0.01, 0.5)]}
    assert table.rows == [["car", "3", "-"], ["dog", "18", "0.500"]]
    scenes.start(CPU)
    wrong = detections(boxes((50, 50, 60, 60)), [2])
    scenes.add({"image": [image], "target": [target], "index": torch.tensor([5])}, [wrong])
    scenes.gather(lambda tensor: tensor)
    best, worst, *_ = scenes.sections(photograph, ["car", "dog"])
    assert best.note.endswith("None of them is right in any image.")
    assert best.images[0].caption.endswith("0.00")
    assert "None of them" not in worst.note
