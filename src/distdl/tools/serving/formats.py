"""Writes the models of a domain (`distdl.domains.exports`) in the formats of an export."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from distdl.checkpoint.convert import write_weights
from distdl.domains.answers import Answers
from distdl.domains.exports import Exports, Graph
from distdl.tools.serving import model_folder, network_code
from distdl.tools.serving.packaged import CODE, WEIGHTS
from distdl.tools.serving.scorer import Scorer
from distdl.util.atomic_files import write_bytes
from distdl.util.errors import Disagrees, UserError
from distdl.util.extras import install, missing_module
from distdl.util.redact import redact

LARGEST_BATCH = 1024
OPSET = 17  # of a traced graph


def write_pt2(graph: Graph, file: Path) -> None:
    """An archive of `torch.export` (https://docs.pytorch.org/docs/stable/export.html)
    without pickles: its weights are raw bytes, and it has no example inputs and no guards."""
    program = _exported(graph)
    program.example_inputs = None
    program._guards_code = []  # torch would execute them; `Scorer` scores no other shapes
    with warnings.catch_warnings():
        # torch reports each weight that is channels_last; it is stored with its strides.
        warnings.filterwarnings("ignore", message="No complete tensor found")
        # Into memory first: on a full disk torch's own writer ends the process.
        archive = io.BytesIO()
        torch.export.save(program, archive)
    write_bytes(file, archive.getvalue())


def write_onnx(graph: Graph, file: Path) -> None:
    """By torch's exporter (https://docs.pytorch.org/docs/stable/onnx.html), or, of a graph that is
    traced, by its older one."""
    import onnxruntime  # noqa: F401  # which answers; torch imports the others

    if graph.batched:
        program = _exported(graph)
        torch.onnx.export(program, (), file, dynamo=True, external_data=False, verbose=False)
        return
    with warnings.catch_warnings():
        # Each number that is taken for a constant, which it is at one size, and the exporter's age.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph.network,
            (graph.example,),
            str(file),
            dynamo=False,
            opset_version=OPSET,
            input_names=["image"],
            output_names=[*graph.outputs],
        )


WRITERS = {"pt2": write_pt2, "onnx": write_onnx}
GRAPHS = tuple(WRITERS)
FILES = {"pt2": "model.pt2", "onnx": "model.onnx", "weights": WEIGHTS, "package": WEIGHTS}


def write(
    kind: str,
    leaves: Exports[Any],
    answers: Answers[Any, Any],
    samples: Sequence[bytes],
    folder: Path,
    node: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes a model and what answers by it into a folder.

    Args:
        samples: Encoded images of the validation.
        node: The config's section `model`, in plain Python.

    Returns:
        What `model.json` says of it beside the rest.
    """
    file = folder / FILES[kind]
    network = leaves.module.network
    assert isinstance(network, nn.Module)
    if kind in GRAPHS:
        write_graph(kind, leaves.graph(answers, samples), file)
        runtime = ["onnxruntime"] if kind == "onnx" else []
        model_folder.write_package(folder, [*runtime, *leaves.packages])
        return {}
    write_safetensors(network, file)
    if kind == "weights":
        return {}
    said = leaves.network_node(node)
    packed = network_code.packed_node(said, leaves.code)
    code = network_code.code_of(said, leaves.code)
    for name, source in code.files.items():
        (folder / CODE / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / CODE / name).write_bytes(source.read_bytes())
    packages = sorted({"safetensors", *leaves.packages, *code.packages} - {*model_folder.NEEDED})
    model_folder.write_package(folder, packages, leaves.code)
    return {"runs_code": True, "network": packed}


def write_safetensors(network: nn.Module, file: Path) -> None:
    """With the network's own names (torchvision's or timm's)."""
    write_weights(network.state_dict(), file)


def write_graph(kind: str, graph: Graph, file: Path) -> None:
    """Writes a file of this kind. Raises UserError if torch cannot, or a package is missing."""
    try:
        WRITERS[kind](graph, file)
    except OSError:
        raise
    except Exception as error:  # torch raises many
        if module := missing_module(error):
            raise UserError.at(
                "--to",
                what=f"{kind} needs {module}, which is not installed",
                remedy=install(module),
                code="not-installed",
            ) from error
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise UserError.at(
            "model.network",
            what=f"torch cannot write this network as {kind}: {reason}",
            remedy="another format: --to weights",
            code="not-writable",
        ) from error


def _exported(graph: Graph) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    shapes = ({0: batch},)
    return torch.export.export(graph.network, (graph.example,), dynamic_shapes=shapes, strict=False)


# Refuses every import of distdl, as where it is not installed.
ALONE = """
import json, pathlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "distdl":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
folder, images, target = sys.argv[1:]
sys.path.insert(0, folder)
from distdl_scoring.scorer import Scorer

scorer = Scorer(folder, trust=True)
paths = sorted(pathlib.Path(images).iterdir())
answers = [scorer.score([path.read_bytes()])[0] for path in paths]
pathlib.Path(target).write_text(json.dumps(answers))
"""


def answered_alone(folder: Path, samples: Sequence[bytes]) -> list[dict[str, Any]]:
    """What a package answers in a Python of its own, with the folder's code and without distdl.

    Raises:
        Disagrees: It does not run there.
    """
    with tempfile.TemporaryDirectory() as scratch:
        images = Path(scratch, "images")
        images.mkdir()
        for number, data in enumerate(samples):
            (images / f"{number:06}").write_bytes(data)
        target = Path(scratch, "answers.json")
        words = [str(folder.resolve()), str(images), str(target)]
        # -P: not what lies in the current folder, such as the project that the code comes from.
        done = subprocess.run(
            [sys.executable, "-P", "-c", ALONE, *words],
            cwd=scratch,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            answers: list[dict[str, Any]] = json.loads(target.read_text(encoding="utf-8"))
            return answers
    last = redact(done.stderr.strip().rpartition("\n")[2])
    raise Disagrees.at(
        "model.network",
        what=f"the package does not run by itself, with the code that it holds: {last:.500}",
        remedy=network_code.REMEDY,
        code="failed",
    )


def write_mlflow(model: Path, folder: Path, images: Sequence[bytes]) -> Path:
    """An MLflow model whose artifact is a model folder, and which answers as that does; code, not
    pickles (https://mlflow.org/docs/latest/ml/model/models-from-code/)."""
    import mlflow
    import pandas

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    frame = pandas.DataFrame({"image": images})
    expected = pandas.DataFrame(Scorer(model, trust=True).score(images))
    lines = (model / "requirements.txt").read_text(encoding="utf-8").splitlines()
    own = model_folder.requirements(["mlflow", "pandas"]).splitlines()
    with warnings.catch_warnings():
        # That missing whole numbers would be floats: none is ever missing.
        warnings.filterwarnings("ignore", message="Hint: Inferred schema contains integer")
        signature = mlflow.models.infer_signature(frame, expected)
    mlflow.pyfunc.save_model(
        str(folder),
        python_model=str(Path(__file__).with_name("mlflow_model.py")),
        artifacts={"model": str(model)},
        code_paths=[str(model / model_folder.PACKAGE)],
        signature=signature,
        input_example=frame[:1],
        pip_requirements=[*dict.fromkeys([*own, *lines])],
    )
    model_folder.write_card(folder, model_folder.read(model), "mlflow")
    answers = mlflow.pyfunc.load_model(str(folder)).predict(frame)
    if not near(answers.to_dict("records"), expected.to_dict("records")):
        raise Disagrees.at(
            "export",
            what="the MLflow model answers otherwise than its model folder",
            code="mismatch",
        )
    return folder


def near(one: object, other: object) -> bool:
    """Whether two answers are equal, but for the rounding of numbers."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(near(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-5 * max(1.0, abs(other))
    return bool(one == other)
