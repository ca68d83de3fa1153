"""Pages that take a reader from step to step are run, files and commands, from the top down."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.adoption import warm
from tests.adoption.project import metrics_of
from tests.conftest import ROOT
from tests.unit.test_docs import FENCE, arguments

SCRIPT = "tests.adoption.test_pages:script"


def script(*words: str) -> int:
    """`python src/train.py`, as it finds itself: by a name, with its folder's parent to import."""
    sys.argv, sys.path[0] = [*words], os.getcwd()
    runpy.run_path(words[0], run_name="__main__")
    return 0


def run_page(page: str, folder: Path, *more: str) -> str:
    """Does what the page says, in its order; `more` is added to each start. What was printed."""
    printed = ""
    for language, path, body in FENCE.findall((ROOT / "docs" / page).read_text()):
        if path:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(body)
        for line in body.splitlines() if language == "bash" else ():
            words = shlex.split(line, comments=True)
            given = arguments(words)
            if given is None:
                subprocess.run(["bash", "-ec", line], cwd=folder, check=True)
                continue
            if "trainer.devices=2" in given:  # others do
                continue
            added = () if given[0] == "resume" else more
            ended = warm.command(*given, *added, cwd=folder)
            assert ended.well, f"{page}: {line}\n{ended.output}"
            printed += ended.output
    return printed


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The project of the page, in which its own script has trained before."""
    page, folder = "from-lightning-hydra-template.md", tmp_path_factory.mktemp("template")
    for _, path, body in FENCE.findall((ROOT / "docs" / page).read_text()):
        if path and not path.startswith("conf/"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(body)
    old = ("src/train.py", "experiment=example", "trainer.max_epochs=2")
    ended = warm.call(SCRIPT, *old, cwd=folder)
    assert ended.well, ended.output
    return folder, run_page(page, folder)


def test_a_project_of_the_template_is_taken_over(template) -> None:
    folder, printed = template
    runs = folder / "outputs/example"
    assert metrics_of(runs / "first").keys() == {"test/acc"}
    manifest = json.loads((runs / "first/checkpoints/best.ckpt.manifest.json").read_text())
    assert manifest["metrics"]["val/acc"] > 0.6, "it learns"
    assert (runs / "first/logs/csv").is_dir()
    assert "sweep of 2 runs over model.optimizer.lr" in printed


def test_it_goes_on_from_the_templates_checkpoint(template) -> None:
    folder, printed = template
    assert "resume  logs/train/runs/old/checkpoints/last.ckpt" in printed
    rows = (folder / "outputs/example/longer/logs/metrics.jsonl").read_text()
    steps = {json.loads(row)["step"] for row in rows.splitlines()}
    assert min(steps) > 20 and max(steps) == 50, "two of five epochs were the template's"


def test_the_old_command_works_beside_it(template) -> None:
    folder, _ = template
    kept = {path.parent.name for path in (folder / "configs").glob("*/*.yaml")}
    assert kept == {"model", "data", "trainer", "callbacks", "paths", "experiment"}
    assert "${paths.data_dir}" in (folder / "configs/data/points.yaml").read_text()
    for path in (folder / "src").rglob("*.py"):
        assert "distdl" not in path.read_text()


def test_what_is_copied_as_it_was_is_answered_with_what_to_write(template) -> None:
    folder, _ = template
    (folder / "conf/experiment/copied.yaml").write_text(
        (folder / "configs/experiment/example.yaml").read_text()
    )
    (folder / "conf/data/points.yaml").write_text((folder / "configs/data/points.yaml").read_text())
    ended = warm.command("experiment=copied", cwd=folder)
    assert ended.codes == [2] and "3 problems" in ended.output, ended.output
    assert "refers to paths.data_dir" in ended.output and "tracking=wandb" in ended.output


def test_fine_tuning(tmp_path) -> None:
    printed = run_page("fine-tuning.md", tmp_path, "tracking=none")
    page = (ROOT / "docs/fine-tuning.md").read_text()
    named = re.search(r"^not from .*$", page, re.MULTILINE)
    assert named and named[0] in printed
    assert "new: head.weight, head.bias; not taken: none" in printed
    typed = ("model=resnet34", "model.weights=outputs/default/base/checkpoints/last.ckpt")
    small = ("data.image_size=32", "trainer.accelerator=cpu", "tracking=none")
    ended = warm.command(*typed, *small, cwd=tmp_path)
    refused = re.search(r"^\$ .*\n(distdl: .*)$", page, re.MULTILINE)
    assert ended.codes == [2] and refused and refused[1] in ended.output, ended.output


def test_a_project_with_parts_of_its_own(tmp_path) -> None:
    run_page("your-own-project.md", tmp_path, "tracking=none")
    logged: dict[str, float] = {}
    for line in (tmp_path / "lines.jsonl").read_text().splitlines():
        logged |= json.loads(line)
    assert {"val_loss", "val_within", "weights/norm"} <= logged.keys()
    assert metrics_of(tmp_path / "outputs/ours/first").keys() >= {"val_loss"}
    manifest = tmp_path / "outputs/parts/parts/checkpoints/best.ckpt.manifest.json"
    assert 0 <= json.loads(manifest.read_text())["metrics"]["val_within"] <= 1
