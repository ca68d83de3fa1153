"""Parquet files of encoded images as a source: Hugging Face's, Petastorm's and others.

The image is a column of bytes (JPEG, PNG), or Hugging Face's struct {bytes, path}
(https://huggingface.co/docs/datasets/image_dataset). Petastorm's CompressedImageCodec writes plain
encoded images, too (https://github.com/uber/petastorm/blob/master/petastorm/codecs.py), but its
NdarrayCodec does not, and is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.datasets.left_out import LeftOut
from distdl.tools.prepare import records
from distdl.tools.prepare.source import Progress, Sample, refuse_changed
from distdl.util.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

NAMED = "*.parquet or *.pq"
FILES = r"\.(parquet|pq)$"
IMAGE = ("image", "img", "jpg", "jpeg", "png", "image/encoded")
LABEL = ("label", "labels", "class", "cls", "target", "fine_label", "image/class/label")
NAME = ("filename", "file_name", "path", "image_path", "__key__", "key", "name", "id")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image-column", metavar="NAME", help="default: by type and name")
    parser.add_argument("--label-column", metavar="NAME", help="holds numbers or class names")
    records.add_options(parser)


def open_source(options: argparse.Namespace) -> ParquetImages:
    return ParquetImages(
        options.source,
        options.split,
        image_column=options.image_column,
        label_column=options.label_column,
        label_offset=options.label_offset,
    )


class ParquetImages:
    """A folder of Parquet files. The splits follow from their names or from `split`.

    Args:
        path, split, label_offset: As for `TFRecords`.
        image_column: None: the column of bytes with a usual name, or the only one.
        label_column: None: the column with a usual name, or the only column of integers.

    Raises:
        UserError: There are no such files, pyarrow is missing, or the columns do not fit.
    """

    kind = "parquet"
    # A row group is read at once, so its samples must stay together.
    in_blocks = True

    def __init__(
        self,
        path: str | Path,
        split: str | None = None,
        image_column: str | None = None,
        label_column: str | None = None,
        label_offset: int | None = None,
    ) -> None:
        self.classes: list[str] = []
        self.left_out = LeftOut()
        found = records.find_files(Path(path), FILES, NAMED, split, self.left_out)
        self._folder, self._splits = found
        self._label_offset = label_offset
        # The file and the row group that were read last, for the next read.
        self._file: tuple[str, Any] = ("", None)
        self._group: tuple[str, int, Any] = ("", -1, None)
        schema = self._opened(next(iter(self._splits))).schema_arrow
        self._image = _image_column(schema, image_column)
        self._label = _label_column(schema, label_column)
        struct = any(field.name == "path" for field in _fields(schema.field(self._image).type))
        usual = next((name for name in NAME if name in schema.names and name != self._image), None)
        self._name = f"{self._image}.path" if struct else usual

    def scan(self, progress: Progress) -> Iterator[Sample]:
        """Every sample, in the order of the file names. Reads labels and names, but no images."""
        known = self._known_classes()
        numbers = {name: number for number, name in enumerate(known or ())}
        total = sum(self._opened(name).metadata.num_rows for name in self._splits)
        labelled = records.Labelled()
        done = 0
        for name, split in self._splits.items():
            path = self._folder / name
            mtime = path.stat().st_mtime_ns
            if not self._opened(name).metadata.num_rows:
                self.left_out.add(name, "empty")
            for group in range(self._opened(name).metadata.num_row_groups):
                labels, names = self._row_group(name, group)
                size = self._mean_bytes(name, group)
                for row, (label, file_name) in enumerate(zip(labels, names, strict=True)):
                    position = f"{path}: row {row} of row group {group}"
                    if label is None:
                        raise UserError.at(
                            "--source", what=f"{position} has no {self._label}", code="incomplete"
                        )
                    number = numbers[label] if isinstance(label, str) else int(label)
                    if number < 0:
                        raise records.no_class(position, number)
                    where = name, group, row
                    labelled.add(Sample(split, str(file_name or ""), number, size, where, mtime))
                done += len(labels)
                progress(done, total)
        self.classes = labelled.settle(self._label_offset, known)
        yield from labelled.samples()

    def read(self, sample: Sample) -> bytes:
        """The encoded image; raises ValueError if the row has none, OSError for a bad checksum."""
        name, group, row = sample.where
        if self._group[:2] != (name, group):
            try:
                table = self._opened(str(name)).read_row_group(int(group), columns=[self._image])
            finally:  # a changed file may also be unreadable
                path = self._folder / str(name)
                refuse_changed(path, path.stat(), sample.mtime_ns)
            self._group = str(name), int(group), table.column(0)
        value = self._group[2][int(row)].as_py()
        if isinstance(value, dict):
            value = value.get("bytes")
        if not value:
            raise ValueError(f"{name}: row {row} of row group {group} holds no image bytes")
        if value[:6] == b"\x93NUMPY":
            raise ValueError(f"{name}: Petastorm's NdarrayCodec wrote arrays, not encoded images")
        return bytes(value)

    def describe(self) -> dict[str, Any]:
        return records.describe(self.kind, self._folder, self._splits) | {
            "image_column": self._image,
            "label_column": self._label,
            "label_offset": self._label_offset,
        }

    def _opened(self, name: str) -> pq.ParquetFile:
        """The open file, kept until another one is opened."""
        if self._file[0] != name:
            try:
                import pyarrow.parquet as pq
            except ImportError as error:
                raise UserError.at(
                    "--source",
                    what="Parquet is read by pyarrow, which is not installed",
                    remedy="pip install 'distdl[data]'",
                    code="not-installed",
                ) from error
            try:
                file = pq.ParquetFile(self._folder / name, page_checksum_verification=True)
            except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
                raise UserError.at(
                    "--source",
                    what=f"{self._folder / name} is not a Parquet file: {error}",
                    code="wrong-kind",
                ) from error
            self._file = name, file
        return self._file[1]

    def _row_group(self, name: str, group: int) -> tuple[list[Any], list[Any]]:
        """Labels and names of a row group's rows; names are "" if there are none."""
        wanted = [self._label, *([self._name] if self._name else [])]
        try:
            table = self._opened(name).read_row_group(group, columns=wanted)
            labels = table.column(self._label).to_pylist()
        except (KeyError, ValueError, OSError) as error:
            raise UserError.at(
                "--source",
                what=(
                    f"{self._folder / name} cannot be read, or has no column {self._label}: {error}"
                ),
                code="unreadable",
            ) from error
        names: list[Any] = [""] * len(labels)
        if self._name and self._name.partition(".")[0] in table.column_names:
            names = table.column(self._name.partition(".")[0]).to_pylist()
        return labels, [n.get("path") if isinstance(n, dict) else n for n in names]

    def _mean_bytes(self, name: str, group: int) -> int:
        """Mean size of an image of a row group, from the metadata, without reading images."""
        rows = self._opened(name).metadata.row_group(group)
        names = self._image, f"{self._image}.bytes"
        columns = (rows.column(i) for i in range(rows.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema in names)
        return int(size) // max(1, rows.num_rows)

    def _known_classes(self) -> list[str] | None:
        """Class names by label: Hugging Face's, or the sorted text labels; None: unknown."""
        import pyarrow as pa

        schema = self._opened(next(iter(self._splits))).schema_arrow
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        feature = features.get("info", {}).get("features", {}).get(self._label, {})
        names = feature.get("names") if isinstance(feature, dict) else None
        if names and feature.get("_type") == "ClassLabel":
            return list(map(str, names))
        if pa.types.is_integer(schema.field(self._label).type):
            return None
        texts: set[str] = set()
        for name in self._splits:
            for group in range(self._opened(name).metadata.num_row_groups):
                texts.update(label for label in self._row_group(name, group)[0] if label)
        return sorted(texts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": ("", None), "_group": ("", -1, None)}


def _fields(kind: pa.DataType) -> list[pa.Field]:
    """The fields of a struct type; [] for any other type."""
    import pyarrow as pa

    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _image_column(schema: pa.Schema, wanted: str | None) -> str:
    import pyarrow as pa

    def is_bytes(kind: pa.DataType) -> bool:
        return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    fits = [
        field.name
        for field in schema
        if is_bytes(field.type)
        or any(inner.name == "bytes" and is_bytes(inner.type) for inner in _fields(field.type))
    ]
    return _chosen("--image-column", wanted, fits, IMAGE, schema, "bytes of images")


def _label_column(schema: pa.Schema, wanted: str | None) -> str:
    import pyarrow as pa

    def is_text(kind: pa.DataType) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

    numbers = [field.name for field in schema if pa.types.is_integer(field.type)]
    texts = [field.name for field in schema if is_text(field.type)]
    fits = [*numbers, *(name for name in texts if wanted or name in LABEL)]
    return _chosen("--label-column", wanted, fits, LABEL, schema, "labels")


def _chosen(
    option: str,
    wanted: str | None,
    fits: list[str],
    usual: tuple[str, ...],
    schema: pa.Schema,
    data: str,
) -> str:
    columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
    if wanted is not None:
        if wanted not in fits:
            why = f"{wanted} holds no {data}" if wanted in schema.names else f"no column {wanted}"
            raise UserError.at(option, what=f"{why}; the columns are {columns}", code="not-found")
        return wanted
    named = [name for name in usual if name in fits]
    if named or len(fits) == 1:
        return (named or fits)[0]
    candidates = "no column holds" if not fits else f"{len(fits)} columns may hold"
    raise UserError.at(
        option, what=f"{candidates} {data}: {columns}", remedy=f"{option} NAME", code="ambiguous"
    )
