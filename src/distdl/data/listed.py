"""The images of any folder or store, to predict: in class folders, in other ones, or in none."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import numpy as np

from distdl.data.encoded import EncodedImages
from distdl.datasets.image_headers import FORMATS, DamagedImage
from distdl.datasets.left_out import NO_IMAGE, NO_IMAGES, LeftOut, ending
from distdl.domains.domain import View
from distdl.stores import StoreError, open_store
from distdl.util.errors import UserError


class ListedImages(EncodedImages):
    """All files below a folder or URI, in the order of their names, but for hidden ones and those
    whose ending says that they are no images, which `left_out` counts. One that turns out to be no
    image has a row, too.

    The first folder of a name is the image's label (`label_name`); an image without a folder has
    none. `label` is always 0.

    Args:
        root: A folder, or a URI of `distdl.stores`.
        view: See `distdl.images.views`.

    Raises:
        UserError: There is no image.
        StoreError: The store cannot be reached.
    """

    def __init__(self, root: str, view: View) -> None:
        super().__init__(view)
        self.store = open_store(root)
        self.left_out = LeftOut()
        listed = [*self._listed([*self.store.names()])]
        if not listed:
            others = self.left_out.of(NO_IMAGE)
            what = f"{self.store.uri} holds no image"
            if others:
                what += f" (left out: {others})"
            raise UserError.at(
                "data.root", what=what, remedy=f"{', '.join(FORMATS)} are read", code="incomplete"
            )
        # In one array, of which workers make no copies: see `FolderImages`.
        self._names = np.array([os.fsencode(name) for name in listed])
        self.key = hashlib.sha256(os.fsencode(self.store.uri) + self._names.tobytes()).hexdigest()

    def _listed(self, names: list[str]) -> Iterator[str]:
        # Some stores list a folder as an empty file of its name, or of its name and a slash.
        folders = {"", *(name.rpartition("/")[0] for name in names)}
        for name in names:
            if name in folders or name.endswith("/") or name.startswith(".") or "/." in name:
                continue
            if ending(name) in NO_IMAGES:
                self.left_out.add(name, NO_IMAGE)
            else:
                yield name

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        return os.fsdecode(bytes(self._names[index]))

    def label_name(self, index: int) -> str | None:
        first, slash, _ = self.name(index).partition("/")
        return first if slash else None

    def read(self, index: int) -> bytes:
        try:
            return self.store.read(self.name(index))
        except StoreError as error:
            if error.transient:
                raise
            raise DamagedImage(str(error)) from error

    def label(self, index: int) -> int:
        return 0
