"""What people look at of a classifier: its most confident mistakes, and what it confuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from distdl.datasets.image_files import load_image
from distdl.datasets.image_headers import DamagedImage
from distdl.distributed import process_group
from distdl.domains.classification.metric import Labelled, labels_of
from distdl.domains.drawing import Drawing, DrawnImage, DrawnSection, ImageOf, matrix_image, small
from distdl.domains.metric import Reduce

MISTAKES = 12  # shown
MOST_CLASSES = 50  # of a confusion matrix


class Mistake(NamedTuple):
    """A sample whose most probable class is wrong."""

    probability: float
    sample: int
    label: int
    said: int


class Mistakes(Drawing[Labelled, torch.Tensor]):
    """The mistakes with the highest probability, each sample once, and of up to 50 classes the
    confusion matrix."""

    def __init__(self) -> None:
        self.found: torch.Tensor | None = None  # float64 [N, 4], of `Mistake`
        self.confusion: torch.Tensor | None = None  # float64 [classes, classes]
        self.dtype = torch.float64  # exact for numbers of samples, too
        self.mistakes: list[Mistake] = []  # of all ranks
        self.counts: list[list[int]] = []

    def start(self, device: torch.device) -> None:
        self.found = None
        self.confusion = None
        if device.type == "mps":  # Apple's GPUs have no float64
            self.dtype = torch.float32
        self.mistakes = []
        self.counts = []

    def add(self, batch: Labelled, outputs: torch.Tensor) -> None:
        """`outputs`: logits float32 [B, num_classes]."""
        labels, weight = labels_of(batch)
        classes = outputs.shape[1]
        probability, said = outputs.softmax(dim=1).max(dim=1)
        counted = weight > 0
        if classes <= MOST_CLASSES:
            numbers = torch.arange(classes, device=outputs.device)
            truth = ((labels[:, None] == numbers) & counted[:, None]).float()
            pairs = (truth.T @ (said[:, None] == numbers).float()).to(self.dtype)
            self.confusion = pairs if self.confusion is None else self.confusion + pairs
        if not isinstance(batch, Mapping) or "index" not in batch:
            return
        wrong = (said != labels) & counted
        sure = torch.where(wrong, probability.nan_to_num(nan=-1.0), -1.0)
        columns = (sure, batch["index"], labels, said)
        rows = torch.stack([each.to(self.dtype) for each in columns], dim=1)
        found = rows if self.found is None else torch.cat((self.found, rows))
        best = found[:, 0].topk(min(MISTAKES, len(found))).indices
        self.found = found[best]

    def gather(self, reduce: Reduce) -> None:
        # All ranks have the same number of batches, and the network gives all the same classes.
        if self.confusion is not None:
            self.counts = [[round(n) for n in row] for row in reduce(self.confusion).tolist()]
        rows = [] if self.found is None else self.found.tolist()
        found = [row for of_rank in process_group.gather(rows) for row in of_rank if row[0] >= 0]
        # The stages of a pipeline have the same samples.
        each = {int(row[1]): Mistake(row[0], *map(int, row[1:])) for row in found}
        self.mistakes = sorted(each.values(), key=lambda one: (-one.probability, one.sample))
        del self.mistakes[MISTAKES:]

    def sections(self, image_of: ImageOf | None, names: Sequence[object]) -> list[DrawnSection]:
        named = [str(name) for name in names]
        drawn = [*self._mistakes(image_of, named)] if image_of else []
        sections = [DrawnSection("Most confident mistakes", images=drawn)] if drawn else []
        if self.counts:
            classes = len(self.counts)
            if len(named) != classes:
                named = [str(number) for number in range(classes)]
            matrix = DrawnImage("confusion", matrix_image(named, self.counts), photograph=False)
            note = "Row: the class. Column: what the network said. Dark: a large share of the row."
            sections.append(DrawnSection("Confusion matrix", note, images=[matrix]))
        return sections

    def _mistakes(self, image_of: ImageOf, names: Sequence[str]) -> list[DrawnImage]:
        drawn = []
        for number, one in enumerate(self.mistakes, 1):
            found = image_of(one.sample)
            if found is None:
                continue
            data, name = found
            try:
                image = small(load_image(data, "RGB"))
            except DamagedImage:
                continue
            label, said = (_name_of(which, names) for which in (one.label, one.said))
            caption = f"{said} {100 * one.probability:.1f} %, but it is {label} ({name})"
            drawn.append(DrawnImage(f"mistake-{number:02d}", image, caption))
        return drawn


def _name_of(label: int, names: Sequence[str]) -> str:
    return names[label] if label < len(names) else str(label)
