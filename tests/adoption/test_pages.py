"""Pages that take a reader from step to step are run, files and commands, from the top down."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from torchvision.models import resnet18

from tests import drawn_coco
from tests.adoption.project import command, metrics_of
from tests.conftest import ROOT, losses, matrix_only, python
from tests.unit.test_docs import FENCE, arguments
from tests.written import write


def fences(page):
    """(language, path or "", text) of each block of code."""
    return FENCE.findall((ROOT / "docs" / page).read_text())


def run_page(page, folder, *more):
    """Follows the page in its order; `more` is added to each start. What was printed."""
    printed = ""
    for language, path, body in fences(page):
        if path:
            write(folder, {path: body})
        for line in body.splitlines() if language == "bash" else ():
            words = arguments(shlex.split(line, comments=True))
            if words is None:
                subprocess.run(["bash", "-ec", line], cwd=folder, check=True)
            elif "trainer.devices=2" not in words:  # others start several ranks
                added = () if words[0] == "resume" else more
                printed += command(*words, *added, cwd=folder)
    return printed


def test_a_project_of_the_template_is_taken_over(tmp_path):
    """Its own script has trained before."""
    page = "from-lightning-hydra-template.md"
    runs = tmp_path / "outputs/example"
    for _, path, body in fences(page):
        if path and not path.startswith("conf/"):
            write(tmp_path, {path: body})
    words = ("src/train.py", "experiment=example", "trainer.max_epochs=2")
    done = python(*words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    printed = run_page(page, tmp_path)
    assert metrics_of(runs / "first").keys() == {"test/acc"}
    manifest = json.loads((runs / "first/checkpoints/best.ckpt.manifest.json").read_text())
    assert manifest["metrics"]["val/acc"] > 0.6, "it learns"
    assert (runs / "first/logs/csv").is_dir()
    assert "sweep of 2 runs over model.optimizer.lr" in printed
    assert "resume  logs/train/runs/old/checkpoints/last.ckpt" in printed
    rows = (runs / "longer/logs/metrics.jsonl").read_text()
    steps = {json.loads(row)["step"] for row in rows.splitlines()}
    assert min(steps) > 20, "two of five epochs were the template's"
    assert max(steps) == 50


@matrix_only
def test_what_does_not_fit(tmp_path):
    """The numbers of the page are those that its commands print."""
    printed = " ".join(run_page("memory.md", tmp_path, "tracking=none").split())
    quoted = [body for language, _, body in fences("memory.md") if language != "bash"]
    lines = [line for body in quoted for line in body.splitlines()]
    told = ("ddp ", "pipeline ", "advice ", "or ", "note ", "memory ")
    lines = [" ".join(line.removesuffix("...").split()) for line in lines if line.startswith(told)]
    assert len(lines) == 7
    assert [line for line in lines if line not in printed] == []
    launch = (tmp_path / "outputs/default/largest/attempts/002/launch.yaml").read_text()
    assert "data.batch_size: 64" in launch
    assert "64: an epoch has no more than 64 samples" in printed


@matrix_only
def test_fine_tuning(tmp_path):
    printed = run_page("fine-tuning.md", tmp_path, "tracking=none")
    page = (ROOT / "docs/fine-tuning.md").read_text()
    for start in ("model.weights: ", "layers  "):
        quoted = re.search(rf"^{start}.*$", page, re.MULTILINE)
        assert quoted
        assert quoted[0] in printed
    assert "new: head.weight, head.bias; not taken: none" in printed
    words = ("model=resnet34", "model.weights=outputs/default/base/checkpoints/last.ckpt")
    small = ("data.image_size=32", "trainer.accelerator=cpu", "tracking=none")
    printed = command(*words, *small, cwd=tmp_path, code=2)
    refused = re.search(r"^\$ .*\n(distdl: 1 problem.*\n.*)$", page, re.MULTILINE)
    assert refused
    assert refused[1] in printed


def test_a_project_with_parts_of_its_own(tmp_path):
    run_page("your-own-project.md", tmp_path, "tracking=none")
    lines = (tmp_path / "lines.jsonl").read_text().splitlines()
    logged = {k for row in lines for k in json.loads(row)}
    assert {"val_loss", "val_within", "weights/norm"} <= logged
    assert metrics_of(tmp_path / "outputs/ours/first").keys() >= {"val_loss"}
    manifest = tmp_path / "outputs/parts/parts/checkpoints/best.ckpt.manifest.json"
    assert 0 <= json.loads(manifest.read_text())["metrics"]["val_within"] <= 1


@matrix_only
def test_detection_from_the_zips_to_predictions(tmp_path):
    """The page's commands, with its placeholders filled in, on a drawn set, zipped as COCO is."""
    drawn = drawn_coco.draw(tmp_path / "drawn", train=6, val=4)
    (tmp_path / "zips").mkdir()
    of_zips = {"annotations_trainval2017": "annotations"}
    of_zips |= {f"{split}2017": f"{split}2017" for split in drawn_coco.SPLITS}
    for name, folder in of_zips.items():
        shutil.make_archive(str(tmp_path / "zips" / name), "zip", drawn, folder)
    torch.save(resnet18().state_dict(), tmp_path / "resnet18.pth")
    filled = {
        "DIR-with-zips": "zips",
        "OUT": "prepared",
        "data.root=/path/to/coco": "data.root=prepared",
        "model.weights=/path/to/resnet50.pth": "model.weights=resnet18.pth",
        "RUN": "outputs/maskrcnn_coco/page",
    }
    small = (
        "data.num_classes=5",
        "data.batch_size=2",
        "data.num_workers=0",
        "model.network.backbone=resnet18",
        "++model.network.min_size=48",
        "++model.network.max_size=64",
        "trainer.max_epochs=1",
        "trainer.accelerator=cpu",
        "trainer.devices=1",
        "tracking=none",
    )
    lines = [line for language, _, body in fences("detection.md") for line in body.splitlines()]
    typed = [arguments(shlex.split(line, comments=True)) for line in lines if " distdl " in line]
    verbs = []
    for words in typed:
        filled_in = [filled.get(word, word) for word in words or ()]
        if filled_in[0] in ("serve", "export"):
            continue  # tests/serving/test_detector.py
        trains = filled_in[0].startswith("+")
        name = "name=page" if "debug=cpu" in filled_in else f"name=run{len(verbs)}"
        if trains:
            command(*filled_in, *small, name, cwd=tmp_path)
        else:
            command(*filled_in, cwd=tmp_path)
        verbs.append(filled_in[0])
    assert {"prepare", "data", "resume", "report"} <= {*verbs}
    run = tmp_path / filled["RUN"]
    manifest = json.loads((run / "checkpoints/best.ckpt.manifest.json").read_text())
    assert manifest["monitor"] == "val/mask_ap"
    assert json.loads((run / "predictions/_manifest.json").read_text())["counts"]["samples"] == 4
    page = (run / "report.html").read_text()
    assert page.index("Best images") < page.index("AP by category")


@matrix_only
def test_a_mesh_of_devices(tmp_path):
    """The page's module, on two groups of two ranks; then whole, from the same checkpoint."""
    page = "strategies/model_parallel.md"
    write(tmp_path, {path: body for _, path, body in fences(page) if path})
    few = ("data.val_samples=40", "trainer.limit_val_batches=1.0")
    printed = run_page(page, tmp_path, "name=mesh", "tracking=none", *few)
    assert "mesh    2 tensor-parallel groups x 2 ranks in each group" in printed
    run = tmp_path / "outputs/default/mesh"
    on_mesh = metrics_of(run)
    one = ("strategy=single", "trainer.devices=1")
    command("resume", str(run), "task=validate", "task.checkpoint=last", *one, cwd=tmp_path)
    assert metrics_of(run)["val/loss"] == pytest.approx(on_mesh["val/loss"], abs=1e-5)


@matrix_only
def test_the_example_of_another_domain(tmp_path):
    """examples/segmentation: masks, which distdl does not know, trained, measured and predicted."""
    project = tmp_path / "segmentation"
    skipped = shutil.ignore_patterns("outputs")
    shutil.copytree(ROOT / "examples/segmentation", project, ignore=skipped)
    python = [sys.executable, "-m", "masks.draw", "data"]
    subprocess.run(python, cwd=project, check=True, capture_output=True)
    words = ["experiment=segment", "data.root=data", "trainer.max_epochs=1", "name=x"]
    command(*words, "data.num_workers=0", "tracking=none", cwd=project)
    run = project / "outputs/segment/x"
    trained = metrics_of(run)
    assert trained["val/samples"] == 21, "each image once, on two ranks"
    assert trained["val/miou"] > 0.6

    # One rank gives the same mean IoU; a damaged mask is a row, and everything else is predicted.
    one = ("trainer.devices=1", "strategy=single")
    command("resume", str(run), "task=validate", *one, cwd=project)
    assert metrics_of(run)["val/miou"] == pytest.approx(trained["val/miou"], abs=1e-4)
    (project / "data/val/masks/0003.png").write_bytes(b"no mask")
    rows = ("task=predict", "task.format=jsonl")
    command("resume", str(run), *rows, *one, cwd=project)
    (file,) = (run / "predictions").glob("*.jsonl")
    predicted = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["name"] for row in predicted if row["error"]] == ["images/0003.jpg"]
    pixels = [row["pixels_disc"] for row in predicted if not row["error"]]
    assert len(pixels) == 20
    assert all(isinstance(count, int) for count in pixels)


def test_the_example_project_on_two_ranks(tmp_path):
    """examples/my_project: a user's own module, data and configs, from its folder."""
    project = tmp_path / "my_project"
    shutil.copytree(ROOT / "examples/my_project", project, ignore=shutil.ignore_patterns("outputs"))
    typed = "experiment=forecast trainer.accelerator=cpu trainer.devices=2 name=x tracking=none"
    printed = command(*typed.split(), "trainer.log_every_n_steps=1", cwd=project)
    run = project / "outputs/forecast/x"
    manifest = json.loads((run / "checkpoints/best.ckpt.manifest.json").read_text())
    assert manifest["metrics"]["val/mse"] < 0.02
    assert "the model's own configure_optimizers" in printed
    # 2,000 windows in batches of 50 per device, five epochs.
    assert len(losses(run)) == 5 * 2000 // (50 * 2)
