"""A detector leaves its run: what its validation finds is what predict, the server and the package
find, one to one. CI asks for a few images, DISTDL_MATRIX=1 for 200, and for the other formats."""

import base64
import json
import os
import random
import shutil
from concurrent import futures

import numpy as np
import pytest

from distdl.cli import serve
from distdl.tools.serving.formats import answered_alone
from distdl.tools.serving.packaged import RunsCode
from distdl.tools.serving.scorer import Scorer
from distdl.util.digests import sha256_of
from distdl.util.errors import UserError
from tests import drawn_coco
from tests.cluster.test_score_scripts import AZURE, clean, needs_azure, running
from tests.conftest import UNCHECKED, distdl, free_port, matrix_only
from tests.serving.colours import Server, without_distdl
from tests.serving.conftest import outside

COUNT = 200 if "DISTDL_MATRIX" in os.environ else 3
LIMIT_S = 300 + 8 * COUNT  # of a test on a busy machine
pytestmark = pytest.mark.timeout(LIMIT_S)
RUN = "outputs/maskrcnn_coco/r"
THRESHOLD = 0.05
# Random weights find as many objects as are kept.
SMALL = (
    "+experiment=maskrcnn_coco",
    "debug=cpu",
    "data.num_classes=5",
    "data.root=coco",
    "data.batch_size=2",
    "data.image_size=null",
    "model.network.backbone=resnet18",
    "model.network.min_size=48",
    "model.network.max_size=64",
    f"+model.network.box_score_thresh={THRESHOLD}",
    "+model.network.box_detections_per_img=10",
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=1",
    "trainer.limit_val_batches=null",
    "+callbacks.kept._target_=mine.Kept",
    "tracking=none",
    "name=r",
)
KEPT = '''"""Writes what a validation finds."""

import json
from pathlib import Path

from lightning.pytorch import Callback


class Kept(Callback):
    def on_fit_start(self, trainer, module):
        self.found = []
        add = module.metric.add

        def noted(batch, outputs):
            rows = zip(batch["target"], outputs, batch["weight"], strict=True)
            for target, each, weight in rows:
                if weight:  # no filler
                    self.found.extend(each.results(target["image_id"], module.categories))
            add(batch, outputs)

        module.metric.add = noted

    def on_validation_epoch_start(self, trainer, module):
        self.found.clear()

    def on_validation_epoch_end(self, trainer, module):
        Path("validated.json").write_text(json.dumps(self.found))
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "mine.py").write_text(KEPT)
    drawn_coco.draw(folder / "coco", train=2, val=COUNT, seed=3)
    ran(folder, *SMALL)
    return folder


@pytest.fixture(scope="module")
def package(project):
    """The folder of the run's package."""
    said = ran(project, "export", RUN, "--to", "package")
    assert "agrees  with the network on" in said
    assert "--trust" in said
    (folder,) = (project / RUN / "exports").glob("package-*")
    return folder


def ran(project, *words, code=0):
    done = distdl(*words, cwd=project, module=UNCHECKED, timeout=LIMIT_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def photographs(project):
    """The image files of the validation, by COCO's ids."""
    content = json.loads((project / "coco/annotations/instances_val2017.json").read_text())
    folder = project / "coco/val2017"
    return {each["id"]: (folder / each["file_name"]).read_bytes() for each in content["images"]}


def by_image(results):
    found = {}
    for each in results:
        found.setdefault(each["image_id"], []).append(each)
    return found


def matched(one, other):
    """Asserts that two lists of COCO's results of an image are one to one, and returns how many."""
    worst = THRESHOLD
    if max(len(one), len(other)) >= 10:  # a rounding may decide which is the last
        worst = min(each["score"] for each in (*one, *other))
    counted = [[e for e in side if e["score"] > worst + 1e-4] for side in (one, other)]
    for side, opposite in ((counted[0], other), (counted[1], one)):
        free = [*opposite]
        for each in side:
            near = [it for it in free if is_same(each, it)]
            assert near, each
            free.remove(near[0])
    return len(counted[0])


def is_same(one, other):
    return (
        one["category_id"] == other["category_id"]
        and abs(one["score"] - other["score"]) <= 1e-5
        and iou(one["bbox"], other["bbox"]) > 0.99
    )


def iou(one, other):
    sides = [
        min(one[axis] + one[axis + 2], other[axis] + other[axis + 2]) - max(one[axis], other[axis])
        for axis in (0, 1)
    ]
    shared = max(sides[0], 0) * max(sides[1], 0)
    union = one[2] * one[3] + other[2] * other[3] - shared
    return shared / union if union else 1.0


def same_everywhere(project, found):
    """How many detections of all images are those of the validation; each must be."""
    truth = by_image(json.loads((project / "validated.json").read_text()))
    assert set(found) <= set(photographs(project))
    return sum(
        matched(found.get(identity, []), truth.get(identity, []))
        for identity in photographs(project)
    )


def served(background, folder, project, *words):
    started = background(
        "serve",
        str(folder),
        "serve.port=0",
        f"serve.timeout_s={LIMIT_S}",
        *words,
        cwd=project,
        module=UNCHECKED,
    )
    started.until(lambda: "stop    " in started.output(), timeout=LIMIT_S)
    port = int(started.output().split("serve   http://127.0.0.1:")[1].split()[0])
    return Server(started.process, port)


def asked(server, photos):
    """By image, what a server answers for each of them."""
    found = {}
    for identity, data in photos.items():
        code, content = server.score(data)
        assert code == 200, content
        found[identity] = content["predictions"][0]["detections"]
    return found


def test_predict_and_the_server_find_what_the_validation_found(project, package, background):
    ran(project, "resume", RUN, "task=predict", "task.checkpoint=last")
    results = json.loads((project / RUN / "predictions/coco_bbox.json").read_text())
    count = same_everywhere(project, by_image(results))
    assert count > 5 * COUNT
    server = served(background, RUN, project)
    photos = photographs(project)
    found = asked(server, photos)
    assert same_everywhere(project, found) == count
    masks = json.loads((project / RUN / "predictions/coco_segm.json").read_text())
    for identity, each in by_image(masks).items():
        said = [(one["category"], one["segmentation"]) for one in found[identity]]
        names = drawn_coco.CATEGORIES
        assert said == [(names[one["category_id"]], one["segmentation"]) for one in each]
    # None depends on what arrives with it.
    order = [*photos][:15] * 4
    random.Random(0).shuffle(order)
    with futures.ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(lambda identity: server.score(photos[identity]), order)]
    for identity, (code, content) in zip(order, answers, strict=True):
        assert code == 200
        assert content["predictions"][0]["detections"] == found[identity]
    texts = [base64.b64encode(data).decode() for data in photos.values()]
    body = json.dumps({"images": texts[:60], "top_k": 2})
    code, content = server.ask("POST", "/invocations", body, "application/json")
    assert code == 200
    for each, whole in zip(content["predictions"], found.values(), strict=False):
        best = sorted((one["score"] for one in whole), reverse=True)[:2]
        assert [one["score"] for one in each["detections"]] == best
    assert set(server.health()["batches"]) == {"1"}
    code, content = server.score(b"not an image")
    assert code == 400
    assert "is not an image" in content["error"]
    server.process.terminate()
    assert server.process.wait(60) == 0


def test_a_package_runs_no_code_unless_it_is_trusted(package, tmp_path):
    """Whoever wrote the folder has signed it, too, and may say that it runs no code."""
    description = json.loads((package / "model.json").read_text())
    assert description["runs_code"] is True
    assert [each["id"] for each in description["categories"]] == [*drawn_coco.CATEGORIES]
    copy = shutil.copytree(package, tmp_path / "copy")
    mark = tmp_path / "executed"
    code = copy / "distdl_scoring/detection_network.py"
    code.write_text(f"open({str(mark)!r}, 'w')\n")
    description["files"]["distdl_scoring/detection_network.py"] = sha256_of(code)
    for says in (True, False, None):
        (copy / "model.json").write_text(json.dumps({**description, "runs_code": says}))
        with pytest.raises(UserError, match=r"--trust, if you would run code of whoever wrote it"):
            serve.loader(copy)
        error = RunsCode if says else ValueError
        with pytest.raises(error, match="would run here" if says else "says runs_code"):
            Scorer(copy)
    assert not mark.exists()
    # In a run it is the project's own code that builds the network.
    assert serve.run_of(package) is not None
    assert serve.run_of(copy) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "pt2"], "--to: pt2: torch.export cannot write a detector"),
        (["--to", "package", "--size", "64x64"], "--size: package takes images as the validation"),
        (["--to", "onnx", "--size", "64"], "--size: 64 is not a size"),
        (["--to", "onnx", "--size", "64x9999"], "--size: 9999 is more than 4096 pixels"),
    ],
)
def test_refused(project, command, monkeypatch, words, message):
    monkeypatch.chdir(project)
    done = command("export", RUN, *words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_package_without_its_weights_is_refused(package, tmp_path, command):
    copy = shutil.copytree(package, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    done = command("serve", str(copy), "--trust", "serve.port=0")
    assert done.code == 2
    assert "model.safetensors" in done.err
    with pytest.raises(ValueError, match=r"No such file.*model\.safetensors"):
        Scorer(copy, trust=True)


def wrong_count(description):
    description["categories"] = description["categories"][:3]


def twice(description):
    description["categories"][1]["id"] = description["categories"][0]["id"]


@pytest.mark.parametrize(
    ("change", "message"),
    [(twice, "is there twice"), (wrong_count, "5 categories apart, and model.json names 3")],
)
def test_categories_that_the_weights_have_not(package, tmp_path, change, message):
    copy = shutil.copytree(package, tmp_path / "copy")
    description = json.loads((copy / "model.json").read_text())
    change(description)
    (copy / "model.json").write_text(json.dumps(description))
    with pytest.raises(ValueError, match=message):
        Scorer(copy, trust=True)


@matrix_only
def test_the_package_answers_alone_and_to_whoever_trusts_it(project, package, background, tmp_path):
    copy = shutil.copytree(package, tmp_path / "copy")
    photos = photographs(project)
    with without_distdl(copy) as server:
        alone = asked(server, photos)
    assert same_everywhere(project, alone) > 5 * COUNT
    trusted = asked(served(background, copy, tmp_path, "--trust"), photos)
    assert same_everywhere(project, trusted) > 5 * COUNT


@matrix_only
@needs_azure
def test_a_package_under_azures_inference_server(project, package, tmp_path):
    model = shutil.copytree(package, tmp_path / "mounted/model")
    work = tmp_path / "work"
    work.mkdir()
    (work / "score.py").write_bytes((model / "azureml/score.py").read_bytes())  # sent alone
    port = free_port()
    command = [AZURE / "azmlinfsrv", "--entry_script", "score.py", "--port", str(port)]
    with running(command, work, clean(model), port) as server:
        assert same_everywhere(project, asked(server, photographs(project))) > 5 * COUNT
        assert server.score(b"not an image")[0] == 400


OWN = '''"""A network that takes what is bright for an object."""

import torch
from torch import nn

import lengths
{more}

class Bright(nn.Module):
    def __init__(self, above):
        super().__init__()
        self.above = above
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images, targets=None):
        if self.training:
            return {{"loss": self.scale.square()}}
        return [self.found(image) for image in images]

    def found(self, image):
        rows, columns = (image.mean(0) > self.above).nonzero().T
        boxes = torch.zeros(0, 4)
        if len(rows):
            corners = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            boxes = torch.stack(corners)[None].float() * self.scale
        count = len(boxes)
        labels = torch.full((count,), lengths.LABEL)
        return {{"boxes": boxes, "labels": labels, "scores": image.mean().repeat(count)}}
'''


MODEL = """# what is bright
_target_: distdl.models.Detector
num_classes: ${data.num_classes}
network: {_target_: own.bright.Bright, above: 0.6}
"""


@matrix_only
@pytest.mark.parametrize("more", ["", "import distdl"])
def test_a_package_holds_the_projects_own_network(project, tmp_path, more):
    """And all of the project that it imports. One that needs distdl does not run by itself."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").write_text("")
    (tmp_path / "own/bright.py").write_text(OWN.format(more=more))
    (tmp_path / "lengths.py").write_text("LABEL = 3\n")
    (tmp_path / "conf/model").mkdir(parents=True)
    (tmp_path / "conf/model/bright.yaml").write_text(MODEL)
    shutil.copytree(project / "coco", tmp_path / "coco")
    words = ["data=coco", "data.root=coco", "data.num_classes=5", "data.batch_size=2"]
    words += ["model=bright"]
    words += ["data.num_workers=0", "trainer.max_steps=1", "trainer.limit_val_batches=1"]
    words += ["trainer.accelerator=cpu", "schedule.warmup_epochs=0", "tracking=none", "name=own"]
    ran(tmp_path, *words)
    if more:
        said = ran(tmp_path, "export", "outputs/default/own", "--to", "package", code=1)
        assert "does not run by itself" in said
        assert "No module named 'distdl'" in said
        return
    assert "--trust" in ran(tmp_path, "export", "outputs/default/own", "--to", "package")
    (folder,) = (tmp_path / "outputs/default/own/exports").glob("package-*")
    held = {path.relative_to(folder / "code").as_posix() for path in folder.glob("code/**/*.py")}
    assert held == {"own/__init__.py", "own/bright.py", "lengths.py"}
    (answer,) = answered_alone(folder, [next(iter(photographs(project).values()))])
    assert {each["category"] for each in answer["detections"]} <= {drawn_coco.CATEGORIES[18]}


@matrix_only
def test_the_graph_of_one_size_is_compared_and_its_cost_is_said(project, background, tmp_path):
    for size in ("96x96", "64x128"):
        said = ran(project, "export", RUN, "--to", "onnx", "--size", size)
        assert "costs   box_ap" in said
        assert "costs   mask_ap" in said
        (folder,) = (project / RUN / "exports").glob(f"onnx-*-{size}")
        verified = json.loads((folder / "model.json").read_text())["verification"]
        assert verified["box"] <= 0.01
        assert verified["difference"] <= 1e-4
        assert verified["detections"] > 100
    server = served(background, folder, tmp_path)  # it needs no trust
    for identity, data in [*photographs(project).items()][:5]:
        code, content = server.score(data)
        assert code == 200, identity
        (answer,) = content["predictions"]
        assert answer["detections"]
        for each in answer["detections"]:
            x, y, width, height = each["bbox"]
            assert -1e-3 <= x <= x + width <= answer["width"] + 1e-3
            assert -1e-3 <= y <= y + height <= answer["height"] + 1e-3
            assert each["segmentation"]["size"] == [answer["height"], answer["width"]]


MLFLOW = """
import json, mlflow, pandas, pathlib
images = [path.read_bytes() for path in sorted(pathlib.Path({images!r}).iterdir())]
frame = pandas.DataFrame({{"image": images}})
answers = mlflow.pyfunc.load_model(".").predict(frame).to_dict("records")
print(json.dumps(answers))
"""


@matrix_only
def test_an_mlflow_model_answers_without_distdl(project, tmp_path):
    ran(project, "export", RUN, "--to", "mlflow")
    (folder,) = (project / RUN / "exports").glob("mlflow-*")
    answers = outside(folder, MLFLOW.format(images=str(project / "coco/val2017")))
    names = sorted(photographs(project))  # file names are ids
    found = {key: each["detections"] for key, each in zip(names, answers, strict=True)}
    assert same_everywhere(project, found) > 5 * COUNT
    needed = (folder / "requirements.txt").read_text()
    for package in ("torchvision", "faster-coco-eval", "safetensors"):
        assert package in needed


@matrix_only
def test_weights_load_in_torchvision(project):
    from safetensors.torch import load_file

    ran(project, "export", RUN, "--to", "weights")
    (file,) = (project / RUN / "exports").glob("weights-*/model.safetensors")
    weights = load_file(file)
    assert weights["roi_heads.box_predictor.cls_score.weight"].shape[0] == 6
    assert all(np.isfinite(value.numpy()).all() for value in weights.values())
