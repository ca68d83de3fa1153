"""TFRecords of `tf.train.Example` as a source, without TensorFlow.

Each record has an encoded image and its label, under Inception's names (image/encoded,
image/class/label, image/class/synset, image/filename) or TFDS's (image, label, file_name). Files
are called train-00000-of-01024, validation-... or the like (docs/data/tfrecord_parquet.md).
"""

from __future__ import annotations

import argparse
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distdl.datasets.left_out import LeftOut
from distdl.tools.prepare import records
from distdl.tools.prepare.source import Files, Progress, Sample
from distdl.util import unpacking
from distdl.util.errors import UserError

# part-00000, train-00001-of-01024, imagenet2012-train.tfrecord-00000-of-01024, val.tfrecords
NAMED = "*.tfrecord, *.tfrecords, train-00000-of-01024 or part-00000"
FILES = r"(\.tfrecords?\b|^[\w.-]*-\d{5}(-of-\d{5})?$)"
# The first of these names that a record has is used: Inception's, TFDS's, then others.
IMAGE = ("image/encoded", "image", "image_raw")
LABEL = ("image/class/label", "label")
CLASS = ("image/class/synset", "image/class/text")
NAME = ("image/filename", "file_name", "image/source_id")

Span = tuple[int, int]
Buffer = bytes | mmap.mmap


add_options = records.add_options


def open_source(options: argparse.Namespace) -> TFRecords:
    return TFRecords(options.source, options.split, options.label_offset)


class TFRecords:
    """A folder of TFRecord files. The splits follow from their names or from `split`.

    Args:
        path: The folder, or one file.
        split: "train" or "val", for all files; None: from each file's name.
        label_offset: Subtracted from every label; None: the smallest label, if that is 0 or 1.

    Raises:
        UserError: There are no such files, google-crc32c is missing, or (in `scan`) a file is
            compressed, truncated, or not a sequence of Examples with image and label.
    """

    kind = "tfrecord"
    in_blocks = False

    def __init__(
        self, path: str | Path, split: str | None = None, label_offset: int | None = None
    ) -> None:
        masked_crc(b"")  # raises here, and not in a worker, if google-crc32c is missing
        self.left_out = LeftOut()
        folder, self._splits = records.find_files(Path(path), FILES, NAMED, split, self.left_out)
        self.classes: list[str] = []
        self._label_offset = label_offset
        self._files = Files(folder)

    def scan(self, progress: Progress) -> Iterator[Sample]:
        """Every sample, in the order of the file names; `progress` counts bytes."""
        labelled = records.Labelled()
        stats = {name: (self._files.folder / name).stat() for name in self._splits}
        done = 0
        total = sum(stat.st_size for stat in stats.values())
        for name, split in self._splits.items():
            if not stats[name].st_size:
                self.left_out.add(name, "empty")
            for start, length, image, (label, class_name, file_name) in _records(self._files, name):
                if label < 0:
                    position = f"{self._files.folder / name}, record at byte {start - 12},"
                    raise records.no_class(position, label)
                where = name, start, length, *image
                mtime = stats[name].st_mtime_ns
                sample = Sample(split, file_name, label, image[1], where, mtime)
                labelled.add(sample, class_name)
                progress(done + start + length + 4, total)
            done += stats[name].st_size
        self.classes = labelled.settle(self._label_offset)
        yield from labelled.samples()

    def read(self, sample: Sample) -> bytes:
        """The encoded image; raises ValueError if the record's checksum is wrong."""
        name, start, length, inner, size = sample.where
        assert isinstance(name, str)
        data = self._files.read(name, int(start), int(length) + 4, sample.mtime_ns)
        if masked_crc(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise ValueError(f"{name}: the record at byte {int(start) - 12} is damaged (checksum)")
        return data[int(inner) : int(inner) + int(size)]

    def describe(self) -> dict[str, Any]:
        return records.describe(self.kind, self._files.folder, self._splits) | {
            "label_offset": self._label_offset
        }


def _records(files: Files, name: str) -> Iterator[tuple[int, int, Span, tuple[int, str, str]]]:
    """Yields (start, length, image, meaning) for each record of a file. `image` is (start in the
    record, length), and `meaning` is (label, class name, image name).

    A file is a sequence of records, each framed by its length and checksums
    (https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details):
    uint64 length, uint32 masked crc32c of it, the bytes, uint32 masked crc32c of them. The bytes
    are an Example, a map from names to lists
    (https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto).
    This function parses the wire format (https://protobuf.dev/programming-guides/encoding/) in a
    memory map. So a scan does not read the images, and 140 GB are not read twice.
    """
    path = files.folder / name
    size = path.stat().st_size
    if not size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if hasattr(data, "madvise"):
            data.madvise(mmap.MADV_RANDOM)  # readahead would read the images
        start = 0
        while start < size:
            header = data[start : start + 12]
            begin = start + 12
            length, crc = struct.unpack("<QI", header.ljust(12))
            if begin <= size and masked_crc(header[:8]) != crc:
                if start == 0 and (unpacking.is_compressed(header) or unpacking.is_zlib(header)):
                    raise _bad(path, start, "it is compressed", unpacking.command(path, header))
                raise _bad(path, start, "it is not a record, or it is damaged")
            if begin + length + 4 > size:
                raise _bad(path, start, "it is cut short")
            try:
                image, meaning = _example(data, (begin, begin + length))
            except (ValueError, IndexError) as error:
                what = f"it is not an Example with an image and a label: {error}"
                raise _bad(path, start, what) from error
            yield begin, length, (image[0] - begin, image[1] - image[0]), meaning
            start = begin + length + 4


def _bad(path: Path, start: int, what: str, remedy: str = "") -> UserError:
    remedy = remedy or "copy the file again from its source"
    return UserError.at(
        "--source",
        what=f"{path}, record at byte {start}: {what}",
        remedy=remedy,
        code="damaged-file",
    )


def _example(data: Buffer, span: Span) -> tuple[Span, tuple[int, str, str]]:
    features = dict[str, Span]()
    for outer in _fields(data, span, 1):  # Example.features
        for entry in _fields(data, outer, 1):  # Features.feature, a map
            # protobuf omits empty fields.
            key, value = (next(_fields(data, entry, number), (0, 0)) for number in (1, 2))
            features[str(data[slice(*key)], "utf-8")] = value

    def text(names: tuple[str, ...]) -> str:
        spans = (_first_bytes(data, features[name]) for name in names if name in features)
        return next((str(data[slice(*s)], "utf-8") for s in spans if s and s[1] > s[0]), "")

    image = next((_first_bytes(data, features[name]) for name in IMAGE if name in features), None)
    label = next((_first_int(data, features[name]) for name in LABEL if name in features), None)
    if image is None or label is None:
        lacks = " or ".join(IMAGE if image is None else LABEL)
        raise ValueError(f"it has {', '.join(sorted(features)) or 'nothing'}, and no {lacks}")
    return image, (label, text(CLASS), text(NAME))


def _first_bytes(data: Buffer, feature: Span) -> Span | None:
    """Feature.bytes_list.value[0]."""
    values = next(_fields(data, feature, 1), None)
    return next(_fields(data, values, 1), None) if values else None


def _first_int(data: Buffer, feature: Span) -> int | None:
    """Feature.int64_list.value[0], packed (as protobuf writes it) or not."""
    values = next(_fields(data, feature, 3), None)
    if values is None or values[0] == values[1]:
        return None
    tag, start = _varint(data, values[0])
    if tag & 7 == 2:
        start = _varint(data, start)[1]
    value = _varint(data, start)[0]
    return value - (1 << 64) if value >> 63 else value


def _fields(data: Buffer, span: Span, wanted: int) -> Iterator[Span]:
    """Spans of a message's length-delimited fields with the field number `wanted`."""
    start, end = span
    while start < end:
        tag, start = _varint(data, start)
        kind = tag & 7
        if kind == 2:
            size, start = _varint(data, start)
        elif kind == 0:
            size = _varint(data, start)[1] - start
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if start + size > end:
            raise ValueError("a field that is longer than its message")
        if kind == 2 and tag >> 3 == wanted:
            yield start, start + size
        start += size


def _varint(data: Buffer, start: int) -> tuple[int, int]:
    """The number at `start`, and the position after it."""
    value = shift = 0
    while True:
        byte = data[start]
        start += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, start
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def masked_crc(data: bytes) -> int:
    """The checksum of a record: a masked crc32c, so that records may contain records."""
    try:
        import google_crc32c
    except ImportError as error:
        raise UserError.at(
            "--source",
            what="TFRecords are checked by google-crc32c, which is not installed",
            remedy="pip install 'distdl[data]'",
            code="not-installed",
        ) from error
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
