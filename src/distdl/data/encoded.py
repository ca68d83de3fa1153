"""Base of data sets of encoded images: decodes, and replaces and reports damaged ones."""

from __future__ import annotations

import copy
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from distdl.data.sampling import Groups, SampleKey
from distdl.datasets.image_headers import DamagedImage
from distdl.domains.classification.domain import Classification
from distdl.domains.domain import Domain, View
from distdl.domains.record import Annotation
from distdl.images.views import View as ImageView
from distdl.util.errors import UserError
from distdl.util.seeds import stable_seed

log = logging.getLogger(__name__)

# After this many damaged images in a row, the images are probably not the cause.
MOST_IN_A_ROW = 20
OnDamaged = Literal["skip", "error"]
# From a shape to a tensor of uint8 with undefined content.
Room = Callable[[Sequence[int]], torch.Tensor]


class Assembled(list[Any]):
    """A batch that is finished, in place of a list of samples, for `EncodedData.collate`."""

    def __init__(self, batch: dict[str, Any]) -> None:
        super().__init__()
        self.batch = batch


class EncodedData(Dataset[dict[str, Any]]):
    """Samples that are encoded images, each with an annotation of some domain.

    A subclass defines `__len__`, `read`, `annotation` and `name`, and may repair a damaged copy in
    `repair`. A sample has the fields that its domain makes of image and annotation
    (`Domain.sample`), "weight" (float32) and "damaged" (str).

    A damaged image is replaced by the next intact one, so that batches have the same size on all
    ranks. Its "weight" is then 0: validation ignores the row, training uses it. "damaged" names the
    image and the reason. `distdl.data.images.ImageData` reports or refuses it. With `replaces =
    False` (predictions) a black image takes its place, however many are damaged.

    Args:
        view: One of the domain's views.
    """

    domain = Domain()
    classes: Sequence[str] = ()  # names by label, where the annotations have labels
    key = ""  # says which samples these are: equal for equal data, on every machine
    folder = Path()  # what a name begins with that may differ between machines
    replaces = True
    groups: Groups | None = None  # in training, by which samples come into one batch

    def __init__(self, view: View) -> None:
        self.view = view

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> bytes:
        """The encoded image.

        Raises:
            DamagedImage: Only this image is unreadable; it is replaced.
            OSError: Ends the run.
        """

    @abstractmethod
    def annotation(self, index: int) -> Annotation:
        """What is known of it, as its domain's record has it.

        Raises:
            DamagedImage: Only this annotation is unreadable; the sample is replaced.
        """

    @abstractmethod
    def name(self, index: int) -> str:
        """Where a user can find the image: a path, or shard and member."""

    def sample_name(self, index: int) -> str:
        """Its name within the data set, the same on every machine."""
        return self.name(index).removeprefix(f"{self.folder}/")

    def known(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        """The columns of a prediction's rows that say what is known of samples, each [N]."""
        annotations = [self._intact_annotation(index) for index in indices]
        return self.domain.known(annotations, self.classes)

    def repair(self, index: int) -> bool:
        """Called once for an image that cannot be decoded; True: read it again."""
        return False

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.at_epoch(index, 0)

    def at_epoch(self, index: int, epoch: int) -> dict[str, Any]:
        """The sample in an epoch: the image size may depend on it (`data.resize`).

        Raises:
            UserError: Too many damaged images in a row.
        """
        return self._at(index, epoch, self.view)

    def _at(self, index: int, epoch: int, view: View) -> dict[str, Any]:
        damaged: list[str] = []
        for shown in range(index, index + min(MOST_IN_A_ROW, len(self))):
            shown %= len(self)
            try:
                seen = self._seen(shown, epoch, view)
            except DamagedImage as error:
                damaged.append(f"{self.name(shown)}: {error}" if self.replaces else str(error))
                if self.replaces:
                    continue
                seen = self.domain.blank(view, self._intact_annotation(shown), epoch)
            # Report only the first: the other damaged images report themselves.
            first = next(iter(damaged), "")
            weight = np.float32(not damaged)
            return {**seen, "weight": weight, "damaged": first}
        raise UserError.at(
            "data.root",
            what=f"{len(damaged)} images in a row cannot be decoded, from {damaged[0]}",
            remedy="to count them: python -m distdl data check",
            code="unreadable",
        )

    def _seen(self, index: int, epoch: int, view: View) -> dict[str, Any]:
        try:
            return self._sample(index, epoch, view)
        except DamagedImage:
            if not self.repair(index):
                raise
            return self._sample(index, epoch, view)

    def _intact_annotation(self, index: int) -> Annotation:
        """None if it is damaged."""
        try:
            return self.annotation(index)
        except DamagedImage:
            return None

    def _sample(self, index: int, epoch: int, view: View) -> dict[str, Any]:
        return self.domain.sample(view, self.read(index), self.annotation(index), epoch)

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of samples, on the host: the domain's."""
        if isinstance(samples, Assembled):
            return samples.batch
        return self.domain.collate(samples)

    @property
    def draws_apart(self) -> bool:
        """Whether `assembled` can make batches: the view draws nothing from the process's
        generators, the domain's samples and batches are the defaults, and nothing is overridden."""
        view = self.view
        if not isinstance(view, ImageView) or not view.draws_apart or view.on_gpu:
            return False
        kind = type(self)
        own = (kind.at_epoch, kind.collate, kind.__getitem__)
        domain = type(self.domain)
        default = (domain.sample, domain.collate)
        return own == _OWN and default == (Domain.sample, Domain.collate)

    def known_whole(self, index: int) -> bool:
        """Whether the bytes that `read` returns were decoded to their end before."""
        return False

    def found_whole(self, index: int) -> None:
        """Called when they have been."""

    def for_thread(self, threads: int) -> EncodedData:
        """The same data for one of so many threads, which must not share open files."""
        return copy.copy(self)

    def assembled(
        self, keys: Sequence[SampleKey], seed: int, room: Room | None = None
    ) -> Assembled:
        """What `collate` makes of the samples of these keys, but each image is decoded at its place
        in the batch, and draws from a generator of its own, by seed, epoch and index.

        Args:
            room: Gives memory for the images; None: fresh memory.
        """
        view = self.view
        assert isinstance(view, ImageView)  # draws_apart
        epoch = keys[0].epoch
        side = view.side(epoch)
        images = (room or _fresh)((len(keys), side, side, 3))
        views = [view.of_sample(stable_seed(seed, key.epoch, key.index)) for key in keys]
        files: list[bytes] = []
        annotations: list[Annotation] = []
        for key in keys:
            try:
                data, annotation = self.read(key.index), self.annotation(key.index)
            except DamagedImage:  # `_at` says so
                data, annotation = b"", None
            files.append(data)
            annotations.append(annotation)
        known = [self.known_whole(key.index) for key in keys]
        choose = [each.choose(epoch) for each in views]
        done = view.decode.squares(files, choose, known, images)
        samples = []
        for row, key in enumerate(keys):
            if done[row]:
                if not known[row]:
                    self.found_whole(key.index)
                place = images[row].permute(2, 0, 1)
                changed = views[row].changed(place)
                fields = self.domain.fields(annotations[row])
                sample = {**fields, "weight": np.float32(1), "damaged": ""}
            else:
                again = view.of_sample(stable_seed(seed, key.epoch, key.index))
                sample = self._at(key.index, epoch, again)
                place = images[row].permute(2, 0, 1)
                changed = sample.pop("image")
            if changed is not place:
                place.copy_(changed)
            weight = np.float32(key.weight * sample["weight"])
            samples.append({**sample, "weight": weight, "index": key.index})
        batch = default_collate(samples)
        return Assembled({**batch, "image": images.permute(0, 3, 1, 2)})


_OWN = (EncodedData.at_epoch, EncodedData.collate, EncodedData.__getitem__)


def _fresh(shape: Sequence[int]) -> torch.Tensor:
    """Memory for a batch's images, uint8; in a loader's process such as its rank sees as well, so
    that it is not copied."""
    if get_worker_info() is None:
        return torch.empty(*shape, dtype=torch.uint8)
    # As torch's default_collate makes it.
    storage = torch.UntypedStorage._new_shared(math.prod(shape), device="cpu")
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(*shape)


class EncodedImages(EncodedData):
    """Encoded images with one class each. A subclass defines `label` in place of `annotation`; a
    sample has the view's "image", uint8 [3, S, S], and "label" (int)."""

    domain = Classification()

    @abstractmethod
    def label(self, index: int) -> int:
        """Its class index."""

    def annotation(self, index: int) -> int:
        return self.label(index)

    def label_name(self, index: int) -> str | None:
        """The name of its class, if it is known."""
        return self.classes[self.label(index)]

    def known(self, indices: Sequence[int]) -> dict[str, np.ndarray]:
        return {"label": np.array([*map(self.label_name, indices)], dtype=object)}


class Damage:
    """Damaged images of this rank: workers mark them, and the main process reports them here.

    Args:
        on_damaged: "skip": another image replaces it; "error": the run ends.
    """

    def __init__(self, on_damaged: OnDamaged = "skip") -> None:
        self.on_damaged = on_damaged
        self.in_epoch = 0
        self._known: set[str] = set()

    def note(self, damaged: Sequence[str], file: Path | None) -> None:
        """Reports a batch's "damaged" field.

        Args:
            damaged: One text per sample, "" for an intact one.
            file: Each text is appended to it as a line, but only once in all attempts of a run.

        Raises:
            UserError: For the first damaged image, with on_damaged="error".
        """
        messages = [text for text in damaged if text]
        if messages and self.on_damaged == "error":
            in_shard = ".tar:" in messages[0]
            repair = "copy or prepare its shard again" if in_shard else "replace or remove it"
            raise UserError.at(
                "data.root",
                what=f"cannot decode {messages[0]}",
                remedy=f"{repair}, or skip damaged images: data.on_damaged=skip",
                code="unreadable",
            )
        self.in_epoch += len(messages)
        for text in messages:
            if text not in self._known:
                self._known.add(text)
                log.warning("left out, since it cannot be decoded: %s", text)
                if file is not None:
                    _add_line(file, text)


def _add_line(file: Path, text: str) -> None:
    line = text.replace("\n", " ") + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+", encoding="utf-8") as lines:
            lines.seek(0)
            if line not in lines:
                lines.write(line)
    except OSError as error:  # a failed write must not end the run
        log.warning("%s: %s", file, error)
