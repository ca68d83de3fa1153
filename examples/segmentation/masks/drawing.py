"""Part 6: the images whose masks were worst, with the truth and what the network said."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image

from distdl.distributed import process_group
from distdl.domains.drawing import Drawing, DrawnImage, DrawnSection, ImageOf
from distdl.domains.metric import Reduce
from masks.views import IGNORED

SHOWN = 6
COLOURS = np.array([[0, 0, 0], [230, 80, 40], [40, 120, 230], [60, 180, 90], [220, 180, 40]])


class WorstMasks(Drawing[Mapping[str, torch.Tensor], torch.Tensor]):
    """The `SHOWN` images with the fewest right pixels, of all ranks."""

    def start(self, device: torch.device) -> None:
        # Of the worst so far: the share of right pixels, the index, the two masks.
        self.worst: list[torch.Tensor] = []

    def add(self, batch: Mapping[str, torch.Tensor], outputs: torch.Tensor) -> None:
        index = batch.get("index")
        if index is None:
            return
        truth = batch["mask"]
        said = outputs.argmax(dim=1)
        valid = truth != IGNORED
        right = ((said == truth) & valid).flatten(1).sum(dim=1)
        share = right / valid.flatten(1).sum(dim=1).clamp(min=1)
        if "weight" in batch:  # a filler is no image to show
            share = torch.where(batch["weight"] > 0, share, torch.inf)
        new = [share, index, truth.to(torch.uint8), said.to(torch.uint8)]
        if self.worst:
            new = [torch.cat(pair) for pair in zip(self.worst, new, strict=True)]
        kept = new[0].topk(min(SHOWN, len(new[0])), largest=False).indices
        self.worst = [each[kept] for each in new]

    def gather(self, reduce: Reduce) -> None:
        ranks = process_group.gather([each.cpu() for each in self.worst])
        some = [each for each in ranks if each]
        self.worst = [torch.cat(parts) for parts in zip(*some, strict=True)] if some else []

    def sections(self, image_of: ImageOf | None, names: Sequence[object]) -> list[DrawnSection]:
        if image_of is None or not self.worst:
            return []
        share, index, truth, said = self.worst
        pictures = []
        for row in share.argsort()[:SHOWN].tolist():
            if not torch.isfinite(share[row]):
                continue
            seen = image_of(int(index[row]))
            if seen is None:  # it cannot be read any more
                continue
            data, name = seen
            photo = Image.open(io.BytesIO(data)).convert("RGB").resize(truth.shape[:0:-1])
            pair = [painted(photo, masks[row].numpy()) for masks in (truth, said)]
            wide = Image.new("RGB", (2 * photo.width, photo.height))
            wide.paste(pair[0], (0, 0))
            wide.paste(pair[1], (photo.width, 0))
            caption = f"{name}: {100 * float(share[row]):.1f} % of the pixels are right"
            pictures.append(DrawnImage(f"worst-{len(pictures)}", wide, caption))
        note = "left: the truth, right: what the network said"
        return [DrawnSection("Worst masks", note=note, images=pictures)]


def painted(photo: Image.Image, mask: np.ndarray) -> Image.Image:
    """The photo with its classes in colours."""
    pixels = np.asarray(photo)
    colours = COLOURS[np.minimum(mask, len(COLOURS) - 1)]
    mixed = np.where(mask[..., None] == 0, pixels, 0.5 * pixels + 0.5 * colours)
    return Image.fromarray(mixed.astype(np.uint8))
