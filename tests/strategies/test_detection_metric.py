"""COCO's numbers on 1, 2 and 3 ranks, and by COCO's own program on the JSON that was written."""

import contextlib
import io
import json

import numpy as np
import pytest
import torch

from distdl.domains.detection import metric
from distdl.domains.detection.categories import Categories
from distdl.domains.detection.detections import Detections, encoded, plain
from distdl.util.errors import UserError
from tests import drawn_coco
from tests.strategies.ranks import Case, shared

# The files of this folder share the ranks. COCO's own program is older than the NumPy here.
pytestmark = [
    pytest.mark.xdist_group("strategies"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

HERE = "tests.strategies.test_detection_metric"
NAMES = [*drawn_coco.CATEGORIES.values()]
CATEGORIES = Categories(tuple(drawn_coco.CATEGORIES), tuple(NAMES))
DISCS = Categories((1,), ("disc",))
IMAGES = 37  # which neither 2 nor 3 divides


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A drawn set, and by the name of a file what a detector might find in it."""
    root = drawn_coco.draw(
        tmp_path_factory.mktemp("coco"), train=0, val=IMAGES, seed=3, keypoints=True
    )
    for name in ("instances", "person_keypoints"):
        content = json.loads((root / f"annotations/{name}_val2017.json").read_text())
        found = guesses(content, points=name != "instances")
        (root / f"{name}.json").write_text(json.dumps(found))
    return root


def guesses(content, points):
    """For each image boxes near the true ones and elsewhere, with masks or points: many scores are
    equal, some classes wrong."""
    from pycocotools.coco import COCO

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = content
        coco.createIndex()
    rng = np.random.default_rng(5)
    found = {}
    for image in content["images"]:
        rows = []
        for each in coco.imgToAnns[image["id"]]:
            for _ in range(int(rng.integers(0, 4))):
                x, y, w, h = each["bbox"] + rng.normal(0, 2, 4)
                corners = [max(x, 0), max(y, 0), max(x + w, x + 1, 1), max(y + h, y + 1, 1)]
                row = {"box": corners, "score": round(float(rng.random()), 1)}
                row["label"] = 1 + int(rng.integers(len(coco.cats)))
                if rng.random() < 0.8:
                    row["label"] = 1 + sorted(coco.cats).index(each["category_id"])
                if points:
                    moved = np.array(each["keypoints"], dtype=float).reshape(-1, 3)
                    moved[:, :2] += rng.normal(0, 1.5, (len(moved), 2))
                    row["points"] = moved.tolist()
                else:
                    mask = np.roll(coco.annToMask(each), int(rng.integers(-2, 3)), axis=1)
                    row["mask"] = plain(encoded(torch.from_numpy(mask)[None])[0])
                rows.append(row)
        found[image["id"]] = rows
    return found


def detections(rows, points=False):
    boxes = torch.tensor([row["box"] for row in rows], dtype=torch.float32).reshape(-1, 4)
    labels = torch.tensor([row["label"] for row in rows], dtype=torch.int64)
    scores = torch.tensor([row["score"] for row in rows])
    if points:
        seen = torch.tensor([row["points"] for row in rows], dtype=torch.float32)
        return Detections(boxes, labels, scores, keypoints=seen)
    return Detections(boxes, labels, scores, masks=[row["mask"] for row in rows])


def evaluate(folder, name, times="1"):
    """Called on every rank: image i belongs to rank i modulo their number."""
    from distdl.distributed import pieces, process_group

    pieces.LEAST = pieces.ROOM = 1000  # many pieces
    content = json.loads((folder / f"annotations/{name}_val2017.json").read_text())
    found = json.loads((folder / f"{name}.json").read_text())
    categories = CATEGORIES if name == "instances" else DISCS
    collected = metric.CocoMetric(categories)
    world = process_group.world_size()
    rank = 0
    if world > 1:
        rank = torch.distributed.get_rank()
    results = []
    for number, image in reversed([*enumerate(content["images"])]):
        truth = [each for each in content["annotations"] if each["image_id"] == image["id"]]
        ours = detections(found[str(image["id"])], points=name != "instances")
        results += ours.results(image["id"], categories)
        for _ in range(int(times) if number % world == rank else 0):
            collected.add(
                {
                    "image": [torch.empty(3, image["height"], image["width"], device="meta")] * 2,
                    "target": [{"image_id": image["id"], "annotations": truth}, {"image_id": 1}],
                    "weight": torch.tensor([1.0, 0.0]),
                },
                [ours, ours],
            )
    evaluation = collected.evaluate()
    if rank == 0:
        (folder / f"results_{name}.json").write_text(json.dumps(results))
    return {"numbers": evaluation.numbers, "categories": evaluation.categories}


def cocos(root, name, kind, results, ids=None):
    """The numbers of COCO's own program."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    named = ("image_id", "category_id", "score", metric.FIELDS[kind])
    kept = [{k: v for k, v in each.items() if k in named} for each in results]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(root / f"annotations/{name}_val2017.json"))
        program = COCOeval(truth, truth.loadRes(kept), kind)
        if ids:
            program.params.catIds = ids
        program.evaluate()
        program.accumulate()
        program.summarize()
    return program.stats.tolist()


@pytest.mark.parametrize("name", ["instances", "person_keypoints"])
def test_equal_on_any_ranks_and_to_cocos_own_program(name, drawn):
    call = f"{HERE}:evaluate"
    alone = evaluate(drawn, name)["numbers"]
    for size in (2, 3):
        seen = shared(size).train(Case([name], drawn, call=call))
        for rank in seen.ranks:
            assert rank["numbers"] == pytest.approx(alone, abs=1e-9)
    results = json.loads((drawn / f"results_{name}.json").read_text())
    scores = [each["score"] for each in results]
    assert len({*scores}) < len(scores) / 3  # ties
    kinds = ("bbox", "segm") if name == "instances" else ("keypoints",)
    for kind in kinds:
        numbers = metric.NUMBERS_OF_KEYPOINTS if kind == "keypoints" else metric.NUMBERS
        ours = [alone[f"{metric.KINDS[kind]}_{each}"] for each in numbers]
        assert ours == pytest.approx(cocos(drawn, name, kind, results), abs=1e-9)
        assert 0.05 < ours[0] < 0.95
    assert alone["samples"] == IMAGES


def test_each_category_has_the_numbers_of_an_evaluation_of_it_alone(drawn):
    seen = evaluate(drawn, "instances")
    results = json.loads((drawn / "results_instances.json").read_text())
    for category in seen["categories"]:
        for kind, prefix in (("bbox", "box"), ("segm", "mask")):
            expected = cocos(drawn, "instances", kind, results, [category["id"]])[:3]
            ours = [category[f"{prefix}_{name}"] for name in ("ap", "ap50", "ap75")]
            assert ours == pytest.approx(expected, abs=1e-9)
    assert [each["name"] for each in seen["categories"]] == NAMES


def test_an_image_that_comes_twice_counts_once(drawn):
    assert evaluate(drawn, "instances", times="2")["numbers"] == pytest.approx(
        evaluate(drawn, "instances")["numbers"], abs=0
    )
    nothing = detections([])
    both = metric.CocoMetric(CATEGORIES)
    both.add_image(7, (4, 4), [], nothing)
    both.add_image(7, (4, 4), [{"category_id": 1, "bbox": [0, 0, 2, 2]}], nothing)
    with pytest.raises(UserError, match="two images of the validation data have the id 7"):
        both.evaluate()


def test_nothing_found_and_nothing_there():
    empty = metric.CocoMetric(CATEGORIES)
    assert empty.evaluate().numbers == {"samples": 0.0}
    mask = [[0, 0, 2, 0, 2, 2]]
    truth = [{"category_id": 1, "bbox": [0, 0, 2, 2], "area": 4, "segmentation": mask}]
    empty.add_image(1, (4, 4), truth, detections([]))
    numbers = empty.evaluate().numbers
    assert numbers["box_ap"] == numbers["mask_ap"] == 0
    assert numbers["box_ap_large"] == -1
    empty.add_image(2, (4, 4), [], detections([]))  # forgets what was evaluated
    assert empty.evaluate().numbers["box_ap"] == -1


def test_truth_without_masks_is_refused_on_every_rank(tmp_path):
    shared(2).train(Case([], tmp_path, call=f"{HERE}:refused"))


def refused(folder):
    collected = metric.CocoMetric(CATEGORIES)
    truth = [{"id": 12, "category_id": 1, "bbox": [0, 0, 2, 2], "area": 4.0}]
    collected.add_image(torch.distributed.get_rank(), (4, 4), truth, detections([]))
    with pytest.raises(UserError, match="annotation 12: it has no segmentation"):
        collected.evaluate()


def test_truth_made_of_tensors_is_that_of_the_json(drawn):
    from pycocotools.coco import COCO

    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(drawn / "annotations/instances_val2017.json"))
    image = next(i for i, each in coco.imgToAnns.items() if any(a["iscrowd"] for a in each))
    source = coco.imgToAnns[image]
    boxes = torch.tensor([each["bbox"] for each in source])
    boxes[:, 2:] += boxes[:, :2]
    target = {
        "boxes": boxes,
        "labels": torch.tensor([CATEGORIES.labels[each["category_id"]] for each in source]),
        "masks": torch.stack([torch.from_numpy(coco.annToMask(each)) for each in source]),
        "area": torch.tensor([each["area"] for each in source]),
        "iscrowd": torch.tensor([each["iscrowd"] for each in source]),
    }
    for made, each in zip(metric.truth_of(target, CATEGORIES), source, strict=True):
        assert made["category_id"] == each["category_id"]
        assert made["iscrowd"] == each["iscrowd"]
        assert made["bbox"] == pytest.approx(each["bbox"], abs=1e-4)
        assert made["area"] == each["area"]
        assert (coco.annToMask({**each, **made}) == coco.annToMask(each)).all()


def test_keypoints_without_sigmas_are_refused():
    with pytest.raises(UserError, match="5 keypoints, and 17 sigmas"):
        metric.refuse_unknown_sigmas(5, None)
    metric.refuse_unknown_sigmas(5, [0.1] * 5)
