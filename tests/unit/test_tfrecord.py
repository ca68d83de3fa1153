"""TFRecords as a source, against protobuf's own runtime, which writes what is read here."""

from __future__ import annotations

import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from distdl.datasets.reading import Shards, open_data_set
from distdl.datasets.source import Sample
from distdl.datasets.tfrecord import TFRecords, _example, masked_crc
from distdl.util.errors import Unfinished, UserError

pytest.importorskip("google_crc32c")


def message_types() -> Any:
    """`tf.train.Example`, from its definition: tensorflow/core/example/{example,feature}.proto."""
    file = descriptor_pb2.FileDescriptorProto(
        name="example.proto", package="tensorflow", syntax="proto3"
    )
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(parent: Any, name: str, *fields: tuple[str, int, int, int, str]) -> Any:
        added = parent.add(name=name)
        for field, number, kind, label, of in fields:
            added.field.add(name=field, number=number, type=kind, label=label, type_name=of or None)
        return added

    one, many, inside = 1, 3, kinds.TYPE_MESSAGE
    top = file.message_type
    lists = {"bytes": kinds.TYPE_BYTES, "float": kinds.TYPE_FLOAT, "int64": kinds.TYPE_INT64}
    members = []
    for number, (name, kind) in enumerate(lists.items(), 1):
        message(top, f"{name.capitalize()}List", ("value", 1, kind, many, ""))
        of = f".tensorflow.{name.capitalize()}List"
        members.append((f"{name}_list", number, inside, one, of))
    feature = message(top, "Feature", *members)
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message(
        top, "Features", ("feature", 1, inside, many, ".tensorflow.Features.FeatureEntry")
    )
    entry = message(
        features.nested_type,
        "FeatureEntry",
        ("key", 1, kinds.TYPE_STRING, one, ""),
        ("value", 2, inside, one, ".tensorflow.Feature"),
    )
    entry.options.map_entry = True
    message(top, "Example", ("features", 1, inside, one, ".tensorflow.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


Example = message_types()


def example(values: dict[str, Any]) -> bytes:
    """Serialized as TensorFlow serializes it: bytes, floats or whole numbers by name."""
    made = Example()
    for name, value in values.items():
        feature = made.features.feature[name]
        several = value if isinstance(value, list) else [value]
        if isinstance(several[0], bytes):
            feature.bytes_list.value.extend(several)
        elif isinstance(several[0], float):
            feature.float_list.value.extend(several)
        else:
            feature.int64_list.value.extend(several)
    return made.SerializeToString()


def write(path: Path, records: list[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for record in records:
            header = struct.pack("<Q", len(record))
            file.write(header + struct.pack("<I", masked_crc(header)))
            file.write(record + struct.pack("<I", masked_crc(record)))
    return path


def jpeg(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8 + number, 8), (number * 9 % 255, 80, 10)).save(buffer, "JPEG")
    return buffer.getvalue()


def inception(number: int, label: int) -> dict[str, Any]:
    """As build_imagenet_data.py of Inception writes it, and the reference architecture after it."""
    return {
        "image/height": 8,
        "image/width": 8 + number,
        "image/colorspace": b"RGB",
        "image/channels": 3,
        "image/class/label": label,
        "image/class/synset": b"n%08d" % label,
        "image/class/text": b"a kind of thing",
        "image/object/bbox/xmin": [0.1, 0.2],
        "image/format": b"JPEG",
        "image/filename": b"n%08d_%d.JPEG" % (label, number),
        "image/encoded": jpeg(number),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, count in (("train", 3), ("validation", 1)):
        for part in range(2):
            numbers = [10 * part + n for n in range(count)]
            rows = [example(inception(n, 1 + n % 3)) for n in numbers]
            write(tmp_path / "records" / f"{split}-{part:05d}-of-00002", rows)
    return tmp_path / "records"


def scan(source: TFRecords) -> list[Sample]:
    return list(source.scan(lambda done, total: None))


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(UserError) as error:
        scan(TFRecords(path, **options))
    return str(error.value)


def test_inceptions_files_are_read_as_they_were_written(folder):
    source = TFRecords(folder)
    passed: list[tuple[int, int]] = []
    samples = list(source.scan(lambda *now: passed.append(now)))
    assert [(s.split, s.name, s.label) for s in samples] == [
        ("train", "n00000001_0.JPEG", 0),
        ("train", "n00000002_1.JPEG", 1),
        ("train", "n00000003_2.JPEG", 2),
        ("train", "n00000002_10.JPEG", 1),
        ("train", "n00000003_11.JPEG", 2),
        ("train", "n00000001_12.JPEG", 0),
        ("val", "n00000001_0.JPEG", 0),
        ("val", "n00000002_10.JPEG", 1),
    ]
    assert source.classes == ["n00000001", "n00000002", "n00000003"]
    total = sum(path.stat().st_size for path in folder.iterdir())
    assert passed[-1] == (total, total) and len(passed) == 8
    elsewhere = pickle.loads(pickle.dumps(source))
    for sample, number in zip(samples, (0, 1, 2, 10, 11, 12, 0, 10), strict=True):
        assert elsewhere.read(sample) == jpeg(number) and sample.bytes == len(jpeg(number))
    os.utime(folder / str(samples[0].where[0]), (1, 1))
    with pytest.raises(Unfinished, match="has changed since it was planned"):
        elsewhere.read(samples[0])


def test_prepare_makes_shards_of_them(command, folder, tmp_path):
    arguments = ("--source", str(folder), "--to", str(tmp_path / "out"), "--workers", "1")
    said = command("prepare", "tfrecord", *arguments)
    assert said.code == 0, said.out + said.err
    data = open_data_set(str(tmp_path / "out"))
    assert data.manifest.classes == ("n00000001", "n00000002", "n00000003")
    shards = Shards(data, "train")
    found = {shards.member(i).rpartition(":")[2]: shards.read(i) for i in range(len(shards))}
    numbers = {0: 1, 1: 2, 2: 3, 10: 2, 11: 3, 12: 1}
    assert found == {f"n{label:08d}_{n}.jpg": jpeg(n) for n, label in numbers.items()}
    assert data.manifest.made["settings"]["source"]["label_offset"] is None
    # Another reading of the same files is another data set.
    said = command("prepare", "tfrecord", *arguments, "--label-offset", "0")
    assert said.code == 2 and "label_offset was null, is 0" in said.err


def test_labels_from_0_and_other_names_of_the_fields(tmp_path):
    rows = [{"image": jpeg(n), "label": n, "file_name": b"a/%d.jpg" % n} for n in range(2)]
    write(tmp_path / "flowers-train.tfrecord-00000-of-00001", [example(row) for row in rows])
    write(tmp_path / "flowers-test.tfrecord-00000-of-00001", [example(rows[0])])
    source = TFRecords(tmp_path)
    assert [(s.split, s.name, s.label) for s in scan(source)] == [
        ("train", "a/0.jpg", 0),
        ("train", "a/1.jpg", 1),
    ]
    assert source.classes == ["0", "1"]
    chosen = TFRecords(tmp_path, split="val", label_offset=0)
    assert [s.split for s in scan(chosen)] == ["val"] * 3


def test_labels_that_begin_elsewhere_are_asked_about(tmp_path):
    write(tmp_path / "train-00000", [example(inception(0, 7))])
    assert "--label-offset 0, or 1" in refused(tmp_path)
    assert "is 8, but a sample has the label 7" in refused(tmp_path, label_offset=8)
    source = TFRecords(tmp_path, label_offset=1)
    assert [s.label for s in scan(source)] == [6]
    assert source.classes == [*"012345", "n00000007"]


def test_names_that_contradict_labels_are_refused(tmp_path):
    one, other = inception(0, 1), inception(1, 1)
    other["image/class/synset"] = b"n02"
    write(tmp_path / "train-00000", [example(one), example(other)])
    assert "label 1 is n02, and n00000001 elsewhere" in refused(tmp_path)


def test_damage_is_named_with_its_place(folder):
    path = folder / "train-00001-of-00002"
    whole = path.read_bytes()
    second = 16 + struct.unpack("<Q", whole[:8])[0]

    path.write_bytes(whole[:-3])
    assert f"{path}, record at byte" in refused(folder) and "cut short" in refused(folder)

    path.write_bytes(whole[:second] + b"\0" + whole[second + 1 :])
    assert f"{path}, record at byte {second}: it is not a record" in refused(folder)

    path.write_bytes(b"\x1f\x8b" + whole)
    assert "compressed" in refused(folder) and "gzip -d" in refused(folder)

    # In an image: no scan looks there, and no reading passes it on.
    place = whole.index(jpeg(11)) + 20
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    source = TFRecords(folder)
    samples = scan(source)
    with pytest.raises(ValueError, match=f"{path.name}: the record at byte {second} is damaged"):
        source.read(samples[4])
    assert source.read(samples[5]) == jpeg(12)


def test_what_is_no_image_is_refused(tmp_path):
    write(tmp_path / "train-00000", [example({"text": b"words"})])
    assert "it has text, and no image/encoded" in refused(tmp_path)
    write(tmp_path / "train-00000", [example({"image": jpeg(1), "label": 0.5})])
    assert "and no image/class/label" in refused(tmp_path)
    write(tmp_path / "train-00000", [b"no message"])
    assert "no Example" in refused(tmp_path)


def test_files_that_say_no_split_are_refused(tmp_path):
    assert "no such folder" in refused(tmp_path / "none")
    assert "holds no file named *.tfrecord, " in refused(tmp_path)
    write(tmp_path / "part-00000", [example(inception(0, 1))])
    assert "--split train" in refused(tmp_path)
    (tmp_path / "part-00000").rename(tmp_path / "test-00000")
    assert "test set only" in refused(tmp_path)


KEYS = st.sampled_from(["image/encoded", "image/class/label", "image/filename", "image/a", "b"])
VALUES = st.one_of(
    st.binary(max_size=300),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(KEYS, VALUES), st.binary(max_size=100), st.integers(-(2**63), 2**63 - 1))
def test_every_example_is_read_as_protobuf_reads_it(others, image, label):
    values = {**others, "image/encoded": image, "image/class/label": label}
    values.pop("image/filename", None)
    data = example(values)
    (start, end), found = _example(data, (0, len(data)))
    assert (data[start:end], found) == (image, (label, "", ""))


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.binary(max_size=60))
def test_no_bytes_break_the_reader(chance, noise):
    data = bytearray(example(inception(3, 4)))
    for byte in noise:
        data[chance.randrange(len(data))] = byte
    # Nonsense may be read from nonsense (its checksum tells), but nothing else may be raised.
    try:
        (start, end), _ = _example(bytes(data), (0, len(data)))
        assert 0 <= start <= end <= len(data)
    except (ValueError, IndexError):
        pass


def test_without_validation_images_no_training_is_suggested(command, folder, tmp_path):
    arguments = ("--source", str(folder), "--to", str(tmp_path / "out"), "--workers", "1")
    for _ in range(2):  # also of what is prepared already
        said = command("prepare", "tfrecord", *arguments, "--split", "train")
        assert said.code == 0 and "next:  no training yet: validation images" in said.out
        assert "validation-*" in said.out and "next:  python" not in said.out
    said = command("prepare", "tfrecord", "--source", str(folder), "--to", str(tmp_path / "both"))
    assert "next:  python -m distdl" in said.out and "no training yet" not in said.out


def test_a_negative_label_is_named_with_its_place(tmp_path):
    write(tmp_path / "train-00000", [example(inception(0, 1)), example(inception(1, -1))])
    second = 16 + len(example(inception(0, 1)))
    said = refused(tmp_path)
    assert f"train-00000, record at byte {second}, has the label -1" in said and "test" in said
