"""Writes a network (uint8 [B, 3, S, S] to probabilities [B, C]) in the formats of an export."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl.checkpoint.convert import write_weights
from distdl.tools.serving import model_folder
from distdl.tools.serving.scorer import Scorer
from distdl.util.atomic_files import write_bytes
from distdl.util.errors import Disagrees, UserError

LARGEST_BATCH = 1024
# The largest difference of a probability that is accepted. ONNX runs other kernels than torch.
TOLERANCE = {"pt2": 1e-5, "onnx": 1e-3, "weights": 1e-5}


def write_pt2(network: nn.Module, file: Path, image_size: int) -> None:
    """An archive of `torch.export` (https://docs.pytorch.org/docs/stable/export.html)
    without pickles: its weights are raw bytes, and it has no example inputs and no guards."""
    program = _exported(network, image_size)
    program.example_inputs = None
    program._guards_code = []  # torch would execute them; `Scorer` scores no other shapes
    with warnings.catch_warnings():
        # torch reports each weight that is channels_last; it is stored with its strides.
        warnings.filterwarnings("ignore", message="No complete tensor found")
        # Into memory first: on a full disk torch's own writer ends the process.
        archive = io.BytesIO()
        torch.export.save(program, archive)
    write_bytes(file, archive.getvalue())


def write_onnx(network: nn.Module, file: Path, image_size: int) -> None:
    """By torch's exporter (https://docs.pytorch.org/docs/stable/onnx.html)."""
    import onnxruntime  # noqa: F401  # which answers; torch imports the others

    program = _exported(network, image_size)
    torch.onnx.export(program, (), file, dynamo=True, external_data=False, verbose=False)


def write_safetensors(network: nn.Module, file: Path, image_size: int) -> None:
    """With the network's own names (torchvision's or timm's)."""
    write_weights(network.get_submodule("module.network").state_dict(), file)


WRITERS = {"pt2": write_pt2, "onnx": write_onnx, "weights": write_safetensors}
FILES = {"pt2": "model.pt2", "onnx": "model.onnx", "weights": "model.safetensors"}


def write(kind: str, network: nn.Module, file: Path, image_size: int) -> None:
    """Writes a file of this kind."""
    try:
        WRITERS[kind](network, file, image_size)
    except OSError:
        raise
    except Exception as error:  # torch raises many
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        what = f"torch cannot write this network as {kind}: {reason}"
        missing = isinstance(error, ImportError)
        remedy = "pip install 'distdl[onnx]'" if missing else "another format: --to weights"
        raise UserError.at("model.network", what, remedy) from error


def _exported(network: nn.Module, image_size: int) -> torch.export.ExportedProgram:
    # Two images: torch takes a batch of one for a constant.
    example = torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    return torch.export.export(network, (example,), dynamic_shapes=({0: batch},), strict=False)


def compare(scored: np.ndarray, expected: np.ndarray, kind: str) -> dict[str, Any]:
    """Compares probabilities [B, C] of an export with those of the network; raises Disagrees.

    Where the network's two best classes are closer than the tolerance, either is right.
    """
    difference = float(np.abs(scored - expected).max())
    tolerance = TOLERANCE[kind]
    chosen = np.take_along_axis(expected, scored.argmax(axis=1)[:, None], axis=1)[:, 0]
    agrees = expected.max(axis=1) - chosen <= tolerance
    summary = (
        f"on {agrees.sum()} of {len(agrees)} images; probabilities differ by "
        f"{difference:.1e} at most"
    )
    if not (difference <= tolerance and agrees.all()):  # also if it is not a number
        what = f"agrees with the network only {summary} ({tolerance:g} is accepted)"
        raise Disagrees.at("export", what, "report it, with the versions of torch and onnxruntime")
    top1 = float(agrees.mean())
    return {"images": len(agrees), "difference": difference, "top1": top1, "summary": summary}


def write_mlflow(model: Path, folder: Path, images: Sequence[bytes]) -> Path:
    """An MLflow model whose artifact is a pt2 model folder, and which answers as that does; code,
    not pickles (https://mlflow.org/docs/latest/ml/model/models-from-code/)."""
    import mlflow
    import pandas

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    frame = pandas.DataFrame({"image": images})
    expected = pandas.DataFrame(Scorer(model).score(images))
    mlflow.pyfunc.save_model(
        str(folder),
        python_model=str(Path(__file__).with_name("mlflow_model.py")),
        artifacts={"model": str(model)},
        code_paths=[str(model / model_folder.PACKAGE)],
        signature=mlflow.models.infer_signature(frame, expected),
        input_example=frame[:1],
        pip_requirements=model_folder.requirements(["mlflow", "pandas"]).split(),
    )
    model_folder.write_card(folder, model_folder.read(model), "mlflow")
    answers = mlflow.pyfunc.load_model(str(folder)).predict(frame)
    near = np.allclose(answers["probability"], expected["probability"], rtol=0, atol=1e-5)
    if not (near and answers["class"].equals(expected["class"])):
        raise Disagrees.at("export", "the MLflow model answers otherwise than its pt2 model")
    return folder
