"""The folder of an exported model: how it is written, and where a run has it."""

from __future__ import annotations

import contextlib
import hashlib
import html
import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from distdl import __version__
from distdl.runs import checkpoints
from distdl.runs.directory import shown
from distdl.util.atomic_files import write_bytes
from distdl.util.errors import UserError

DESCRIPTION = "model.json"
EXPORTS, SERVED = "exports", ("pt2", "onnx")
CHECKED = (".py", ".pt2", ".onnx", ".safetensors")  # endings of files with a checksum
# The package in every model folder, and the modules that it holds copies of.
PACKAGE = "distdl_scoring"
COPIED = (
    *("distdl.datasets.image_files", "distdl.data.decoding", "distdl.data.crop"),
    *("distdl.serving.scorer", "distdl.serving.requests"),
    *("distdl.serving.batching", "distdl.serving.server", "distdl.serving.settings"),
)
# Azure ML's scoring scripts, beside the package.
SCRIPTS = ("distdl.serving.score", "distdl.serving.batch_score")
NEEDED = ("torch", "numpy", "pillow", "fastapi", "uvicorn", "pydantic")
_SCORED = """```bash
pip install -r requirements.txt
python -c "from distdl_scoring.scorer import Scorer; \\
print(Scorer('.').score([open('photo.jpg', 'rb').read()]))"
```

With distdl: `python -m distdl serve .`
"""
_MLFLOW = """```python
model = mlflow.pyfunc.load_model(".")
model.predict(pandas.DataFrame({"image": [open("photo.jpg", "rb").read()]}))
```
"""
_WEIGHTS = "`model.safetensors` has the network's own names: `safetensors.torch.load_file`.\n"
USE = {"pt2": _SCORED, "onnx": _SCORED, "mlflow": _MLFLOW, "weights": _WEIGHTS}


def write_package(folder: Path) -> None:
    """Writes `COPIED` as a package, and `SCRIPTS`, which import each other and not distdl."""
    (folder / PACKAGE).mkdir(parents=True)
    about = f'"""Scores images; copied from distdl {__version__}."""\n'
    (folder / PACKAGE / "__init__.py").write_text(about)
    for module in (*COPIED, *SCRIPTS):
        spec = importlib.util.find_spec(module)
        assert spec and spec.origin
        text = Path(spec.origin).read_text()
        for other in COPIED:
            stem = other.rpartition(".")[2]
            text = text.replace(f"from {other} import", f"from {PACKAGE}.{stem} import")
        target = folder if module in SCRIPTS else folder / PACKAGE
        (target / f"{module.rpartition('.')[2]}.py").write_text(text)


def requirements(more: Sequence[str] = ()) -> str:
    """The versions with which the model was verified, a line for each."""
    # A build's local version, `2.15.0+cu130`, is not on every package index.
    lines = [f"{name}=={version(name).partition('+')[0]}\n" for name in (*NEEDED, *more)]
    with contextlib.suppress(PackageNotFoundError):  # then PIL has decoded the images
        lines.append(f"simplejpeg=={version('simplejpeg')}\n")
    return "".join(lines)


def describe(folder: Path, description: Mapping[str, Any]) -> None:
    """Writes `model.json`, with the sha256 of the model and the code."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in CHECKED]
    files = {path.relative_to(folder).as_posix(): checkpoints.sha256(path) for path in paths}
    text = json.dumps({"format": 1, **description, "files": files}, indent=1)
    write_bytes(folder / DESCRIPTION, text.encode() + b"\n")


def agreement(description: Mapping[str, Any]) -> str:
    """How an export was verified."""
    verified = description["verification"]
    images, difference = verified["images"], verified["difference"]
    same = f"{verified['top1'] * images:.0f} of {images} images"
    return f"with the network on {same}; probabilities differ by {difference:.1e} at most"


def refuse_damaged(folder: Path) -> None:
    """Raises UserError if files of a model folder are missing or are not what was written."""
    description = read(folder)
    wrong = [
        name
        for name, digest in description["files"].items()
        if not (folder / name).is_file() or checkpoints.sha256(folder / name) != digest
    ]
    if description["kind"] in SERVED and "score.py" not in description["files"]:
        wrong = ["score.py"]  # an earlier version wrote the folder
    if wrong:
        remedy = f"remove the folder, and export again: rm -r {shlex.quote(shown(folder))}"
        raise UserError.at(shown(folder), f"{', '.join(wrong)} missing or damaged", remedy)


def write_card(folder: Path, description: Mapping[str, Any], kind: str) -> None:
    """Writes the model card, `README.md`. Texts of the run are escaped."""
    source, names = description["source"], description["classes"]
    size, short_side = description["image_size"], description["short_side"]
    facts = {
        **source,
        "metrics": ", ".join(f"{k} {v:.4g}" for k, v in source["metrics"].items()),
        "classes": f"{len(names)}: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}",
        "input": f"image files; the short side resized to {short_side} pixels "
        f"(bilinear, antialias), the central {size} kept",
        "agrees": agreement(description),
    }
    rows = "".join(f"| {key} | {_cell(value)} |\n" for key, value in facts.items() if value)
    text = f"# {_cell(source['run'])}\n\n| | |\n|---|---|\n{rows}\n{USE[kind]}"
    write_bytes(folder / "README.md", text.encode())


def _cell(value: Any) -> str:
    return html.escape(" ".join(str(value).split())).replace("|", "&#124;").replace("`", "&#96;")


def read(folder: Path) -> dict[str, Any]:
    """The description of a model folder.

    Raises:
        UserError: It is not one, or is damaged.
    """
    try:
        description = json.loads((folder / DESCRIPTION).read_bytes())
        shape = description["classes"], description["files"], description["kind"]
        if [type(part) for part in shape] == [list, dict, str]:
            return description
        raise ValueError("it has another form")
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "a folder that python -m distdl export wrote"
        raise UserError.at(str(folder), f"is not an exported model: {error}", remedy) from None


def digest(path: str | Path) -> str:
    """Eight characters of a checkpoint's identity, for the name of a folder."""
    return hashlib.sha256(checkpoints.identity(Path(path)).encode()).hexdigest()[:8]


def exported(run: Path, formats: Sequence[str] = SERVED) -> Path | None:
    """The folder of a run with its best checkpoint in one of these formats; None: not exported."""
    path = checkpoints.best_or_last(run / "checkpoints")
    if not path.exists():
        return None
    names = [run / EXPORTS / f"{format}-{digest(path)}" for format in formats]
    names.append(run / EXPORTS / f"mlflow-{digest(path)}/artifacts/model")
    return next((folder for folder in names if (folder / DESCRIPTION).is_file()), None)
