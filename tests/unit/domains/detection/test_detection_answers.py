"""What a detector answers for an image, and how images fit a network of one size."""

import io

import pytest
import torch
from PIL import Image

from distdl.domains.detection.detection_answers import DetectionAnswers, fitted, unfitted

SAID = {"categories": [{"id": 3, "name": "cat"}, {"id": 90, "name": "ring"}]}
ONE_SIZE = {**SAID, "size": [64, 96], "fill": [1, 2, 3], "fields": ["boxes", "labels", "scores"]}


def photo(width, height):
    memory = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(memory, "PNG")
    return memory.getvalue()


def network(**more):
    """Finds two objects in every image."""
    found = {
        "boxes": torch.tensor([[1.0, 2.0, 5.0, 10.0], [0.0, 0.0, 64.0, 32.0]]),
        "labels": torch.tensor([2, 1]),
        "scores": torch.tensor([0.25, 0.75]),
        **more,
    }
    return lambda image: found


def test_an_answer_has_cocos_ids_and_names():
    answers = DetectionAnswers(SAID)
    (found,) = answers.found(network(), [answers.seen(photo(40, 30))])
    said = answers.answer(found, None)
    assert (said["width"], said["height"]) == (40, 30)
    first = {"category": "ring", "category_id": 90, "score": 0.25, "bbox": [1.0, 2.0, 4.0, 8.0]}
    assert said["detections"][0] == first
    (best,) = answers.answer(found, 1)["detections"]
    assert best["category"] == "cat"
    with pytest.raises(ValueError, match="gives the label 7, and has 2 categories"):
        answers.found(network(labels=torch.tensor([1, 7])), [answers.example()])


@pytest.mark.parametrize(("width", "height"), [(192, 128), (48, 64), (300, 30), (1, 200)])
def test_an_image_is_scaled_to_fit_and_what_was_found_is_scaled_back(width, height):
    image = torch.full((3, height, width), 200, dtype=torch.uint8)
    seen = fitted(image, [64, 96], [1, 2, 3])
    down, across = seen.scaled
    assert seen.pixels.shape == (3, 64, 96)
    assert down == 64 or across == 96
    assert (seen.pixels[:, :down, :across] == 200).all()
    assert (seen.pixels[:, down:].float().mean((1, 2)).nan_to_num(2) - 2).abs().max() <= 1
    mask = torch.zeros(1, 1, 64, 96)
    mask[..., :down, :across] = 1.0
    # The whole image, and more: what lies in the padding is cut.
    boxes = torch.tensor([[0.0, 0.0, 96.0, 64.0]])
    found = unfitted({"boxes": boxes, "masks": mask}, seen)
    assert found["boxes"].tolist() == [[0.0, 0.0, width, height]]
    assert found["masks"].shape == (1, 1, height, width)
    assert found["masks"].all()


def test_a_graph_that_gives_other_shapes_than_it_says_is_refused():
    answers = DetectionAnswers(ONE_SIZE)
    assert answers.takes() == (3, 64, 96)
    seen = answers.seen(photo(96, 64))
    (found,) = answers.found(network(), [seen])
    assert answers.answer(found, None)["detections"][1]["bbox"] == [0.0, 0.0, 64.0, 32.0]
    with pytest.raises(ValueError, match="boxes of the shape"):
        answers.found(network(boxes=torch.zeros(2, 5)), [seen])
    with pytest.raises(ValueError, match="does not begin with boxes"):
        DetectionAnswers({**ONE_SIZE, "fields": ["scores", "boxes", "labels"]})


def test_what_else_a_network_gives_is_not_looked_at():
    """torchvision's keypoint detectors give a score of each keypoint, too."""
    said = {**ONE_SIZE, "fields": [*ONE_SIZE["fields"], "keypoints"], "keypoints": 17}
    answers = DetectionAnswers(said)
    image = answers.seen(photo(40, 30))
    found = {"keypoints": torch.ones(2, 17, 3), "keypoints_scores": torch.ones(2, 17)}
    answers.found(network(**found), [image])
    for other in ({}, {"keypoints": torch.ones(2, 5, 3)}):
        with pytest.raises(ValueError, match="the network gives keypoints of the shape"):
            answers.found(network(**other), [image])
