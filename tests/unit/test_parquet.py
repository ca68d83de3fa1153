"""Parquet as a source: Hugging Face's form, Petastorm's, and plain columns."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from distdl.datasets.parquet import ParquetImages
from distdl.datasets.reading import Shards, open_data_set
from distdl.datasets.source import Sample
from distdl.util.errors import Unfinished, UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def jpeg(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8 + number, 8), (number * 9 % 255, 80, 10)).save(buffer, "JPEG")
    return buffer.getvalue()


# Statistics would repeat the smallest and the largest image in each page's header.
OPTIONS = {"write_page_checksum": True, "write_statistics": False}


def write(path: Path, columns: dict[str, Any], metadata: Any = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if metadata:
        table = table.replace_schema_metadata({"huggingface": json.dumps(metadata)})
    pq.write_table(table, path, row_group_size=2, **OPTIONS, **options)
    return path


def scan(source: ParquetImages) -> list[Sample]:
    return list(source.scan(lambda done, total: None))


def refused(*arguments: Any, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        scan(ParquetImages(*arguments, **options))
    return str(error.value)


def test_hugging_faces_images_with_their_names(tmp_path):
    names = ["cat", "dog", "emu"]
    said = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    for split, numbers in (("train", range(5)), ("validation", range(5, 7))):
        images = [{"bytes": jpeg(n), "path": f"{n}.jpg"} for n in numbers]
        labels = [1 + n % 2 for n in numbers]
        path = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        write(path, {"label": labels, "image": images}, said)
    write(tmp_path / "data" / "test-00000-of-00001.parquet", {"label": [-1], "image": images[:1]})
    source = ParquetImages(tmp_path)
    passed: list[tuple[int, int]] = []
    samples = list(source.scan(lambda *now: passed.append(now)))
    assert [(s.split, s.name, s.label) for s in samples] == [
        *[("train", f"{n}.jpg", 1 + n % 2) for n in range(5)],
        ("val", "5.jpg", 2),
        ("val", "6.jpg", 1),
    ]
    # Label 0 has no sample here. It counts all the same: the schema names it.
    assert source.classes == names and passed[-1] == (7, 7)
    assert all(len(jpeg(0)) / 2 < s.bytes < 3 * len(jpeg(0)) for s in samples)
    elsewhere = pickle.loads(pickle.dumps(source))
    for number in (6, 0, 3, 4, 1):
        assert elsewhere.read(samples[number]) == jpeg(number)


def test_petastorms_columns_in_folders_named_by_split(tmp_path):
    for split in ("train", "val"):
        columns = {
            "noun_id": ["n02", "n01", "n02"],
            "text": ["a", "b", "a"],
            "image": [jpeg(n) for n in range(3)],
        }
        write(tmp_path / split / "part-00000-of-00001.parquet", columns)
        (tmp_path / split / "_SUCCESS").touch()
        (tmp_path / split / "_metadata.parquet").write_bytes(b"petastorm's own")
    assert "no column holds labels" in refused(tmp_path)
    source = ParquetImages(tmp_path, label_column="noun_id")
    assert [(s.split, s.name, s.label) for s in scan(source)] == [
        ("train", "train_00000000", 1),
        ("train", "train_00000001", 0),
        ("train", "train_00000002", 1),
        ("val", "val_00000003", 1),
        ("val", "val_00000004", 0),
        ("val", "val_00000005", 1),
    ]
    assert source.classes == ["n01", "n02"]


def test_prepare_reads_each_row_group_once(command, tmp_path, monkeypatch):
    for split, count in (("train", 12), ("val", 3)):
        columns = {"image": [jpeg(n) for n in range(count)], "label": list(range(count))}
        write(tmp_path / "files" / f"{split}.parquet", columns)
    groups: list[int] = []
    real = pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, columns: list[str]) -> Any:
        if columns == ["image"]:
            groups.append(group)
        return real(self, group, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    arguments = ("--source", str(tmp_path / "files"), "--to", str(tmp_path / "out"))
    said = command("prepare", "parquet", *arguments, "--workers", "1")
    assert said.code == 0, said.out + said.err
    shards = Shards(open_data_set(str(tmp_path / "out")), "train")
    found = {int(shards.rows["label"][i]): shards.read(i) for i in range(len(shards))}
    assert found == {n: jpeg(n) for n in range(12)}
    # Shuffled, but group by group: of rows in any order each would cost a whole group.
    assert sorted(groups) == [0, 0, 1, 1, 2, 3, 4, 5] and groups[:6] != list(range(6))


def test_columns_are_found_by_type_or_asked_for(tmp_path):
    path = write(tmp_path / "a.parquet", {"content": [jpeg(1)], "kind": [4], "file_name": ["x"]})
    assert "--split train" in refused(path)
    assert "--label-offset 0, or 1" in refused(path, "train")
    source = ParquetImages(path, "train", label_offset=1)
    (sample,) = scan(source)
    assert (sample.name, sample.label, source.read(sample)) == ("x", 3, jpeg(1))
    os.utime(path, (1, 1))
    with pytest.raises(Unfinished, match=r"a.parquet has changed since it was planned"):
        pickle.loads(pickle.dumps(source)).read(sample)

    write(path, {"a": [jpeg(1)], "b": [jpeg(2)], "x": [1], "y": [2]})
    assert "2 columns may hold bytes of images: a (binary), b (binary)" in refused(path, "train")
    assert "2 columns may hold labels" in refused(path, "train", "a")
    assert "no c; the columns are" in refused(path, "train", "c")
    assert "x holds no bytes of images" in refused(path, "train", "x")
    assert [s.label for s in scan(ParquetImages(path, "train", "b", "y", 2))] == [0]


def test_labels_that_are_missing_are_refused_before_anything_is_read(tmp_path):
    path = write(
        tmp_path / "train.parquet", {"image": [jpeg(n) for n in range(3)], "label": [0] * 3}
    )
    write(tmp_path / "train2" / "train.parquet", {"image": [jpeg(1)], "label": [None]})
    other = tmp_path / "train2" / "train.parquet"
    write(other, {"image": [jpeg(1)], "label": pa.array([None], pa.int64())})
    assert "row 0 of row group 0 has no label" in refused(tmp_path)
    write(other, {"image": [jpeg(1)], "size": [3]})
    assert f"{other} cannot be read, or has no column label" in refused(tmp_path)
    path.write_bytes(b"words")
    assert f"{path} is not a Parquet file" in refused(path)


def test_damage_and_arrays_are_no_images(tmp_path):
    images = [jpeg(1), b"\x93NUMPY\x01\x00 array", None]
    path = write(
        tmp_path / "train.parquet",
        {"image": images, "label": [0, 0, 0]},
        compression="none",
        use_dictionary=False,
    )
    source = ParquetImages(tmp_path)
    samples = scan(source)
    assert source.read(samples[0]) == jpeg(1)
    with pytest.raises(ValueError, match="NdarrayCodec"):
        source.read(samples[1])
    with pytest.raises(ValueError, match="row 0 of row group 1 holds no bytes"):
        source.read(samples[2])

    whole = path.read_bytes()
    place = whole.index(jpeg(1)) + 30
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    source = ParquetImages(tmp_path)
    with pytest.raises(OSError, match="CRC"):
        source.read(scan(source)[0])


def test_a_negative_label_is_named_with_file_and_row(tmp_path):
    path = write(
        tmp_path / "train.parquet", {"image": [jpeg(n) for n in range(4)], "label": [0, 1, 0, -1]}
    )
    assert f"{path}: row 1 of row group 1 has the label -1" in refused(tmp_path)
