"""Exports: each answers as the network did in validation, without distdl and without pickles."""

import importlib
import json
import pickletools
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from mlflow.tracking import MlflowClient

from distdl.cli.export import HERE
from distdl.domains.classification.exports import of_classifier
from distdl.launch import resuming
from distdl.runs.checkpoints import judged_by
from distdl.runs.directory import RunDirectory
from distdl.tools.serving import formats
from distdl.tools.serving.export import Export
from distdl.tools.serving.model_folder import describe, export_of
from distdl.tools.serving.registry import DATA as DATA_TAG
from distdl.tools.serving.registry import METRIC, SHA256, VALUE, _register, succeeds
from distdl.tools.serving.scorer import Scorer
from distdl.util.digests import sha256_of
from distdl.util.errors import Disagrees, UserError
from tests.conftest import UNCHECKED, matrix_only, status
from tests.serving.conftest import EXPORTED, RUN, VAL, accuracy, export, outside, validation_images

pytestmark = EXPORTED
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


AS_MLFLOW = pytest.param(("mlflow",), marks=matrix_only)


@pytest.mark.parametrize("kinds", [("pt2", "onnx"), AS_MLFLOW], ids=str)
def test_it_answers_without_distdl_as_the_validation_did(project, pt2, kinds):
    code = MLFLOW if "mlflow" in kinds else SCORES
    if "onnx" in kinds:
        assert "21 of 21 images" in export(project, "--to", "onnx")
    exports = project / RUN / "exports"
    folders = [str(path) for kind in kinds for path in exports.glob(f"{kind}-*")]
    assert len(folders) == len(kinds)
    text = (IMAGES + code).format(images=str(project / "images/val"), folders=folders)
    paths = validation_images(project)
    expected = Scorer(pt2).score([path.read_bytes() for path in paths])
    validated = status(project / RUN)["metrics"]["val/acc1"]
    for answers in outside(Path(folders[0]), text):
        assert len(answers) == 3 * VAL
        assert accuracy(answers, paths) == pytest.approx(validated, abs=1e-6)
        for answer, own in zip(answers, expected, strict=True):
            assert answer["class"] == own["class"]
            assert len(answer["top"]) == 3
            assert answer["probability"] == pytest.approx(own["probability"], abs=1e-5)
    files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
    assert files
    assert not [*filter(holds_pickle, files)]


def holds_pickle(path):
    """Whether a file, or one in an archive, is a pickle."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return any(is_pickle(archive.read(name)) for name in archive.namelist())
    return is_pickle(path.read_bytes())


def is_pickle(data):
    try:
        return data[:1] == b"\x80" and bool([*pickletools.genops(data)])  # to its end
    except ValueError:
        return False


def test_the_folder_says_what_the_model_is(project, pt2):
    description = json.loads((pt2 / "model.json").read_text())
    assert description["classes"] == ["ant", "bee", "cat"]
    assert description["image_size"] == 32
    verified = description["verification"]
    assert (verified["images"], verified["difference"], verified["top1"]) == (21, 0.0, 1.0)
    card = (pt2 / "README.md").read_text()
    for fact in ("default/r", "val/acc1", "data.root=images", "torchvision.models.resnet18"):
        assert fact in card
    assert export_of(project / RUN, project / RUN / "checkpoints/best.ckpt", "pt2") == pt2
    written = (pt2 / "model.pt2").stat().st_mtime_ns
    export(project, "--to", "pt2")  # a second time changes nothing
    assert (pt2 / "model.pt2").stat().st_mtime_ns == written
    planned = resuming.plan(RunDirectory.open(project / RUN), [])
    assert planned.config.task["_target_"].endswith("train")
    assert not planned.changes
    # A damaged one is not taken for a good one.
    script = pt2 / "azureml/score.py"
    kept = script.read_bytes()
    script.write_bytes(b"")
    assert "rm -r" in export(project, "--to", "pt2", code=2)
    script.write_bytes(kept)


def test_an_mlflow_model_is_logged_and_registered(project):
    again = export(project, "--to", "mlflow", "--register", "insects")
    assert "champion does not move: val/acc1" in again
    client = MlflowClient(f"sqlite:///{project}/outputs/mlflow.db")
    (version,) = client.search_model_versions("name = 'insects'")
    assert client.get_model_version_by_alias("insects", "champion").version == version.version
    assert (client.get_run(version.run_id).info.run_name or "").startswith("r")
    logged = client.list_artifacts(version.run_id, Path(version.source).name)
    files = {item.path.rpartition("/")[2] for item in logged}
    assert {"MLmodel", "README.md", "input_example.json", "requirements.txt"} <= files


VERSION = {SHA256: "a", METRIC: "val/acc1", DATA_TAG: "d", VALUE: "0.6"}
BETTER = {**VERSION, SHA256: "b", VALUE: "0.7"}
FILE = {"size": 1, "sha256": "0"}  # in a manifest


@pytest.mark.parametrize(
    ("new", "champion", "mode", "moves"),
    [
        (VERSION, None, "max", True),
        (BETTER, VERSION, "max", True),
        (BETTER, VERSION, "min", False),
        ({**VERSION, SHA256: "b"}, VERSION, "max", False),
        ({**BETTER, DATA_TAG: "e"}, VERSION, "max", False),
        ({**BETTER, METRIC: "val/loss"}, VERSION, "max", False),
        (BETTER, {SHA256: "a", DATA_TAG: "d"}, "max", False),  # without a metric
    ],
)
def test_the_champion_moves_only_to_a_better_one_on_the_same_data(new, champion, mode, moves):
    assert succeeds(new, champion, mode)[0] is moves


# Changes the network between the reference and the writing.
WRONG = (
    UNCHECKED[0],
    "from distdl.tools.serving import formats\n"
    "write = formats.write_safetensors\n"
    "def wrong(network, *more):\n"
    "    network.fc.bias.data += 0.1 * __import__('torch').arange(3)\n"
    "    write(network, *more)\n"
    "    network.fc.bias.data -= 0.1 * __import__('torch').arange(3)\n"
    "formats.write_safetensors = wrong\n" + UNCHECKED[1],
)


def test_a_detectors_champion_is_that_of_its_own_metric(project, tmp_path):
    """Which nobody has chosen: it is what the manifest of best.ckpt says."""
    client = MlflowClient(f"sqlite:///{project}/outputs/mlflow.db")
    run_id = client.search_model_versions("name = 'insects'")[0].run_id
    manifest = {"monitor": "val/mask_ap", "mode": "max", "files": {"best.ckpt": FILE}}
    (tmp_path / "best.ckpt.manifest.json").write_text(json.dumps(manifest))
    best = judged_by(tmp_path, "val/acc1", "min")
    champions = []
    for name, ap in (("first", 0.3), ("worse", 0.2), ("better", 0.4)):
        said = {"kind": "package", "main_metric": "val/mask_ap", "sha256": name, "data_key": "d"}
        numbers = {"val/mask_ap": ap, "val/box_ap": 1 - ap}
        model = tmp_path / name / "artifacts/model"
        model.mkdir(parents=True)
        (model / "model.safetensors").touch()
        describe(model, {**said, "metrics": numbers})
        _register(client, "shapes", run_id, tmp_path / name, best)
        champion = client.get_model_version_by_alias("shapes", "champion")
        assert champion.tags[METRIC] == "val/mask_ap"
        champions.append((champion.tags[SHA256], float(champion.tags[VALUE])))
    assert champions == [("first", 0.3), ("first", 0.3), ("better", 0.4)]


def test_weights_load_in_torchvision_and_an_export_that_disagrees_is_removed(project):
    from safetensors.torch import load_file
    from torchvision.models import resnet18

    exports = project / RUN / "exports"
    printed = export(project, "--to", "weights", code=1, module=WRONG)
    assert "agrees with the network only on" in printed
    assert "Traceback" not in printed
    assert not [*exports.glob("weights-*"), *exports.glob(".*")]
    export(project, "--to", "weights")
    (file,) = exports.glob("weights-*/model.safetensors")
    resnet18(num_classes=3).load_state_dict(load_file(file))


@pytest.mark.parametrize("kind", ["pt2", "weights"])
def test_settings_that_a_callback_changed_are_exported_or_missed(project, kind, tmp_path, capsys):
    run = RunDirectory.open(project / RUN)
    saved = torch.load(run.checkpoints / "best.ckpt", weights_only=True)
    saved["distdl_modules"]["settings"] = {"network.bn1": {"eps": 1e3, "training": False}}
    changed = tmp_path / "changed.ckpt"
    torch.save(saved, changed)
    words = [*HERE, "task.checkpoint=none", "tracking=none", f"data.root={project / 'images'}"]
    exported = Export(resuming.plan(run, words).config, run, changed)
    assert exported.module.network.bn1.eps == 1e3
    if kind == "pt2":
        exported.write(kind, tmp_path / kind)
        images = [path.read_bytes() for path in validation_images(project)]
        pixels = torch.stack([exported.view.pixels(image, 0) for image in images])
        expected = exported.leaves.model(pixels).max(dim=1).values.tolist()
        answers = [answer["probability"] for answer in Scorer(tmp_path / kind).score(images)]
        assert answers == pytest.approx(expected, abs=1e-5)
    else:
        with pytest.raises(Disagrees, match=r"network\.bn1\.eps"):
            exported.write(kind, tmp_path / kind)


@pytest.mark.parametrize(
    ("package", "install"),
    [
        ("onnxruntime", r"pip install 'distdl\[onnx\]'"),
        ("onnxscript", r"pip install 'distdl\[onnx\]'"),
        ("faster_coco_eval", r"pip install 'distdl\[detection\]'"),
        ("colorsys", "pip install colorsys$"),
    ],
)
def test_a_package_that_an_export_lacks_is_named(tmp_path, monkeypatch, package, install):
    class Imports(torch.nn.Module):
        def forward(self, images):
            importlib.import_module(package)
            return images.flatten(1)

    monkeypatch.setitem(sys.modules, package, None)
    what = rf"--to: onnx needs {package}, which is not installed\n *{install}"
    with pytest.raises(UserError, match=what):
        formats.write_graph("onnx", of_classifier(Imports(), 32), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{RUN} --to pt2 --register x", "--register: "),
        (f"{RUN} --to mlflow --register a/b", "tracking.mlflow.register: "),
        (f"{RUN} --to pt2 optimizer.lr=1", "optimizer.lr: "),
        (f"{RUN} --to pickle", "--to"),
        ("best.ckpt --to pt2", "is not a run"),
    ],
)
def test_refused(project, command, monkeypatch, words, message):
    monkeypatch.chdir(project)
    shutil.copy(project / RUN / "checkpoints/best.ckpt", project)
    done = command("export", *words.split())
    assert done.code == 2
    assert message in done.out + done.err


def truncate(folder):
    file = folder / "model.pt2"
    file.write_bytes(file.read_bytes()[:-100])


def pickle(folder):
    torch.save(torch.zeros(1), folder / "model.pt2")
    fields = json.loads((folder / "model.json").read_text())
    fields["files"]["model.pt2"] = sha256_of(folder / "model.pt2")
    (folder / "model.json").write_text(json.dumps(fields))


def empty(folder):
    (folder / "model.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "missing or damaged"),
        (pickle, "which distdl does not write"),
        (empty, "cannot be read"),
    ],
)
def test_a_damaged_folder_is_refused(pt2, tmp_path, damage, message):
    folder = shutil.copytree(pt2, tmp_path / "copy")
    damage(folder)
    with pytest.raises(ValueError, match=message):
        Scorer(folder)
