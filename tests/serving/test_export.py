"""Exports: each answers as the network did in validation, without distdl and without pickles."""

from __future__ import annotations

import json
import pickletools
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from distdl.serving import formats
from distdl.serving.model_folder import export_of
from distdl.serving.registry import DATA as DATA_TAG
from distdl.serving.registry import METRIC, SHA256, VALUE, succeeds
from distdl.serving.scorer import Scorer
from distdl.util.errors import UserError
from tests.conftest import UNCHECKED, distdl, status
from tests.serving.conftest import RUN, VAL, export, outside, validation_images

# Both print what each image is answered with, by a Python of its own that has no distdl.
IMAGES = """
import json, pathlib
paths = sorted(pathlib.Path({images!r}).glob("*/*.jpg"))
images = [path.read_bytes() for path in paths]
"""
SCORES = """
from distdl_scoring.scorer import Scorer
print(json.dumps([Scorer(folder).score(images) for folder in {folders!r}]))
"""
MLFLOW = """
import mlflow, pandas
frame = pandas.DataFrame({{"image": images}})
print(json.dumps([mlflow.pyfunc.load_model(".").predict(frame).to_dict("records")]))
"""


@pytest.mark.parametrize("code", [SCORES, MLFLOW], ids=["pt2 and onnx", "mlflow"])
def test_it_answers_without_distdl_as_the_validation_did(project, pt2, code) -> None:
    if code is SCORES:
        assert "21 of 21 images" in export(project, "--to", "onnx")
    formats = ("pt2", "onnx") if code is SCORES else ("mlflow",)
    exports = project / RUN / "exports"
    folders = [str(path) for each in formats for path in exports.glob(f"{each}-*")]
    assert len(folders) == len(formats)
    text = (IMAGES + code).format(images=str(project / "images/val"), folders=folders)
    paths = validation_images(project)
    expected = Scorer(pt2).score([path.read_bytes() for path in paths])
    accuracy = status(project / RUN)["metrics"]["val/acc1"]
    for answers in outside(Path(folders[0]), text):
        hits = [
            each["class"] == path.parent.name for each, path in zip(answers, paths, strict=True)
        ]
        assert len(hits) == 3 * VAL and sum(hits) / len(hits) == pytest.approx(accuracy, abs=1e-6)
        for answer, own in zip(answers, expected, strict=True):
            assert answer["class"] == own["class"] and len(answer["top"]) == 3
            assert answer["probability"] == pytest.approx(own["probability"], abs=1e-5)
    files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    assert files and not [*filter(holds_pickle, files)]


def holds_pickle(path: Path) -> bool:
    """Whether a file, or one in an archive, is a pickle."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(is_pickle(archive.read(name)) for name in archive.namelist())
    return is_pickle(path.read_bytes())


def is_pickle(data: bytes) -> bool:
    try:
        return data[:1] == b"\x80" and any(pickletools.genops(data))
    except ValueError:
        return False


def test_the_folder_says_what_the_model_is(project, pt2) -> None:
    description = json.loads((pt2 / "model.json").read_text())
    assert description["classes"] == ["ant", "bee", "cat"] and description["image_size"] == 32
    verified = description["verification"]
    assert (verified["images"], verified["difference"], verified["top1"]) == (21, 0.0, 1.0)
    card = (pt2 / "README.md").read_text()
    for fact in ("default/r", "val/acc1", "data.root=images", "torchvision.models.resnet18"):
        assert fact in card
    assert export_of(project / RUN, project / RUN / "checkpoints/best.ckpt", "pt2") == pt2
    written = (pt2 / "model.pt2").stat().st_mtime_ns
    export(project, "--to", "pt2")  # a second time changes nothing
    assert (pt2 / "model.pt2").stat().st_mtime_ns == written


def test_weights_load_in_torchvision(project) -> None:
    from safetensors.torch import load_file
    from torchvision.models import resnet18

    export(project, "--to", "weights")
    (file,) = (project / RUN / "exports").glob("weights-*/model.safetensors")
    resnet18(num_classes=3).load_state_dict(load_file(file))


def test_an_mlflow_model_is_logged_and_registered(project) -> None:
    again = export(project, "--to", "mlflow", "--register", "insects")
    assert "champion does not move: val/acc1" in again
    client = MlflowClient(f"sqlite:///{project}/outputs/mlflow.db")
    (version,) = client.search_model_versions("name = 'insects'")
    assert client.get_model_version_by_alias("insects", "champion").version == version.version
    assert (client.get_run(version.run_id).info.run_name or "").startswith("r")
    files = {
        item.path.rpartition("/")[2]
        for item in client.list_artifacts(version.run_id, Path(version.source).name)
    }
    assert {"MLmodel", "README.md", "input_example.json", "requirements.txt"} <= files


VERSION = {SHA256: "a", METRIC: "val/acc1", DATA_TAG: "d", VALUE: "0.6"}
BETTER, EQUAL = {SHA256: "b", VALUE: "0.7"}, {SHA256: "b"}


@pytest.mark.parametrize(
    ("new", "champion", "mode", "moves"),
    [
        ({}, None, "max", True),
        (BETTER, VERSION, "max", True),
        (BETTER, VERSION, "min", False),
        (EQUAL, VERSION, "max", False),
        ({**BETTER, DATA_TAG: "e"}, VERSION, "max", False),
        ({**BETTER, METRIC: "val/loss"}, VERSION, "max", False),
        (BETTER, {SHA256: "a", DATA_TAG: "d"}, "max", False),  # without a metric
    ],
)
def test_the_champion_moves_only_to_a_better_one_on_the_same_data(
    new, champion, mode, moves
) -> None:
    assert succeeds({**VERSION, **new}, champion, mode)[0] is moves


# Changes the network between the reference and the writing.
WRONG = (
    UNCHECKED[0],
    "from distdl.serving import formats\n"
    "write = formats.write_safetensors\n"
    "def wrong(model, *more):\n"
    "    model.module.network.fc.bias.data += 0.1 * __import__('torch').arange(3)\n"
    "    return write(model, *more)\n"
    "formats.WRITERS['weights'] = wrong\n" + UNCHECKED[1],
)


def test_an_export_that_disagrees_is_removed(project) -> None:
    exports = project / RUN / "exports"
    for folder in exports.glob("weights-*"):  # of another test
        shutil.rmtree(folder)
    printed = export(project, "--to", "weights", code=1, module=WRONG)
    assert "agrees with the network only on" in printed and "Traceback" not in printed
    assert not [*exports.glob("weights-*"), *exports.glob(".*")]


def test_a_package_that_onnx_lacks_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(UserError, match=r"onnxruntime[^\n]*\n *pip install 'distdl\[onnx\]'"):
        formats.write("onnx", torch.nn.Flatten(), tmp_path / "model.onnx", 32)


REFUSED = {
    "register": (["--to", "pt2", "--register", "x"], "--register: "),
    "name": (["--to", "mlflow", "--register", "a/b"], "tracking.mlflow.register: "),
    "recipe": (["--to", "pt2", "optimizer.lr=1"], "optimizer.lr: "),
    "format": (["--to", "pickle"], "--to"),
}


@pytest.mark.parametrize(("words", "path"), REFUSED.values(), ids=REFUSED)
def test_refused(project, words, path) -> None:
    printed = export(project, *words, code=2, module=("-m", "distdl"))
    assert path in printed and "Traceback" not in printed


def test_a_checkpoint_outside_a_run_is_refused(project, tmp_path) -> None:
    shutil.copy(project / RUN / "checkpoints/best.ckpt", tmp_path)
    done = distdl("export", str(tmp_path / "best.ckpt"), "--to", "pt2", cwd=project)
    assert done.returncode == 2 and "is not a run" in done.stderr


def test_a_damaged_export_is_not_taken_for_a_good_one(project, pt2, tmp_path) -> None:
    kept = (pt2 / "azureml/score.py").read_bytes()
    try:
        (pt2 / "azureml/score.py").write_bytes(b"")
        assert "rm -r" in export(project, "--to", "pt2", code=2)
    finally:
        (pt2 / "azureml/score.py").write_bytes(kept)


def damage(folder: Path, kind: str) -> None:
    description = folder / "model.json"
    if kind == "truncated":
        file = folder / "model.pt2"
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "pickled":
        torch.save(torch.zeros(1), folder / "model.pt2")
        from distdl.runs.checkpoints import sha256

        fields = json.loads(description.read_text())
        fields["files"]["model.pt2"] = sha256(folder / "model.pt2")
        description.write_text(json.dumps(fields))
    else:
        description.write_text({"absent": "", "list": "[]", "empty": "{}"}[kind])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("truncated", "missing or damaged"),
        ("pickled", "can run any code"),
        ("absent", "cannot be read"),
        ("list", "cannot be read"),
        ("empty", "cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused(pt2, tmp_path, kind, message) -> None:
    folder = shutil.copytree(pt2, tmp_path / "copy")
    damage(folder, kind)
    with pytest.raises(ValueError, match=message):
        Scorer(folder)


def test_an_evaluation_leaves_no_trace_in_later_attempts(project) -> None:
    from distdl.launch import resuming
    from distdl.runs.directory import RunDirectory

    run = RunDirectory.open(project / RUN)
    planned = resuming.plan(run, [])
    assert planned.config.task["_target_"].endswith("train") and not planned.changes
