"""Writes one part of a plan as a shard, or as files in a folder. Runs in any process."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from distdl.datasets.format import RECORD_ROW, ROW, WORK, Shard, ShardFile, ShardRecord
from distdl.datasets.image_headers import DamagedImage, examine
from distdl.tools.prepare.images import Treatment
from distdl.tools.prepare.shard_plan import Part
from distdl.tools.prepare.source import Sample, Source, record_of
from distdl.util.atomic_files import atomic_file, write_bytes
from distdl.util.errors import Unwritten, UserError

FORMATS = ("shards", "folder")


@dataclass
class Result:
    """The result of one part: what was written. Its file marks the part as complete."""

    samples: int = 0
    bytes: int = 0
    shard: Shard | None = None  # None for a folder
    mended: list[tuple[str, str]] = field(default_factory=list)  # oddity and name; repaired
    damaged: list[tuple[str, str]] = field(default_factory=list)  # name and reason; left out

    def save(self, path: Path) -> None:
        write_bytes(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> Result:
        fields = json.loads(path.read_bytes())
        fields["shard"] = Shard(**fields["shard"]) if fields["shard"] else None
        return cls(**fields)


@dataclass(frozen=True)
class Writer:
    """Reads, checks and writes the samples of parts into the folder `out`. Pickled to processes."""

    source: Source
    classes: list[str]
    treatment: Treatment
    out: Path
    format: str

    def write(self, part: Part, advance: Callable[[int], None]) -> None:
        """Writes one part, then its result; calls `advance` with each sample's size in bytes.

        Raises:
            OSError: The disk is full, or cannot be written.
            UserError: An intact image cannot be encoded again, or a file has changed meanwhile.
        """
        part = self._allowing_repairs(part)
        with warnings.catch_warnings():
            # PIL warns of broken EXIF data and the like, which does not matter to training.
            warnings.filterwarnings("ignore", module=r"PIL\.")
            if self.format == "shards":
                self._write_shard(part, advance)
            else:
                self._write_files(part, advance)

    def _allowing_repairs(self, part: Part) -> Part:
        """The part without the mtimes of damaged files, which may have been repaired since."""
        path = result_file(self.out, part)
        if not path.exists():
            return part
        damaged = {name for name, _ in Result.load(path).damaged}
        files = {sample.where[0] for _, sample in part.samples if _shown(sample) in damaged}
        samples = []
        for key, sample in part.samples:
            if sample.where[0] in files:
                sample = replace(sample, mtime_ns=0)
            samples.append((key, sample))
        return replace(part, samples=tuple(samples))

    def _write_shard(self, part: Part, advance: Callable[[int], None]) -> None:
        result = Result()
        name = f"{part.name}.tar"
        with atomic_file(self.out / name) as file:
            tar = ShardFile(file, part.number, self.row)
            for key, sample in part.samples:
                image = self._image(sample, result)
                if image is not None:
                    tar.add(key, image.extension, image.data, image.beside)
                advance(sample.bytes)
            result.shard, rows = tar.close(name)
        result.samples = result.shard.samples
        result.bytes = result.shard.bytes
        with atomic_file(rows_file(self.out, part)) as file:
            np.save(file, rows)
        result.save(result_file(self.out, part))

    def _write_files(self, part: Part, advance: Callable[[int], None]) -> None:
        result = Result()
        for key, sample in part.samples:
            image = self._image(sample, result)
            if image is not None:
                name = key + image.extension
                path = self.out / part.split / self.classes[sample.label] / name
                write_bytes(path, image.data, durable=False)
                result.samples += 1
                result.bytes += len(image.data)
            advance(sample.bytes)
        os.sync()  # once, and not for each of a million files
        result.save(result_file(self.out, part))

    def _image(self, sample: Sample, result: Result) -> _Written | None:
        """What is written of a sample, or None if damaged; adds oddities and damage to `result`."""
        try:
            read = self.source.read(sample)
            data, extension, oddity = self.treatment.apply(read, sample.name)
            beside = self._beside(sample, data)
        except Unwritten as error:  # its source is intact, so --skip-damaged is no remedy
            raise UserError.at(sample.name, what=str(error), code="unsupported") from error
        except (DamagedImage, ValueError, OSError) as error:
            # Python's own message would include the path on this machine.
            reason = getattr(error, "strerror", None) or str(error)
            result.damaged.append((_shown(sample), reason))
            return None
        if oddity:
            result.mended.append((oddity, sample.name))
        return _Written(data, extension, beside)

    def _beside(self, sample: Sample, data: bytes) -> int | ShardRecord:
        """What stands beside an image in its shard."""
        record = record_of(self.source)
        if record is None:
            return sample.label
        annotation = self.source.annotation(sample)  # type: ignore[attr-defined]
        header = examine(data, self.treatment.max_pixels)
        record.refuse_other_image(annotation, header.width, header.height)
        content, label = record.encode(annotation), record.label(annotation)
        return ShardRecord(record.ending, content, label, header.width, header.height)

    @property
    def row(self) -> np.dtype[Any]:
        """The rows of the index."""
        return ROW if record_of(self.source) is None else RECORD_ROW


@dataclass(frozen=True)
class _Written:
    """An image as it is written, and its label or record."""

    data: bytes
    extension: str
    beside: int | ShardRecord


def _shown(sample: Sample) -> str:
    return f"{sample.split}: {sample.name}"


def rows_file(out: Path, part: Part) -> Path:
    return out / WORK / f"{part.name}.npy"


def result_file(out: Path, part: Part) -> Path:
    return out / WORK / f"{part.name}.json"


def rows_of(out: Path, parts: list[Part], row: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """The index rows of written parts, in their order."""
    rows = [np.load(rows_file(out, part)) for part in parts]
    return np.concatenate([np.empty(0, row), *rows])
