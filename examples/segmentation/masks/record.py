"""Part 1: a mask in a shard, as the PNG that it came as."""

from __future__ import annotations

from distdl.domains.record import SampleRecord


class MaskRecord(SampleRecord):
    """The annotation is the mask's encoded PNG, `bytes`."""

    domain = "segmentation"
    ending = ".mask.png"

    def encode(self, annotation: object) -> bytes:
        assert isinstance(annotation, bytes)
        return annotation

    def decode(self, content: bytes) -> bytes:
        return content
