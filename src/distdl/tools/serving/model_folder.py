"""The folder of an exported model: how it is written, and where a run has it."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import distdl
from distdl.config.recipe import hash_of
from distdl.domains.served import UNNAMED
from distdl.runs import checkpoints, files
from distdl.runs.directory import shown
from distdl.util.digests import sha256_of
from distdl.util.errors import UserError

DESCRIPTION = "model.json"
CHECKED = (".py", ".pt2", ".onnx", ".safetensors")  # endings of files with a checksum
# The package in every model folder, and the files of distdl that it holds copies of.
PACKAGE = "distdl_scoring"
COPIED = (
    "datasets/image_headers.py",
    "datasets/image_files.py",
    "images/decoding.py",
    "images/crop.py",
    "images/draws.py",
    "images/native.py",
    "util/json_rules.py",
    "domains/answers.py",
    "domains/classification/class_answers.py",
    "domains/detection/categories.py",
    "domains/detection/detections.py",
    "domains/detection/network_parts.py",
    "domains/detection/detection_answers.py",
    "domains/served.py",
    "tools/serving/exported_program.py",
    "tools/serving/packaged.py",
    "tools/serving/safe_loading.py",
    "tools/serving/scorer.py",
    "tools/serving/requests.py",
    "tools/serving/batching.py",
    "tools/serving/server.py",
    "tools/serving/settings.py",
    "tools/serving/threads.py",
)
# Azure ML's scoring scripts, in a folder of their own, which is sent beside the model.
SCRIPTS = ("tools/serving/score.py", "tools/serving/batch_score.py")
NEEDED = ("torch", "numpy", "pillow", "fastapi", "uvicorn", "pydantic")
# How the model card says that the folder is used.
_SCORER = '`distdl_scoring.scorer.Scorer(".").score([jpeg_bytes])`, or `python -m distdl serve .`'
USE = {
    "pt2": _SCORER,
    "onnx": _SCORER,
    "mlflow": '`mlflow.pyfunc.load_model(".").predict(pandas.DataFrame({"image": [jpeg_bytes]}))`',
    "package": '`distdl_scoring.scorer.Scorer(".", trust=True).score([jpeg_bytes])`, or '
    "`python -m distdl serve . --trust`: the folder's code runs",
    "weights": '`safetensors.torch.load_file("model.safetensors")`: the network\'s own names',
}


def write_package(folder: Path, packages: Sequence[str] = (), more: Sequence[str] = ()) -> None:
    """Writes what answers without distdl: `COPIED`, and `more` files of distdl, as a package, and
    `SCRIPTS`, which import each other, and the requirements, `packages` among them."""
    for name in (PACKAGE, "azureml"):
        (folder / name).mkdir(parents=True)
    about = f'"""Scores images; copied from distdl {distdl.__version__}."""\n'
    (folder / PACKAGE / "__init__.py").write_text(about)
    for name in (*COPIED, *more, *SCRIPTS):
        source = Path(distdl.__file__).parent / name
        code = re.sub(r"from distdl(?:\.\w+)+\.(\w+) ", rf"from {PACKAGE}.\1 ", source.read_text())
        target = folder / ("azureml" if name in SCRIPTS else PACKAGE)
        (target / source.name).write_text(code)
    (folder / "requirements.txt").write_text(requirements(packages))


def requirements(more: Sequence[str] = ()) -> str:
    """The versions with which the model was verified, a line for each."""
    # A build's local version, `2.15.0+cu130`, is not on every package index.
    lines = [f"{name}=={version(name).partition('+')[0]}\n" for name in (*NEEDED, *more)]
    with contextlib.suppress(PackageNotFoundError):  # then PIL has decoded the images
        lines.append(f"simplejpeg=={version('simplejpeg')}\n")
    return "".join(lines)


def describe(folder: Path, description: Mapping[str, Any]) -> None:
    """Writes `model.json`, with the sha256 of the model and the code."""
    files.write_json(folder / DESCRIPTION, {**description, "files": _checksums(folder)})


def _checksums(folder: Path) -> dict[str, str]:
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in CHECKED]
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}


def read(folder: Path) -> dict[str, Any]:
    """The description of a model folder. Raises UserError if files of the folder are missing or are
    not what was written."""
    shape: files.Shape = {"kind": str, "files": dict}
    remedy = f"remove the folder, and export again: rm -r {shlex.quote(shown(folder))}"
    description = files.load_json(folder / DESCRIPTION, shape, remedy)
    written = description.get("files") or {DESCRIPTION: ""}  # without the list it is damaged
    if wrong := dict(written.items() - _checksums(folder).items()):
        raise UserError.at(
            shown(folder),
            what=f"{', '.join(sorted(wrong))} missing or damaged",
            remedy=remedy,
            code="damaged-file",
        )
    return description


def write_card(folder: Path, description: Mapping[str, Any], kind: str) -> None:
    """Writes the model card, `README.md`. No text of the run is markup: it is quoted as JSON."""
    facts = {key: value for key, value in description.items() if key != "files"}
    for key in ("classes", "categories"):
        if key in facts:
            facts[key] = facts[key][:10]
    quoted = json.dumps(facts, indent=2)
    title = f"A model for {description.get('domain', UNNAMED)}"
    files.write_text(folder / "README.md", f"# {title}\n\n{USE[kind]}\n\n```json\n{quoted}\n```\n")


def export_of(run: Path, checkpoint: Path, format: str, size: Sequence[int] | None = None) -> Path:
    """The folder of an export, which is named by the checkpoint's identity, and by the height and
    width that were asked for."""
    name = f"{format}-{hash_of(checkpoints.identity(checkpoint))}"
    return run / "exports" / (f"{name}-{size[0]}x{size[1]}" if size else name)
