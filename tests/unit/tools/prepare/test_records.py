"""TFRecords and Parquet as sources of `prepare`."""

import io
import json
import os
import pickle
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.summary.writer.record_writer import RecordWriter

from distdl.datasets.reading import Shards, open_data_set
from distdl.tools.prepare.parquet import ParquetImages
from distdl.tools.prepare.tfrecord import TFRecords
from distdl.util.errors import Unfinished, UserError
from tests.prepared import flip, jpeg, refusal

pytest.importorskip("google_crc32c")
pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
ONE_WORKER = ("--workers", "1")
NAMES = ("n00000001", "n00000002", "n00000003")


def varint(value):
    """As protobuf writes an integer: 7 bits in a byte; a negative one has 64 bits."""
    value &= 2**64 - 1
    parts = []
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(values):
    """A `tf.train.Example` (the bytes are those of protobuf): bytes, floats, integers by name."""
    entries = b""
    for name, value in values.items():
        several = value if isinstance(value, list) else [value]
        if isinstance(several[0], bytes):
            feature = field(1, b"".join(field(1, each) for each in several))
        elif isinstance(several[0], float):
            feature = field(2, field(1, struct.pack(f"<{len(several)}f", *several)))
        else:
            feature = field(3, field(1, b"".join(map(varint, several))))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def framed(*records):
    """The content of a file."""
    content = io.BytesIO()
    for record in records:
        data = example(record) if isinstance(record, dict) else record
        RecordWriter(content).write(data)
    return content.getvalue()


def write_records(path, *records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(framed(*records))
    return path


# Statistics would repeat the smallest and the largest image in each page's header.
OPTIONS = {"row_group_size": 2, "write_page_checksum": True, "write_statistics": False}


def write_parquet(path, columns, metadata=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns, metadata=metadata), path, **OPTIONS, **options)
    return path


def name_of(number):
    return f"{NAMES[number % 3]}_{number}.JPEG"


def inception(number, label, **others):
    """As build_imagenet_data.py of Inception writes it."""
    synset = b"n%08d" % label
    name = name_of(number).encode()
    names = {"image/class/label": label, "image/class/synset": synset, "image/filename": name}
    return {**names, "image/encoded": jpeg(number), **others}


def write_inception(folder):
    rows = [inception(number, 1 + number % 3) for number in range(7)]
    parts = {"train-00000": rows[:3], "train-00001": rows[3:6], "val-00000": rows[6:]}
    for name, part in parts.items():
        write_records(folder / f"{name}-of-00002", *part)
    return TFRecords(folder)


def write_hugging_face(folder):
    features = {"info": {"features": {"label": {"names": NAMES, "_type": "ClassLabel"}}}}
    for split, numbers in (("train", range(6)), ("validation", [6]), ("test", [0])):
        images = [{"bytes": jpeg(number), "path": name_of(number)} for number in numbers]
        labels = [-1 if split == "test" else number % 3 for number in numbers]
        columns = {"label": labels, "image": images}
        metadata = json.dumps(features)
        path = folder / "data" / f"{split}-00000-of-00001.parquet"
        write_parquet(path, columns, {"huggingface": metadata})
    return ParquetImages(folder)


def scan(source, progress=lambda done, total: None):
    return list(source.scan(progress))


def shown(samples):
    return [(sample.split, sample.name, sample.label) for sample in samples]


@pytest.mark.parametrize("write", [write_inception, write_hugging_face])
def test_files_are_read_as_others_write_them(write, tmp_path):
    source = write(tmp_path)
    progress = []
    samples = scan(source, lambda *now: progress.append(now))
    splits = ["train"] * 6 + ["val"]
    assert shown(samples) == [(split, name_of(n), n % 3) for n, split in enumerate(splits)]
    assert source.classes == [*NAMES]
    assert progress[-1][0] == progress[-1][1] > 0
    copy = pickle.loads(pickle.dumps(source))
    for number in (6, 0, 1, 2, 3, 4, 5):
        assert copy.read(samples[number]) == jpeg(number)
        assert len(jpeg(0)) / 2 < samples[number].bytes < 3 * len(jpeg(0))
    for path in tmp_path.rglob("*-of-*"):
        os.utime(path, (1, 1))
    with pytest.raises(Unfinished):
        copy.read(samples[0])


def test_without_validation_images_no_training_is_suggested(command, tmp_path):
    write_inception(tmp_path / "files")
    arguments = ("--source", str(tmp_path / "files"), "--to", str(tmp_path / "out"), *ONE_WORKER)
    for _ in range(2):  # also for a complete data set
        result = command("prepare", "tfrecord", *arguments, "--split", "train")
        assert result.code == 0
        assert "next:  no training yet: validation images" in result.out
        assert "validation-*" in result.out
        assert "next:  python" not in result.out
    # Another interpretation of the same files is another data set.
    result = command("prepare", "tfrecord", *arguments, "--split", "train", "--label-offset", "0")
    assert result.code == 2
    assert "label_offset was null, is 0" in result.err


def test_labels_from_0_and_other_field_names(tmp_path):
    rows = [{"image": jpeg(n), "label": n, "file_name": b"a/%d.jpg" % n} for n in range(2)]
    write_records(tmp_path / "flowers-train.tfrecord-00000-of-00001", *rows)
    write_records(tmp_path / "flowers-test.tfrecord-00000-of-00001", rows[0])
    source = TFRecords(tmp_path)
    assert shown(scan(source)) == [("train", "a/0.jpg", 0), ("train", "a/1.jpg", 1)]
    assert source.classes == ["0", "1"]
    assert [sample.split for sample in scan(TFRecords(tmp_path, split="val"))] == ["val"] * 3
    seven = write_records(tmp_path / "train-00000", inception(0, 7))
    assert "but a sample has the label 7" in refusal(scan, TFRecords(seven, label_offset=8)).what
    source = TFRecords(seven, label_offset=1)
    assert [sample.label for sample in scan(source)] == [6]
    assert source.classes == [*"012345", "n00000007"]


ONE = inception(0, 1)
OTHER = inception(1, 1, **{"image/class/synset": b"n02"})
TWO = framed(ONE, ONE)
SECOND = len(TWO) // 2  # where the second record begins
REFUSED = {
    "--label-offset: labels go from 7 to 7": framed(inception(0, 7)),
    "--source: train-00000: label 1 is n02, and n00000001 elsewhere": framed(ONE, OTHER),
    "it has text, and no image/encoded": framed({"text": b"words"}),
    "no image/class/label": framed({"image": b"1", "label": 0.5}),
    "it is not an Example": framed(b"no message"),
    f"record at byte {SECOND}, has the label -1": framed(ONE, inception(1, -1)),
    "it is cut short": TWO[:-3],
    f"record at byte {SECOND}: it is not a record": TWO[:SECOND] + bytes(1) + TWO[SECOND + 1 :],
    "record at byte 0: it is compressed": b"\x1f\x8b" + TWO,
}


@pytest.mark.parametrize("text", REFUSED)
def test_records_that_cannot_be_prepared(text, tmp_path):
    (tmp_path / "train-00000").write_bytes(REFUSED[text])
    assert text in str(refusal(lambda: scan(TFRecords(tmp_path))))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("words.txt", "holds no file named *.tfrecord"),
        ("part-00000", "neither train nor validation"),
        ("test-00000", "files of a test set only"),
    ],
)
def test_names_that_say_too_little(name, text, tmp_path):
    write_records(tmp_path / name, ONE)
    assert text in str(refusal(TFRecords, tmp_path))
    assert "no such folder" in str(refusal(TFRecords, tmp_path / "none"))


KEYS = st.sampled_from(["image/encoded", "image/class/label", "image/a", "b"])
INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3)
VALUES = st.one_of(st.binary(max_size=300), INTEGERS, FLOATS)


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(KEYS, VALUES),
    st.binary(max_size=100),
    st.integers(0, 2**63 - 1),
    st.dictionaries(st.integers(0, 999), st.integers(0, 255)),
)
def test_every_example_is_read_and_no_bytes_break_the_reader(others, image, label, noise):
    values = {**others, "image/encoded": image, "image/class/label": label}
    with tempfile.TemporaryDirectory() as folder:
        source = TFRecords(write_records(Path(folder, "file"), values), "train", label)
        (sample,) = scan(source)
        assert source.read(sample) == image
        assert shown([sample]) == [("train", "train_00000000", 0)]
        data = bytearray(example(values))
        for place, byte in noise.items():
            data[place % len(data)] = byte
        with suppress(UserError):  # nonsense may be read from nonsense
            scan(TFRecords(write_records(Path(folder, "file"), bytes(data)), "train"))


def test_petastorms_columns_in_folders_named_by_split(command, tmp_path):
    """Each row group is read once: shuffled, but together."""
    source = tmp_path / "files"
    for split, count in (("train", 12), ("val", 3)):
        columns = {"noun_id": [f"n{n:02d}" for n in range(12)][:count], "text": ["a"] * count}
        columns["image"] = [jpeg(n) for n in range(count)]
        write_parquet(source / split / "part-00000-of-00001.parquet", columns)
        (source / split / "_metadata.parquet").write_bytes(b"petastorm's own")
    arguments = ("prepare", "parquet", "--source", str(source), "--to", str(tmp_path / "out"))
    assert "no column holds labels" in command(*arguments).err
    with mock.patch.object(
        pq.ParquetFile, "read_row_group", autospec=True, side_effect=pq.ParquetFile.read_row_group
    ) as reads:
        result = command(*arguments, "--label-column", "noun_id", "--workers", "1")
    assert result.code == 0, result
    assert "next:  python -m distdl" in result.out, result
    data = open_data_set(str(tmp_path / "out"))
    shards = Shards(data, "train")
    stored = {int(shards.rows["label"][i]): shards.read(i) for i in range(len(shards))}
    assert stored == {n: jpeg(n) for n in range(12)}
    assert data.manifest.classes == tuple(f"n{n:02d}" for n in range(12))
    groups = [call.args[1] for call in reads.call_args_list if call.kwargs["columns"] == ["image"]]
    assert sorted(groups) == [0, 0, 1, 1, 2, 3, 4, 5]
    assert groups[:6] != list(range(6))


COLUMNS = {"a": [b"1"], "b": [b"2"], "x": [1], "y": [2]}


def test_columns_are_found_by_type_or_named(tmp_path):
    columns = {"content": [jpeg(1)], "kind": [4], "file_name": ["x"]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    source = ParquetImages(path, "train", label_offset=1)
    (sample,) = scan(source)
    assert (sample.name, sample.label, source.read(sample)) == ("x", 3, jpeg(1))
    source = ParquetImages(write_parquet(path, COLUMNS), "train", "b", "y", 2)
    (sample,) = scan(source)
    assert (sample.label, source.read(sample)) == (0, b"2")


@pytest.mark.parametrize(
    ("columns", "arguments", "text"),
    [
        (COLUMNS, [], "--image-column: 2 columns may hold bytes of images: a (binary), b (binary)"),
        (COLUMNS, ["a"], "--label-column: 2 columns may hold labels"),
        (COLUMNS, ["c"], "--image-column: no column c; the columns are"),
        (COLUMNS, ["x"], "--image-column: x holds no bytes of images"),
        ({"image": [b"1"], "label": [-1]}, [], "row 0 of row group 0 has the label -1"),
        ({"image": [b"1"], "label": pa.array([None], "int64")}, [], "row group 0 has no label"),
        ({"image": [b"1"], "size": [3]}, [], "has no column label"),
        (None, [], "is not a Parquet file"),
    ],
)
def test_columns_that_cannot_be_prepared(columns, arguments, text, tmp_path):
    if columns is not COLUMNS:  # the first file is intact
        write_parquet(tmp_path / "train.parquet", {"image": [b"1"], "label": [0]})
        (tmp_path / "train2.parquet").write_bytes(b"words")
    if columns:
        write_parquet(tmp_path / "train2.parquet", columns)
    assert text in str(refusal(lambda: scan(ParquetImages(tmp_path, "train", *arguments))))


def test_damage_and_arrays_are_no_images(tmp_path):
    source = write_inception(tmp_path)
    path = tmp_path / "train-00001-of-00002"
    flip(path, path.read_bytes().index(jpeg(4)) + 20)  # no scan looks there
    with pytest.raises(ValueError, match=f"{path.name}: the record at byte .* is damaged"):
        source.read(scan(source)[4])
    path = tmp_path / "train.parquet"
    for image, error, reason in (
        (b"\x93NUMPY\x01\x00 array", ValueError, "NdarrayCodec"),
        (None, ValueError, "row 0 of row group 0 holds no image bytes"),
        (jpeg(1), OSError, "CRC"),
    ):
        columns = {"image": pa.array([image], "binary"), "label": [0]}
        write_parquet(path, columns, compression="none", use_dictionary=False)
        if image == jpeg(1):
            flip(path, path.read_bytes().index(image) + 30)
        source = ParquetImages(path)
        (sample,) = scan(source)
        with pytest.raises(error, match=reason):
            source.read(sample)
