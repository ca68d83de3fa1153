"""A classifier's most confident mistakes and its confusion matrix, at any number of ranks."""

import io

import pytest
import torch
from PIL import Image

from distdl.distributed import process_group
from distdl.domains.classification import drawing
from distdl.domains.classification.drawing import MISTAKES, Mistakes
from distdl.domains.drawing import matrix_image

CPU = torch.device("cpu")
CLASSES = 4
SAMPLES = 60


def batches(rank, ranks):
    """Logits of this rank's share of the samples, and a last filler of sample 0."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    mine = torch.arange(rank, SAMPLES, ranks)
    for index in (*mine.split(7), torch.zeros(1, dtype=torch.int64)):
        weight = torch.full((len(index),), float(len(index) > 1))
        batch = {"index": index, "label": labels[index], "weight": weight}
        yield batch, logits[index]


def drawn(monkeypatch, ranks):
    """What rank 0 of so many ranks has gathered."""
    each = [Mistakes() for _ in range(ranks)]
    for rank, mistakes in enumerate(each):
        mistakes.start(CPU)
        for batch, logits in batches(rank, ranks):
            mistakes.add(batch, logits)
    monkeypatch.setattr(process_group, "gather", lambda value: [one.found.tolist() for one in each])
    each[0].gather(lambda tensor: sum(one.confusion for one in each))
    return each[0]


@pytest.fixture(scope="module")
def truth():
    """Of all samples in one batch: the mistakes, most confident first, and the matrix."""
    (whole,) = [pair for pair in batches_of_all() if len(pair[0]["index"]) > 1]
    batch, logits = whole
    probability, said = logits.softmax(1).max(1)
    wrong = [n for n in range(SAMPLES) if said[n] != batch["label"][n]]
    wrong.sort(key=lambda n: -probability[n])
    counts = [[0] * CLASSES for _ in range(CLASSES)]
    for n in range(SAMPLES):
        counts[batch["label"][n]][said[n]] += 1
    return wrong[:MISTAKES], counts


def batches_of_all():
    parts = [*batches(0, 1)][:-1]
    fields = {key: torch.cat([part[0][key] for part in parts]) for key in parts[0][0]}
    yield fields, torch.cat([part[1] for part in parts])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_counts_once_at_any_number_of_ranks(ranks, truth, monkeypatch):
    mistakes = drawn(monkeypatch, ranks)
    assert [one.sample for one in mistakes.mistakes] == truth[0]
    assert mistakes.counts == truth[1]
    assert sum(map(sum, mistakes.counts)) == SAMPLES, "the filler counts for nothing"


def photograph(index):
    buffer = io.BytesIO()
    Image.new("RGB", (600, 300), (index, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue(), f"dog/{index}.png"


def test_mistakes_are_shown_with_what_was_said_and_what_is_true(truth, monkeypatch):
    mistakes = drawn(monkeypatch, 2)
    gone, damaged = truth[0][:2]

    def image_of(index):
        if index == gone:
            return None
        return (b"cut off", "x") if index == damaged else photograph(index)

    names = ["cat", "dog", "<b>", "owl"]
    shown, matrix = mistakes.sections(image_of, names)
    assert len(shown.images) == MISTAKES - 2
    first = mistakes.mistakes[2]
    assert shown.images[0].caption == (
        f"{names[first.said]} {100 * first.probability:.1f} %, but it is {names[first.label]} "
        f"(dog/{first.sample}.png)"
    )
    assert shown.images[0].image.size == (256, 128)
    assert not matrix.images[0].photograph
    # Without names that fit, and of data that cannot be shown again.
    (only,) = mistakes.sections(None, ["one"])
    assert only.title == matrix.title


def test_data_without_an_index_and_many_classes_are_not_drawn(monkeypatch):
    mistakes = Mistakes()
    mistakes.start(CPU)
    monkeypatch.setattr(drawing, "MOST_CLASSES", CLASSES - 1)
    mistakes.add((torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])), torch.eye(2, CLASSES))
    mistakes.gather(lambda tensor: tensor)
    assert mistakes.sections(photograph, []) == []


def test_a_diverged_network_has_no_most_confident_mistake():
    mistakes = Mistakes()
    mistakes.start(CPU)
    batch = {"index": torch.arange(3), "label": torch.zeros(3, dtype=torch.int64)}
    logits = torch.tensor([[torch.nan, 0.0], [0.0, 9.0], [9.0, 0.0]])
    mistakes.add(batch, logits)
    mistakes.gather(lambda tensor: tensor)
    assert [one.sample for one in mistakes.mistakes] == [1]


def test_a_matrix_is_dark_where_a_row_has_its_samples():
    image = matrix_image(["a", "a very long name of a class, cut"], [[30, 0], [1, 2]])
    width, height = image.size
    assert width == height < 400
    cells = [image.getpixel((width - 8 - 22 * (2 - n) + 2, height - 28 - 22)) for n in range(2)]
    assert cells[0] != (255, 255, 255)
    assert cells[1] == (255, 255, 255)
