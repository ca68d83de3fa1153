"""Photographs in folders, one folder per class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from distdl.data.images import IMAGENET_MEAN, IMAGENET_STD, ImageData
from distdl.errors import Problem, UserError

# torchvision's list; compared in lower case, so `.JPEG` counts.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolderData(ImageData):
    """`root/train/<class>/*.jpg` and `root/val/<class>/*.jpg`, as ImageNet is usually laid out.

    Labels number the class folders in sorted order. Training: RandomResizedCrop and a flip;
    validation: the short side to 256/224 of `image_size`, then the centre, both as in torchvision's
    reference script (references/classification/presets.py). Decoded by PIL, uint8 until the device.

    Args:
        root: Holds `train/` and `val/`.
        batch_size: Images per device.
        num_classes: Must equal the number of class folders.
        image_size: Height and width in pixels after cropping.
        scale: Share of the area that a random crop takes, from and to.
        ratio: Width to height of a random crop, from and to.
        num_workers: Processes that decode; None: this rank's share of the cores.
        mean: Of red, green and blue, for values from 0 to 1.
        std: Of the same.

    Raises:
        UserError: When `check` finds a problem (in setup), a class folder holds no image, or an
            image cannot be decoded (names the file).
    """

    def __init__(
        self,
        root: str,
        batch_size: int,
        num_classes: int = 1000,
        image_size: int = 224,
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3 / 4, 4 / 3),
        num_workers: int | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
    ) -> None:
        super().__init__(batch_size, num_workers, mean, std)
        self.root, self.num_classes, self.image_size = root, num_classes, image_size
        self.scale, self.ratio = tuple(scale), tuple(ratio)
        self._splits: dict[str, FolderImages] = {}

    @staticmethod
    def check(config: Mapping[str, Any]) -> Iterable[Problem]:
        """What is wrong with the folders; paths are relative to the data node."""
        root = Path(os.path.expanduser(str(config["root"])))
        if not root.is_dir():
            yield Problem("root", f"no such folder: {root}", "data.root=/path/to/images")
            return
        missing = [split for split in ("train", "val") if not (root / split).is_dir()]
        for split in missing:
            yield Problem(
                "root", f"{root} has no {split}/", "it must hold train/<class>/ and val/<class>/"
            )
        if missing:
            return
        train, val = class_names(root / "train"), class_names(root / "val")
        if train != val:
            differing = sorted(set(train) ^ set(val))
            yield Problem(
                "root",
                f"train/ has {len(train)} classes and val/ {len(val)}; only one of the two has "
                f"{', '.join(differing[:3])}{', ...' if len(differing) > 3 else ''}",
                "both need the same class folders, or labels would differ in meaning",
            )
        wanted = config.get("num_classes")
        if wanted is not None and wanted != len(train):
            yield Problem(
                "num_classes",
                f"is {wanted}, but {root / 'train'} has {len(train)} class folders",
                f"data.num_classes={len(train)}",
            )

    def setup(self, stage: str | None = None) -> None:
        if self._splits:
            return
        problems = list(self.check({"root": self.root, "num_classes": self.num_classes}))
        if problems:
            raise UserError(*(Problem(f"data.{p.path}", p.what, p.remedy) for p in problems))
        root = Path(os.path.expanduser(self.root))
        for split, transform in (("train", self._train_transform()), ("val", self._transform())):
            self._splits[split] = FolderImages(root / split, transform)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(self._splits["train"], shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader(self._splits["val"], shuffle=False)

    def _train_transform(self) -> Callable[[Any], torch.Tensor]:
        # Imported here, since it takes a second that runs with other data need not wait.
        from torchvision.transforms import v2

        crop = v2.RandomResizedCrop(self.image_size, scale=self.scale, ratio=self.ratio)
        return v2.Compose([crop, v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def _transform(self) -> Callable[[Any], torch.Tensor]:
        from torchvision.transforms import v2

        short_side = round(self.image_size * 256 / 224)
        return v2.Compose([v2.Resize(short_side), v2.CenterCrop(self.image_size), v2.PILToTensor()])


def class_names(folder: Path) -> list[str]:
    """Names of the class folders, sorted: a class's place in it is its label."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


class FolderImages(Dataset[dict[str, Any]]):
    """Samples {"image": `transform(PIL RGB image)`, "label": int} of one folder of class folders.

    Paths are kept in one array and not in a list of strings: each worker process would copy a list
    of a million strings bit by bit, since counting references writes to their memory.
    """

    def __init__(self, folder: Path, transform: Callable[[Any], Any]) -> None:
        self.folder, self.transform = folder, transform
        self.classes = class_names(folder)
        paths: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            found = _images_below(folder / name)
            if not found:
                raise UserError(
                    Problem("data.root", f"{folder / name} holds no image", ", ".join(EXTENSIONS))
                )
            paths += [os.fsencode(os.path.relpath(path, folder)) for path in found]
            labels += [label] * len(found)
        self._paths = np.array(paths, dtype=np.bytes_)
        self._labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._labels)

    def path(self, index: int) -> Path:
        return self.folder / os.fsdecode(bytes(self._paths[index]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        from PIL import Image

        path = self.path(index)
        try:
            with Image.open(path) as file:
                image = file.convert("RGB")
        except Exception as error:  # PIL raises OSError, SyntaxError, struct.error and others
            raise UserError(
                Problem("data.root", f"cannot decode {path}: {error}", "replace or remove the file")
            ) from error
        return {"image": self.transform(image), "label": int(self._labels[index])}


def _images_below(folder: Path) -> list[str]:
    """Also in folders inside it, as torchvision's ImageFolder does."""
    found = []
    for inner, _, names in sorted(os.walk(folder, followlinks=True)):
        found += [
            os.path.join(inner, name) for name in sorted(names) if name.lower().endswith(EXTENSIONS)
        ]
    return found
