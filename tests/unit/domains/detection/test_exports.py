"""When the objects of a written model are those of its network."""

from dataclasses import replace

import torch

from distdl.domains.detection.detections import Detections, encoded
from distdl.domains.detection.exports import POINTS, compared, objects_of

THRESHOLD = 0.05


def found(*rows, masks=None):
    """Of rows of a label, a score and a box."""
    labels, scores, boxes = zip(*rows, strict=True) if rows else ((), (), ())
    return Detections(
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor(scores, dtype=torch.float32),
        None if masks is None else encoded(masks),
    )


CAT = (1, 0.9, [0.0, 0.0, 10.0, 10.0])
DOG = (2, 0.5, [20.0, 0.0, 30.0, 10.0])
WORST = (2, THRESHOLD, [40.0, 0.0, 50.0, 10.0])


def test_the_order_does_not_count_and_differences_are_measured():
    moved = (2, 0.5002, [20.0, 0.0, 30.0, 10.02])
    result = compared(found(moved, CAT), found(CAT, DOG), 2.0, THRESHOLD)
    assert (result.matched, result.alone, result.masks) == (2, 0, 0)
    assert abs(result.box - 0.01) < 1e-5  # 0.02 pixels of the image, of which two are one there
    assert abs(result.score - 2e-4) < 1e-6


def test_what_is_on_one_side_alone_counts_unless_a_rounding_may_have_decided():
    assert compared(found(CAT), found(CAT, DOG), 1.0, THRESHOLD).alone == 1
    assert compared(found(CAT, DOG), found(CAT), 1.0, THRESHOLD).alone == 1
    assert compared(found(CAT), found(CAT, WORST), 1.0, THRESHOLD).alone == 0
    assert compared(found(), found(), 1.0, THRESHOLD).matched == 0
    other_class = (1, *DOG[1:])
    assert compared(found(CAT, other_class), found(CAT, DOG), 1.0, THRESHOLD).alone == 2


def test_masks_must_cover_each_other():
    whole = torch.zeros(1, 40, 40)
    whole[:, :20, :20] = 1.0
    nearly = whole.clone()
    nearly[0, 0, 0] = 0.0
    other = whole.clone()
    other[:, :10] = 0.0
    pairs = {"same": whole, "nearly": nearly, "other": other}
    differs = {
        name: compared(found(CAT, masks=mask), found(CAT, masks=whole), 1.0, THRESHOLD).masks
        for name, mask in pairs.items()
    }
    assert differs == {"same": 0, "nearly": 0, "other": 1}


def test_an_answer_says_what_was_found():
    said = {"category_id": 90, "category": "ring", "score": 0.5, "bbox": [1.0, 2.0, 3.0, 4.0]}
    answer = {"width": 9, "height": 8, "detections": [said]}
    seen = objects_of(answer, {90: 2})
    assert seen.detections.boxes.tolist() == [[1.0, 2.0, 4.0, 6.0]]
    assert seen.detections.labels.tolist() == [2]
    assert objects_of({**answer, "detections": []}, {90: 2}).detections.boxes.shape == (0, 4)


def test_keypoints_must_be_at_the_same_places():
    places = torch.tensor([[[1.0, 2.0, 1.0], [5.0, 5.0, 1.0]]])
    differs = {}
    for moved in (0.0, 0.9, 1.1):
        pair = [replace(found(CAT), keypoints=each) for each in (places + moved, places)]
        in_a_graph = compared(*pair, 1.0, THRESHOLD, POINTS["onnx"]).points
        differs[moved] = (compared(*pair, 1.0, THRESHOLD).points, in_a_graph)
    assert differs == {0.0: (0, 0), 0.9: (1, 0), 1.1: (1, 1)}
    assert compared(found(CAT), pair[1], 1.0, THRESHOLD).points == 1
