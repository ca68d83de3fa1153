"""Folders of images, and of masks as PNG files of the same names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distdl.data.encoded import EncodedData
from distdl.data.stored_data import StoredData
from distdl.datasets.image_headers import DamagedImage
from distdl.datasets.left_out import LeftOut
from distdl.util.errors import Problem, UserError
from masks.domain import Segmentation
from masks.views import MaskView

NAMES = "classes.txt"


class MaskFolders(StoredData):
    """`root/train/images/x.jpg` with `root/train/masks/x.png`, and the same below `root/val`.
    `root/classes.txt` names the classes, one in a line, if it is there.

    Args:
        root, batch_size, num_workers: As for every data module of distdl.
        num_classes: The values of the masks are below it, or 255, which does not count.
        image_size: Height and width in pixels, as the network sees images.
    """

    domain = Segmentation()

    def __init__(
        self,
        root: str,
        batch_size: int,
        num_classes: int,
        image_size: int = 128,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(root, batch_size, {"image_size": image_size}, num_workers=num_workers)
        self.num_classes = num_classes

    @property
    def classes(self) -> list[str] | None:
        file = Path(self.root, NAMES)
        if not file.exists():
            return None
        return file.read_text(encoding="utf-8").splitlines()

    @classmethod
    def check_folder(cls, root: Path, node: Mapping[str, Any]) -> Iterable[Problem]:
        for split in ("train", "val"):
            for kind in ("images", "masks"):
                folder = root / split / kind
                if not folder.is_dir():
                    what = f"{folder} is no folder"
                    yield Problem("root", what, "python -m masks.draw data", code="not-found")

    @classmethod
    def count_folder(cls, root: Path, node: Mapping[str, Any]) -> int:
        return len(ImagesWithMasks(root / "train", MaskView(32, training=False), LeftOut()))

    def open_folder(self, root: Path, left_out: LeftOut) -> dict[str, EncodedData]:
        return {
            "train": ImagesWithMasks(root / "train", self.train_view, left_out),
            "val": ImagesWithMasks(root / "val", self.val_view, left_out),
        }


class ImagesWithMasks(EncodedData):
    """The images of a split.

    Raises:
        UserError: There is no image, or an image has no mask.
    """

    domain = Segmentation()

    def __init__(self, folder: Path, view: Any, left_out: LeftOut) -> None:
        super().__init__(view)
        self.folder = folder
        listed = sorted(path.name for path in (folder / "images").iterdir())
        self.names = left_out.images(str(folder / "images"), listed)
        if not self.names:
            what = f"{folder / 'images'} has no image"
            raise UserError.at("data.root", what, code="incomplete")
        without = [name for name in self.names if not self._mask(name).is_file()]
        if without:
            what = f"{len(without)} images of {folder} have no mask, the first one is {without[0]}"
            remedy = f"add {self._mask(without[0])}"
            raise UserError.at("data.root", what, remedy, code="incomplete")
        self.key = hashlib.sha256("\n".join(self.names).encode()).hexdigest()

    def _mask(self, name: str) -> Path:
        return self.folder / "masks" / f"{Path(name).stem}.png"

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        return _bytes_of(self.folder / "images" / self.names[index])

    def annotation(self, index: int) -> bytes:
        return _bytes_of(self._mask(self.names[index]))

    def name(self, index: int) -> str:
        return str(self.folder / "images" / self.names[index])


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedImage(f"{path.name}: {error.strerror}") from error
