"""TFRecords, against protobuf's own runtime, and Parquet as sources of `prepare`."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from distdl.datasets.parquet import ParquetImages
from distdl.datasets.reading import Shards, open_data_set
from distdl.datasets.source import Sample
from distdl.datasets.tfrecord import TFRecords, masked_crc
from distdl.util.errors import Unfinished, UserError
from tests.prepared import flip, jpeg, refusal

pytest.importorskip("google_crc32c")
pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
NAMES = ("n00000001", "n00000002", "n00000003")


def field(name: str, number: int, kind: str, label: str = "OPTIONAL") -> str:
    of = f'TYPE_MESSAGE type_name: ".tf.{kind}"' if kind[1].islower() else f"TYPE_{kind}"
    text = f'name: "{name}" number: {number} label: LABEL_{label} type: {of}'
    return f"field {{ {text} {'oneof_index: 0' * name.endswith('_list')} }}"


def message_type() -> Any:
    """`tf.train.Example`, from its definition: tensorflow/core/example/{example,feature}.proto."""
    lists = [("Bytes", "BYTES"), ("Float", "FLOAT"), ("Int64", "INT64")]
    kinds = [f"{name.lower()}_list" for name, _ in lists]
    members = [field(kind, i, f"{lists[i - 1][0]}List") for i, kind in enumerate(kinds, 1)]
    entry = field("key", 1, "STRING") + field("value", 2, "Feature")
    messages = {f"{n}List": field("value", 1, kind, "REPEATED") for n, kind in lists}
    messages["Feature"] = 'oneof_decl { name: "kind" }' + "".join(members)
    messages["Features"] = field("feature", 1, "Features.FeatureEntry", "REPEATED") + (
        f'nested_type {{ name: "FeatureEntry" options {{ map_entry: true }} {entry} }}'
    )
    messages["Example"] = field("features", 1, "Features")
    text = "".join(f'message_type {{ name: "{n}" {body} }}' for n, body in messages.items())
    file = descriptor_pb2.FileDescriptorProto(name="example", package="tf", syntax="proto3")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(text, file))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example"))


Example = message_type()


def example(values: dict[str, Any]) -> bytes:
    """Serialized as TensorFlow serializes it: bytes, floats or integers by name."""
    message = Example()
    for name, value in values.items():
        several = value if isinstance(value, list) else [value]
        kind = {bytes: "bytes_list", float: "float_list", int: "int64_list"}[type(several[0])]
        getattr(message.features.feature[name], kind).value.extend(several)
    return message.SerializeToString()


def write_records(path: Path, *records: bytes | dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for record in records:
            data = example(record) if isinstance(record, dict) else record
            header = struct.pack("<Q", len(data))
            file.write(header + struct.pack("<I", masked_crc(header)))
            file.write(data + struct.pack("<I", masked_crc(data)))
    return path


def inception(number: int, label: int, **others: Any) -> dict[str, Any]:
    """As build_imagenet_data.py of Inception writes it, and the reference architecture after it."""
    return {
        "image/height": 8,
        "image/colorspace": b"RGB",
        "image/class/label": label,
        "image/class/synset": b"n%08d" % label,
        "image/class/text": b"a kind of thing",
        "image/object/bbox/xmin": [0.1, 0.2],
        "image/filename": b"n%08d_%d.JPEG" % (label, number),
        "image/encoded": jpeg(number),
        **others,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("validation", 1)):
        for part in range(2):
            rows = [inception(10 * part + n, 1 + (10 * part + n) % 3) for n in range(count)]
            write_records(tmp_path / "records" / f"{split}-{part:05d}-of-00002", *rows)
    return tmp_path / "records"


def scan(source: Any, progress: Callable[[int, int], Any] = lambda done, total: None) -> Any:
    return list(source.scan(progress))


def shown(samples: list[Sample]) -> list[tuple[str, str, int]]:
    return [(sample.split, sample.name, sample.label) for sample in samples]


def test_inceptions_files_are_read_as_they_were_written(folder):
    source = TFRecords(folder)
    progress: list[tuple[int, int]] = []
    samples = scan(source, lambda *now: progress.append(now))
    numbers = (0, 1, 2, 10, 11, 12, 0, 10)
    assert shown(samples) == [
        ("train" if i < 6 else "val", f"{NAMES[n % 3]}_{n}.JPEG", n % 3)
        for i, n in enumerate(numbers)
    ]
    assert source.classes == [*NAMES]
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert progress[-1] == (total, total) and len(progress) == 8
    copy = pickle.loads(pickle.dumps(source))
    for sample, number in zip(samples, numbers, strict=True):
        assert copy.read(sample) == jpeg(number) and sample.bytes == len(jpeg(number))
    os.utime(folder / str(samples[0].where[0]), (1, 1))
    with pytest.raises(Unfinished):
        copy.read(samples[0])


def test_prepare_makes_shards_of_records(command, folder, tmp_path):
    arguments = ("--source", str(folder), "--to", str(tmp_path / "out"), "--workers", "1")
    result = command("prepare", "tfrecord", *arguments)
    assert result.code == 0 and "next:  python -m distdl" in result.out, result
    data = open_data_set(str(tmp_path / "out"))
    assert data.manifest.classes == NAMES
    shards = Shards(data, "train")
    stored = {shards.member(i).rpartition(":")[2]: shards.read(i) for i in range(len(shards))}
    assert stored == {f"{NAMES[n % 3]}_{n}.jpg": jpeg(n) for n in (0, 1, 2, 10, 11, 12)}
    assert data.manifest.made["settings"]["source"]["label_offset"] is None
    # Another interpretation of the same files is another data set.
    result = command("prepare", "tfrecord", *arguments, "--label-offset", "0")
    assert result.code == 2 and "label_offset was null, is 0" in result.err
    # Without validation images, no training is suggested.
    arguments = ("--source", str(folder), "--to", str(tmp_path / "one"), "--workers", "1")
    for _ in range(2):  # also for a complete data set
        result = command("prepare", "tfrecord", *arguments, "--split", "train")
        assert result.code == 0 and "next:  no training yet: validation images" in result.out
        assert "validation-*" in result.out and "next:  python" not in result.out


def test_labels_from_0_and_other_field_names(tmp_path):
    rows = [{"image": jpeg(n), "label": n, "file_name": b"a/%d.jpg" % n} for n in range(2)]
    write_records(tmp_path / "flowers-train.tfrecord-00000-of-00001", *rows)
    write_records(tmp_path / "flowers-test.tfrecord-00000-of-00001", rows[0])
    source = TFRecords(tmp_path)
    assert shown(scan(source)) == [("train", "a/0.jpg", 0), ("train", "a/1.jpg", 1)]
    assert source.classes == ["0", "1"]
    chosen = TFRecords(tmp_path, split="val", label_offset=0)
    assert [sample.split for sample in scan(chosen)] == ["val"] * 3
    source = TFRecords(write_records(tmp_path / "train-00000", inception(0, 7)), label_offset=1)
    assert [sample.label for sample in scan(source)] == [6]
    assert source.classes == [*"012345", "n00000007"]


ONE, OTHER = inception(0, 1), inception(1, 1, **{"image/class/synset": b"n02"})
SECOND = 16 + len(example(ONE))  # where the second record begins
SOURCE, OFFSET = "--source", "--label-offset"


@pytest.mark.parametrize(
    ("name", "records", "offset", "path", "what"),
    [
        ("train-00000", [inception(0, 7)], None, OFFSET, "labels go from 7 to 7"),
        ("train-00000", [ONE], 8, OFFSET, "is 8, but a sample has the label 1"),
        ("train-00000", [ONE, OTHER], None, SOURCE, "label 1 is n02, and n00000001 elsewhere"),
        ("train-00000", [{"text": b"words"}], None, SOURCE, "it has text, and no image/encoded"),
        ("train-00000", [{"image": b"1", "label": 0.5}], None, SOURCE, "no image/class/label"),
        ("train-00000", [b"no message"], None, SOURCE, "it is not an Example"),
        ("train-00000", [ONE, inception(1, -1)], None, SOURCE, f"byte {SECOND}, has the label -1"),
        ("none/train-00000", [ONE], None, SOURCE, "no such folder"),
        ("words.txt", [], None, SOURCE, "holds no file named *.tfrecord"),
        ("part-00000", [ONE], None, SOURCE, "neither train nor validation"),
        ("test-00000", [ONE], None, SOURCE, "files of a test set only"),
    ],
)
def test_records_that_cannot_be_prepared(name, records, offset, path, what, tmp_path):
    write_records(tmp_path / Path(name).name, *records)
    problem = refusal(lambda: scan(TFRecords((tmp_path / name).parent, label_offset=offset)))
    assert problem.path == path and what in problem.what


def test_damage_is_reported_with_its_position(folder):
    path = folder / "train-00001-of-00002"
    intact = path.read_bytes()
    second = 16 + struct.unpack("<Q", intact[:8])[0]
    for data, position, what in (
        (intact[:-3], "", "it is cut short"),
        (intact[:second] + b"\0" + intact[second + 1 :], second, "it is not a record"),
        (b"\x1f\x8b" + intact, 0, "it is compressed"),
    ):
        path.write_bytes(data)
        problem = refusal(lambda: scan(TFRecords(folder)))
        assert f"{path}, record at byte {position}" in problem.what and what in problem.what
    # In an image: no scan looks there, and no read returns it.
    path.write_bytes(intact)
    flip(path, intact.index(jpeg(11)) + 20)
    source = TFRecords(folder)
    samples = scan(source)
    with pytest.raises(ValueError, match=f"{path.name}: the record at byte {second} is damaged"):
        source.read(samples[4])
    assert source.read(samples[5]) == jpeg(12)


KEYS = st.sampled_from(["image/encoded", "image/class/label", "image/filename", "image/a", "b"])
INTEGERS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.one_of(
    st.binary(max_size=300),
    st.lists(INTEGERS, min_size=1, max_size=3),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("file") / "train-00000"


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, VALUES), st.binary(max_size=100), st.integers(0, 2**63 - 1))
def test_every_example_is_read_as_protobuf_reads_it(file, others, image, label):
    values = {**others, "image/encoded": image, "image/class/label": label}
    values.pop("image/filename", None)
    source = TFRecords(write_records(file, values), "train", label)
    (sample,) = scan(source)
    assert (source.read(sample), shown([sample])) == (image, [("train", "train_00000000", 0)])


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.binary(max_size=60))
def test_no_bytes_break_the_reader(file, chance, noise):
    data = bytearray(example(inception(3, 4)))
    for byte in noise:
        data[chance.randrange(len(data))] = byte
    # Nonsense may be read from nonsense, but no other error may be raised.
    with suppress(UserError):
        scan(TFRecords(write_records(file, bytes(data)), "train"))


# Parquet. Statistics would repeat the smallest and the largest image in each page's header.
OPTIONS = {"row_group_size": 2, "write_page_checksum": True, "write_statistics": False}


def write(path: Path, columns: dict[str, Any], metadata: Any = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"huggingface": json.dumps(metadata)} if metadata else None
    pq.write_table(pa.table(columns, metadata=metadata), path, **OPTIONS, **options)
    return path


def test_hugging_faces_images_with_their_names(tmp_path):
    names = ["cat", "dog", "emu"]
    features = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    for split, numbers in (("train", range(5)), ("validation", range(5, 7)), ("test", [0])):
        rows = [{"bytes": jpeg(n), "path": f"{n}.jpg"} for n in numbers]
        labels = [-1 if split == "test" else 1 + n % 2 for n in numbers]
        path = tmp_path / "data" / f"{split}-00000-of-00001.parquet"
        write(path, {"label": labels, "image": rows}, features)
    source = ParquetImages(tmp_path)
    progress: list[tuple[int, int]] = []
    samples = scan(source, lambda *now: progress.append(now))
    assert shown(samples) == [
        ("train" if n < 5 else "val", f"{n}.jpg", 1 + n % 2) for n in range(7)
    ]
    # Label 0 has no sample, but the schema names it.
    assert source.classes == names and progress[-1] == (7, 7)
    assert all(len(jpeg(0)) / 2 < s.bytes < 3 * len(jpeg(0)) for s in samples)
    copy = pickle.loads(pickle.dumps(source))
    for number in (6, 0, 3, 4, 1):
        assert copy.read(samples[number]) == jpeg(number)


def test_petastorms_columns_in_folders_named_by_split(tmp_path):
    nouns = ["n02", "n01", "n02"]
    columns = {"noun_id": nouns, "text": [*"aba"], "image": [jpeg(n) for n in range(3)]}
    for split in ("train", "val"):
        write(tmp_path / split / "part-00000-of-00001.parquet", columns)
        (tmp_path / split / "_metadata.parquet").write_bytes(b"petastorm's own")
    assert "no column holds labels" in refusal(ParquetImages, tmp_path).what
    source = ParquetImages(tmp_path, label_column="noun_id")
    splits = ["train"] * 3 + ["val"] * 3
    assert shown(scan(source)) == [
        (splits[n], f"{splits[n]}_{n:08d}", [1, 0, 1][n % 3]) for n in range(6)
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
    result = command("prepare", "parquet", *arguments, "--workers", "1")
    assert result.code == 0, result
    shards = Shards(open_data_set(str(tmp_path / "out")), "train")
    stored = {int(shards.rows["label"][i]): shards.read(i) for i in range(len(shards))}
    assert stored == {n: jpeg(n) for n in range(12)}
    # Shuffled, but group by group: of rows in any order each would cost a whole group.
    assert sorted(groups) == [0, 0, 1, 1, 2, 3, 4, 5] and groups[:6] != list(range(6))


def test_columns_are_found_by_type(tmp_path):
    path = write(tmp_path / "a.parquet", {"content": [jpeg(1)], "kind": [4], "file_name": ["x"]})
    source = ParquetImages(path, "train", label_offset=1)
    (sample,) = scan(source)
    assert (sample.name, sample.label, source.read(sample)) == ("x", 3, jpeg(1))
    os.utime(path, (1, 1))
    with pytest.raises(Unfinished):
        pickle.loads(pickle.dumps(source)).read(sample)
    write(path, {"a": [jpeg(1)], "b": [jpeg(2)], "x": [1], "y": [2]})
    assert [s.label for s in scan(ParquetImages(path, "train", "b", "y", 2))] == [0]


TWO = {"a": [b"1"], "b": [b"2"], "x": [1], "y": [2]}
IMAGE, LABEL = "--image-column", "--label-column"


@pytest.mark.parametrize(
    ("columns", "arguments", "path", "what"),
    [
        (TWO, [], IMAGE, "2 columns may hold bytes of images: a (binary), b (binary)"),
        (TWO, ["a"], LABEL, "2 columns may hold labels"),
        (TWO, ["c"], IMAGE, "no column c; the columns are"),
        (TWO, ["x"], IMAGE, "x holds no bytes of images"),
        ({"image": [b"1"], "label": [-1]}, [], SOURCE, "row 0 of row group 0 has the label -1"),
        ({"image": [b"1"], "label": pa.array([None], "int64")}, [], SOURCE, "group 0 has no label"),
        ({"image": [b"1"], "size": [3]}, [], SOURCE, "has no column label"),
        (None, [], SOURCE, "is not a Parquet file"),
    ],
)
def test_columns_that_cannot_be_prepared(columns, arguments, path, what, tmp_path):
    if path == SOURCE:  # the first file is intact
        write(tmp_path / "train.parquet", {"image": [b"1"], "label": [0]})
    file = tmp_path / "train2.parquet"
    write(file, columns) if columns else file.write_bytes(b"words")
    problem = refusal(lambda: scan(ParquetImages(tmp_path, "train", *arguments)))
    assert problem.path == path and what in problem.what


def test_damage_and_arrays_are_no_images(tmp_path):
    columns = {"image": [jpeg(1), b"\x93NUMPY\x01\x00 array", None], "label": [0] * 3}
    path = tmp_path / "train.parquet"
    write(path, columns, compression="none", use_dictionary=False)
    source = ParquetImages(tmp_path)
    samples = scan(source)
    assert source.read(samples[0]) == jpeg(1)
    with pytest.raises(ValueError, match="NdarrayCodec"):
        source.read(samples[1])
    with pytest.raises(ValueError, match="row 0 of row group 1 holds no image bytes"):
        source.read(samples[2])
    flip(path, path.read_bytes().index(jpeg(1)) + 30)
    source = ParquetImages(tmp_path)
    with pytest.raises(OSError, match="CRC"):
        source.read(scan(source)[0])
