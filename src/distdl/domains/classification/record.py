"""A class in a shard: its number, in a member `.cls` and in the index."""

from __future__ import annotations

from typing import cast

from distdl.domains.record import Annotation, SampleRecord


class ClassRecord(SampleRecord):
    """The annotation is the class's number, an int below the number of classes. The index holds all
    of it, so training never reads the member."""

    domain = "classification"
    ending = ".cls"

    def encode(self, annotation: Annotation) -> bytes:
        return str(annotation).encode()

    def decode(self, content: bytes) -> int:
        return int(content)

    def label(self, annotation: Annotation) -> int:
        return cast(int, annotation)

    def in_index(self, label: int) -> int:
        return label
