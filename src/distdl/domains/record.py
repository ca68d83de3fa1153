"""Part 1 of a domain: what is known of a sample beside its image, in a shard and in an index.

`distdl prepare` writes by it, so nothing here imports torch.
"""

from __future__ import annotations

import json

from distdl.util import strict_json

# What is known of a sample: a class's number, boxes, a text. Only its domain looks inside.
Annotation = object


class SampleRecord:
    """How annotations are stored. By default each is a JSON value in the member `<key>.json`,
    beside the image's `<key>.jpg`.

    The name of its domain stands in a set's manifest, and says who reads the set.
    """

    domain = ""
    ending = ".json"

    def encode(self, annotation: Annotation) -> bytes:
        """The content of the member of that ending. Called by `distdl prepare`, for each sample."""
        return strict_json.dumps(annotation).encode()

    def decode(self, content: bytes) -> Annotation:
        """What `encode` was given. Called in a loader's worker, before the sample is viewed.

        Raises:
            ValueError: The content is damaged: the sample counts as a damaged one.
        """
        return json.loads(content)

    def refuse_other_image(self, annotation: Annotation, width: int, height: int) -> None:
        """Called by `distdl prepare` with the size of the image in pixels, before `encode`.

        Raises:
            ValueError: The annotation is of an image of another size.
        """

    def label(self, annotation: Annotation) -> int:
        """The number in the column "label" of the sample's row in the index. Called by `distdl
        prepare`; 0 if the domain has no use for it."""
        return 0

    def in_index(self, label: int) -> Annotation | None:
        """The annotation, if the index's column "label" holds all of it; None: the member is read.
        Called by whoever reads a prepared set, for each sample."""
        return None
