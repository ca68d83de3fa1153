"""Reads a model folder that may come from somebody else, so that nothing in it is executed.

The folder's checksums lie beside its files, so they find damage and no intent. torch.export.load
executes what an archive says in many places: sympy evaluates expressions of sizes, names of nodes
and guards are written into Python code, operators and types are looked up by name, constants and
example inputs may be pickles, and compiled libraries are opened. So before torch or onnxruntime
sees the folder:

- `model.json` has the keys, types and ranges that distdl writes, and names files in the folder.
- An archive (`model.pt2`) has the members that distdl writes, each once, uncompressed and complete.
  Its JSON has no key, kind of value, operator, name or expression that distdl does not write
  (`exported_program`). torch gets a new archive that holds only what was checked, because its
  reader and Python's may take the same bytes for different members.
- A graph (`model.onnx`) has ONNX's own operators alone, and all weights inside the file.
- The model takes and gives what `model.json` says, such as images of its size, and a number for
  each class.
- Weights (`model.safetensors`) come with the network's code. It runs only if whoever starts distdl
  says so (`scorer`): nothing in the folder can.

It does not bound how long a model takes to answer.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from distdl.domains.answers import Answers, Shape
from distdl.domains.served import ANSWERS, UNNAMED
from distdl.tools.serving.exported_program import PAYLOADS, PROGRAM
from distdl.util.json_rules import Unsafe, mapping, one_of, text, whole

DESCRIPTION = "model.json"
# The model of a folder. The last one holds weights alone, and the network's code lies beside it.
MODELS = ("model.pt2", "model.onnx", "model.safetensors")
MOST_PIXELS = 2**31 - 1  # of an image, whatever the run allowed
MOST_JSON = 256 * 2**20  # bytes
_BYTES_OF = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 12: 1, 13: 2}  # by torch's dtype
_UINT8 = 1

# ---- model.json ------------------------------------------------------------------------------


def read(folder: Path) -> tuple[dict[str, Any], str, bytes]:
    """The description of a folder, and its model's name and bytes.

    Raises:
        ValueError, OSError: A file is missing or damaged, or the description cannot be true.
    """
    file = inside(folder, DESCRIPTION)
    if file.stat().st_size > MOST_JSON:
        raise Unsafe(f"{DESCRIPTION} is too large")
    description = _json(file.read_bytes(), DESCRIPTION)
    if not isinstance(description, dict):
        raise Unsafe(f"{DESCRIPTION} is not a mapping")
    named = one_of(*ANSWERS)(description.get("domain", UNNAMED), f"{DESCRIPTION}: domain")
    domain = ANSWERS[named]
    required = {**domain.rules, "files": mapping(_file_name, text(r"[0-9a-f]{64}", "a sha256"))}
    # Older exports have no limit of pixels.
    optional = {**domain.options, "max_pixels": whole(1, MOST_PIXELS)}
    for key, rule in {**required, **optional}.items():
        if key in description:
            description[key] = rule(description[key], f"{DESCRIPTION}: {key}")
        elif key in required:
            raise Unsafe(f"{DESCRIPTION}: {key} is missing")
    description["domain"] = named
    models = [name for name in MODELS if name in description["files"]]
    if len(models) != 1:
        raise Unsafe(f"{DESCRIPTION}: files names {len(models)} models, and must name one")
    for name, digest in description["files"].items():
        if name != models[0] and _digest(inside(folder, name)) != digest:
            raise Unsafe(f"{name} is missing or damaged")
    data = inside(folder, models[0]).read_bytes()  # read once: what is checked is what is used
    if hashlib.sha256(data).hexdigest() != description["files"][models[0]]:
        raise Unsafe(f"{models[0]} is missing or damaged")
    return description, models[0], data


def answers_of(description: Mapping[str, Any]) -> Answers[Any, Any]:
    """What answers by a description that `read` has checked. Raises Unsafe."""
    try:
        return ANSWERS[description["domain"]](description)
    except ValueError as error:
        raise Unsafe(f"{DESCRIPTION}: {error}") from None


def inside(folder: Path, name: str) -> Path:
    """A regular file of the folder, to which no link leads from outside of it."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Unsafe(f"{name} leads out of the folder")
    if not stat.S_ISREG(path.stat().st_mode):
        raise Unsafe(f"{name} is not a file")
    return path


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _file_name(value: object, where: str) -> str:
    name = text(r"[\w.-]+(/[\w.-]+)*", "the name of a file in the folder")(value, where)
    if ".." in PurePosixPath(name).parts:
        raise Unsafe(f"{where}: {name} leads out of the folder")
    return name


def _json(data: bytes, name: str) -> object:
    try:
        if len(data) > MOST_JSON:
            raise ValueError("it is too large")
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unsafe(f"{name} is not JSON: {error}") from None


# ---- model.pt2 ------------------------------------------------------------------------------

# Members below the archive's own folder, and what they hold if it is always the same.
_PROGRAM, _WEIGHTS = "models/model.json", "data/weights/model_weights_config.json"
_CONSTANTS = "data/constants/model_constants_config.json"
_SMALL = {
    "archive_format": rb"pt2",
    "archive_version": rb"\d{1,4}",
    "byteorder": rb"little",
    ".data/version": rb"\d{1,4}\n?",
    ".data/serialization_id": rb"\d{1,80}",
    "data/sample_inputs/model.pt": rb"",  # example inputs would be a pickle
}
_RAW = re.compile(r"data/(weights/weight|constants/tensor)_\d{1,9}")


def checked_archive(data: bytes, answers: Answers[Any, Any]) -> io.BytesIO:
    """A new archive with the model of `data`, for torch.export.load. Raises Unsafe."""
    members = _members(data)
    programs = _json(members[_PROGRAM], _PROGRAM)
    program = PROGRAM(programs, _PROGRAM)
    named = set[str]()
    for name, folder in ((_WEIGHTS, "data/weights"), (_CONSTANTS, "data/constants")):
        payloads = PAYLOADS(_json(members[name], name), name)
        for key, payload in payloads["config"].items():
            member = f"{folder}/{payload['path_name']}"
            named.add(member)
            if member not in members:
                raise Unsafe(f"{name}: {key} is in {member}, which is missing")
            _refuse_size(payload["tensor_meta"], len(members[member]), f"{name}: {key}")
        members[name] = json.dumps(payloads).encode()
    if extra := {name for name in members if _RAW.fullmatch(name)} - named:
        raise Unsafe(f"{min(extra)} belongs to no weight")
    _refuse_other_shape(program["graph_module"], answers)
    members[_PROGRAM] = json.dumps(program).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        for name, content in members.items():
            written.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    archive.seek(0)
    return archive


def _members(data: bytes) -> dict[str, bytes]:
    """The members of an archive, by their names without the archive's own folder."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise Unsafe(f"model.pt2 is not an archive: {error}") from None
    members: dict[str, bytes] = {}
    top = archive.namelist()[0].partition("/")[0] if archive.namelist() else ""
    if sum(item.file_size for item in archive.infolist()) > len(data):
        raise Unsafe("model.pt2 is compressed: its members are larger than it is")
    for item in archive.infolist():
        folder, _, name = item.filename.partition("/")
        known = name in (_PROGRAM, _WEIGHTS, _CONSTANTS, *_SMALL) or _RAW.fullmatch(name)
        if folder != top or not known:
            raise Unsafe(f"model.pt2 holds {item.filename!a}, which distdl does not write")
        if name in members:
            raise Unsafe(f"model.pt2 holds {name} twice")
        if item.compress_type != zipfile.ZIP_STORED:
            raise Unsafe(f"model.pt2: {name} is compressed")
        try:
            members[name] = archive.read(item)
        except (zipfile.BadZipFile, RuntimeError, EOFError, OSError, NotImplementedError) as error:
            raise Unsafe(f"model.pt2: {name} is damaged: {error}") from None
    for name, content in _SMALL.items():
        if not re.fullmatch(content, members.get(name, b"missing")):
            raise Unsafe(f"model.pt2: {name} is missing, or not what distdl writes")
    if missing := {_PROGRAM, _WEIGHTS, _CONSTANTS} - members.keys():
        raise Unsafe(f"model.pt2: {min(missing)} is missing")
    return members


def _refuse_size(meta: Mapping[str, Any], held: int, where: str) -> None:
    """Refuses a tensor that is larger than its file. torch would make up one for an empty file."""
    if meta["dtype"] not in _BYTES_OF:
        raise Unsafe(f"{where}: dtype {meta['dtype']} is not one that distdl writes")
    sizes = [size["as_int"] for size in meta["sizes"]]
    strides = [stride["as_int"] for stride in meta["strides"]]
    if len(sizes) != len(strides):
        raise Unsafe(f"{where}: {len(sizes)} sizes and {len(strides)} strides")
    last = meta["storage_offset"]["as_int"]
    last += sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and (last + 1) * _BYTES_OF[meta["dtype"]] > held:
        raise Unsafe(f"{where}: it is larger than its file")


def _refuse_other_shape(module: Mapping[str, Any], answers: Answers[Any, Any]) -> None:
    """Refuses a model that does not take images and give what the description says."""
    values = module["graph"]["tensor_values"]
    users = [
        spec["user_input"] for spec in module["signature"]["input_specs"] if "user_input" in spec
    ]
    outputs = [spec["user_output"] for spec in module["signature"]["output_specs"]]
    if len(users) != 1 or len(outputs) != 1:
        raise Unsafe("model.pt2 must take one tensor and give one")
    taken, given = (
        values.get(said["arg"]["as_tensor"]["name"]) or {"sizes": [], "dtype": 0}
        for said in (users[0], outputs[0])
    )
    sizes = [[size.get("as_int") for size in meta["sizes"]] for meta in (taken, given)]
    refuse_shapes("model.pt2", sizes[:1], sizes[1:], answers)
    if taken["dtype"] != _UINT8:
        raise Unsafe("model.pt2 does not take bytes of pixels")


def refuse_shapes(
    name: str,
    taken: Sequence[Sequence[object]],
    given: Sequence[Sequence[object]],
    answers: Answers[Any, Any],
) -> None:
    """Refuses a model whose shapes are not those that the description says. A length that is no
    number is one that the model leaves open."""
    expected = answers.takes()
    if expected is None:
        raise Unsafe(f"{name} has no size in {DESCRIPTION}")
    for found, said in ((taken, [expected]), (given, answers.gives())):
        if len(found) != len(said) or not all(map(_fits, found, said)):
            shapes = "; ".join(map(_shape_text, found))
            what = f"{'; '.join(map(_shape_text, said))} and {len(answers.names)} classes"
            raise Unsafe(f"{name} has a tensor of {shapes}, and {DESCRIPTION} says {what}")


def _fits(found: Sequence[object], said: Shape) -> bool:
    pairs = zip(found, said, strict=False)
    return len(found) == len(said) and all(wanted in (None, one) for one, wanted in pairs)


def _shape_text(shape: Sequence[object]) -> str:
    return " x ".join(str(size) if type(size) is int else "?" for size in shape) or "one number"


# ---- model.onnx ------------------------------------------------------------------------------

# ONNX's own operators, and the functions that torch's exporter defines in the file.
_DOMAINS = re.compile(rb"(ai\.onnx)?|pkg\.onnxscript\.torch_lib(\.\w+)*")
# The parts of each message that hold others (onnx/onnx.proto): number of the field -> its message.
_PARTS: dict[str, dict[int, str]] = {
    "model": {7: "graph", 8: "opset", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "function": {7: "node", 9: "opset", 11: "attribute"},
}
_DOMAIN_OF = {"node": 7, "opset": 1, "function": 10}
_EXTERNAL = {"tensor": (13, 14)}  # external_data, data_location
_DEEPEST = 50


def refuse_onnx(data: bytes) -> None:
    """Raises Unsafe if a graph reads other files, or has operators of others."""
    _walk(memoryview(data), "model", 0)


def _walk(data: memoryview, message: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise Unsafe("model.onnx is nested too deeply")
    for number, value in _fields(data):
        if number in _EXTERNAL.get(message, ()) and value != 0:
            raise Unsafe("model.onnx has weights in another file")
        if number == _DOMAIN_OF.get(message) and not (
            isinstance(value, memoryview) and _DOMAINS.fullmatch(bytes(value))
        ):
            shown = ascii(bytes(value)) if isinstance(value, memoryview) else value
            raise Unsafe(f"model.onnx has operators of {shown}, which are not ONNX's own")
        if (part := _PARTS.get(message, {}).get(number)) is not None:
            if not isinstance(value, memoryview):
                raise Unsafe("model.onnx is damaged")
            _walk(value, part, depth + 1)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """The fields of a protobuf message: their numbers and values (protobuf.dev, "Encoding")."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number = key >> 3
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        length, at = _varint(data, at) if kind == 2 else ({1: 8, 5: 4}.get(kind, len(data)), at)
        if at + length > len(data):
            raise Unsafe("model.onnx is damaged")
        yield number, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for count in range(10):
        if at + count >= len(data):
            break
        byte = data[at + count]
        value |= (byte & 127) << (7 * count)
        if byte < 128:
            return value, at + count + 1
    raise Unsafe("model.onnx is damaged")
