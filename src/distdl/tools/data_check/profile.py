"""`data check --profile`: where the CPU time of an image goes, and what would help."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from distdl.tools.data_check.sources import ImageReader

SECONDS = 2.0  # of CPU time, about
# What the stages of `distdl.images.stages` are.
MEANING = {
    "read": "the file, with its sha256 as at the first read",
    "header": "its kind and size",
    "entropy": "Huffman decoding, of the whole file",
    "IDCT": "pixels and colours, of the crop",
    "decode": "entropy and pixels, of the whole image",
    "resize": "the crop, to the size of training",
    "augment": "the flip is part of resize",
    "assemble": "draws, calls and the batch itself",
    "transfer": "the copy to the GPU",
}
HELPS = {
    "read": "nothing, if it is the sha256, which a run compares once; else data.order=auto",
    "entropy": "fewer bytes: prepare --short-side 256 --quality 90, or --raw-fraction 0.1",
    "IDCT": "fewer pixels: prepare --short-side 256, or --raw-fraction 0.1",
    "decode": "distdl-native, which decodes the crop alone (docs/data/native.md)",
    "resize": "fewer pixels: prepare --short-side 256",
    "assemble": "larger batches: data.batch_size",
}


@dataclass(frozen=True)
class Profile:
    """Milliseconds of one image by stage. What does not happen here is absent; `notes` say why."""

    stages: dict[str, float]
    decoder: str
    notes: tuple[str, ...]

    @property
    def total(self) -> float:
        return sum(self.stages.values())

    @property
    def advice(self) -> str:
        """What would help most, if anything is known of it."""
        known = {name: spent for name, spent in self.stages.items() if name in HELPS}
        most = max(known, key=lambda name: known[name], default="")
        return f"{most} is {known[most] / self.total:.0%}: {HELPS[most]}" if most else ""


def measure(reader: ImageReader, indices: Sequence[int], image_size: int) -> Profile | None:
    """Reads and decodes some images again and again; None if none of them can be decoded."""
    import torch

    from distdl.images import stages
    from distdl.images.views import TrainView

    most = reader.max_pixels
    view = TrainView(image_size, max_pixels=most, draws="counter")
    files: dict[int, bytes] = {}
    for index in map(int, indices):
        with suppress(OSError, ValueError):  # the report names them
            data = reader.read(index)
            view.of_sample(0)(data)
            files[index] = data
    if not files:
        return None

    def read(index: int) -> bytes:
        data = reader.read(index)
        if reader.sha256(index) is not None:
            hashlib.sha256(data).digest()
        return data

    seconds = stages.measure(read, [*files], view, SECONDS)
    notes = []
    library = view.decode.native
    if library is None:
        notes.append("without distdl-native images are decoded as a whole")
    elif not library.measures:
        notes.append("distdl-native is of an older build, whose stages cannot be told apart")
    elif left := sum(size is None for size in library.sizes([*files.values()], most)):
        notes.append(f"{left} of {len(files)} images are decoded as a whole (docs/data/native.md)")
    if not torch.cuda.is_available():
        notes.append("there is no GPU, so nothing is transferred")
    return Profile(
        {name: 1000 * spent for name, spent in seconds.items()}, view.decode.name, tuple(notes)
    )


def draw(profile: Profile, to: Path) -> None:
    """Writes the bars as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    names = [*profile.stages][::-1]
    figure, axes = plt.subplots(figsize=(6.4, 0.8 + 0.3 * len(names)), layout="constrained")
    bars = axes.barh(names, [profile.stages[name] for name in names])
    axes.bar_label(bars, fmt="%.3f", padding=3)
    axes.margins(x=0.12)  # for the longest bar's number
    axes.set_xlabel("CPU milliseconds of one image")
    axes.set_title(f"From a file to a batch, by {profile.decoder}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, format="svg", metadata={"Date": None})
    plt.close(figure)
