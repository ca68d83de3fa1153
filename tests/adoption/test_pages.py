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

from tests.adoption.project import call, command, metrics_of
from tests.conftest import ROOT
from tests.unit.test_docs import FENCE, arguments


def script(*words: str) -> int:
    """`python src/train.py`, as it finds itself: by a name, with its folder's parent to import."""
    sys.argv, sys.path[0] = [*words], os.getcwd()
    runpy.run_path(words[0], run_name="__main__")
    return 0


def fences(page: str) -> list[tuple[str, str, str]]:
    """(language, path or "", text) of each block of code."""
    return FENCE.findall((ROOT / "docs" / page).read_text())


def write(folder: Path, path: str, body: str) -> None:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(body)


def run_page(page: str, folder: Path, *more: str) -> str:
    """Follows the page in its order; `more` is added to each start. What was printed."""
    printed = ""
    for language, path, body in fences(page):
        if path:
            write(folder, path, body)
        for line in body.splitlines() if language == "bash" else ():
            words = arguments(shlex.split(line, comments=True))
            if words is None:
                subprocess.run(["bash", "-ec", line], cwd=folder, check=True)
            elif "trainer.devices=2" not in words:  # others start several ranks
                added = () if words[0] == "resume" else more
                printed += command(*words, *added, cwd=folder)
    return printed


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The project of the page, in which its own script has trained before."""
    page, folder = "from-lightning-hydra-template.md", tmp_path_factory.mktemp("template")
    for _, path, body in fences(page):
        if path and not path.startswith("conf/"):
            write(folder, path, body)
    words = ("src/train.py", "experiment=example", "trainer.max_epochs=2")
    call("tests.adoption.test_pages:script", *words, cwd=folder)
    return folder, run_page(page, folder)


def test_a_project_of_the_template_is_taken_over(template) -> None:
    folder, printed = template
    runs = folder / "outputs/example"
    assert metrics_of(runs / "first").keys() == {"test/acc"}
    manifest = json.loads((runs / "first/checkpoints/best.ckpt.manifest.json").read_text())
    assert manifest["metrics"]["val/acc"] > 0.6, "it learns"
    assert (runs / "first/logs/csv").is_dir()
    assert "sweep of 2 runs over model.optimizer.lr" in printed
    assert "resume  logs/train/runs/old/checkpoints/last.ckpt" in printed
    rows = (runs / "longer/logs/metrics.jsonl").read_text()
    steps = {json.loads(row)["step"] for row in rows.splitlines()}
    assert min(steps) > 20 and max(steps) == 50, "two of five epochs were the template's"
    # The template's own command works beside it.
    kept = {path.parent.name for path in (folder / "configs").glob("*/*.yaml")}
    assert kept == {"model", "data", "trainer", "callbacks", "paths", "experiment"}
    assert "${paths.data_dir}" in (folder / "configs/data/points.yaml").read_text()
    assert not any("distdl" in path.read_text() for path in (folder / "src").rglob("*.py"))


def test_what_is_copied_unchanged_is_answered_with_what_to_write(template) -> None:
    folder, _ = template
    for copy, original in (("experiment/copied", "experiment/example"), ("data/points",) * 2):
        write(folder, f"conf/{copy}.yaml", (folder / f"configs/{original}.yaml").read_text())
    printed = command("experiment=copied", cwd=folder, code=2)
    for text in ("3 problems", "refers to paths.data_dir", "tracking=wandb"):
        assert text in printed


def test_fine_tuning(tmp_path) -> None:
    printed = run_page("fine-tuning.md", tmp_path, "tracking=none")
    page = (ROOT / "docs/fine-tuning.md").read_text()
    quoted = re.search(r"^not loaded from .*$", page, re.MULTILINE)
    assert quoted and quoted[0] in printed
    assert "new: head.weight, head.bias; not taken: none" in printed
    words = ("model=resnet34", "model.weights=outputs/default/base/checkpoints/last.ckpt")
    small = ("data.image_size=32", "trainer.accelerator=cpu", "tracking=none")
    printed = command(*words, *small, cwd=tmp_path, code=2)
    refused = re.search(r"^\$ .*\n(distdl: .*)$", page, re.MULTILINE)
    assert refused and refused[1] in printed


def test_a_project_with_parts_of_its_own(tmp_path) -> None:
    run_page("your-own-project.md", tmp_path, "tracking=none")
    logged: dict[str, float] = {}
    for line in (tmp_path / "lines.jsonl").read_text().splitlines():
        logged |= json.loads(line)
    assert {"val_loss", "val_within", "weights/norm"} <= logged.keys()
    assert metrics_of(tmp_path / "outputs/ours/first").keys() >= {"val_loss"}
    manifest = tmp_path / "outputs/parts/parts/checkpoints/best.ckpt.manifest.json"
    assert 0 <= json.loads(manifest.read_text())["metrics"]["val_within"] <= 1
