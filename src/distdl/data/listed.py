"""The images of any folder or store, to predict: in class folders, in other ones, or in none."""

from __future__ import annotations

import hashlib
import os

import numpy as np

from distdl.data.encoded import EncodedImages
from distdl.data.views import View
from distdl.datasets.image_files import EXTENSIONS, DamagedImage, is_image
from distdl.stores import StoreError, open_store
from distdl.util.errors import UserError


class ListedImages(EncodedImages):
    """All images below a folder or URI, in the order of their names.

    The first folder of a name is the image's label (`label_name`); an image without a folder has
    none. `label` is always 0.

    Args:
        root: A folder, or a URI of `distdl.stores`.
        view: See `distdl.data.views`.

    Raises:
        UserError: There is no image.
        StoreError: The store cannot be reached.
    """

    def __init__(self, root: str, view: View) -> None:
        super().__init__(view)
        self.store = open_store(root)
        listed = [name for name in self.store.names() if is_image(name)]
        if not listed:
            what = f"{self.store.uri} holds no image"
            raise UserError.at("data.root", what, f"files that end with {', '.join(EXTENSIONS)}")
        # In one array, of which workers make no copies: see `FolderImages`.
        self._names = np.array([os.fsencode(name) for name in listed])
        self.key = hashlib.sha256(os.fsencode(self.store.uri) + self._names.tobytes()).hexdigest()

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
