"""Writes a network (uint8 [B, 3, S, S] to probabilities [B, C]) in each format of `distdl export`."""

from __future__ import annotations

import io
import logging
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from distdl.checkpoint import convert
from distdl.serving.model_folder import PACKAGE, requirements
from distdl.serving.scorer import Scorer
from distdl.util.atomic_files import write_bytes

if TYPE_CHECKING:
    import pandas

LARGEST_BATCH = 1024
# What each format needs besides distdl's own requirements; the last one also to answer.
PACKAGES = {"pt2": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "mlflow": (), "weights": ()}


def write_pt2(network: nn.Module, folder: Path, image_size: int) -> str:
    """`model.pt2`, an archive of `torch.export` (https://docs.pytorch.org/docs/stable/export.html)
    without pickles: its weights are raw bytes, and it has no example inputs."""
    program = _exported(network, image_size)
    program.example_inputs = None
    with warnings.catch_warnings():
        # torch reports each weight that is channels_last; it is stored with its strides.
        warnings.filterwarnings("ignore", message="No complete tensor found")
        # Into memory first: on a full disk torch's own writer ends the process.
        torch.export.save(program, archive := io.BytesIO())
    write_bytes(folder / "model.pt2", archive.getvalue())
    return "model.pt2"


def write_onnx(network: nn.Module, folder: Path, image_size: int) -> str:
    """`model.onnx`, by torch's exporter (https://docs.pytorch.org/docs/stable/onnx.html)."""
    program = torch.onnx.export(
        _exported(network, image_size),
        (),
        dynamo=True,
        input_names=["images"],
        output_names=["probabilities"],
        verbose=False,
    )
    assert program is not None
    program.save(folder / "model.onnx", external_data=False)
    return "model.onnx"


def write_weights(network: nn.Module, folder: Path, image_size: int) -> str:
    """`model.safetensors`, with the network's own names (torchvision's or timm's)."""
    weights = network.get_submodule("network").state_dict()
    convert.write_weights(weights, folder / "model.safetensors")
    return "model.safetensors"


# Each writes one file into a folder, and returns its name.
WRITERS = {"pt2": write_pt2, "onnx": write_onnx, "weights": write_weights}


def _exported(network: nn.Module, image_size: int) -> torch.export.ExportedProgram:
    # Two images: torch takes a batch of one for a constant.
    example = torch.zeros(2, 3, image_size, image_size, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=LARGEST_BATCH)
    return torch.export.export(network, (example,), dynamic_shapes=({0: batch},), strict=False)


def write_mlflow(model: Path, folder: Path, example: bytes) -> None:
    """An MLflow model whose artifact is a pt2 model folder; code, not pickles
    (https://mlflow.org/docs/latest/ml/model/models-from-code/)."""
    import mlflow
    import pandas

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    frame = pandas.DataFrame({"image": [example]})
    answers = pandas.DataFrame(Scorer(model).score([example]))
    mlflow.pyfunc.save_model(
        str(folder),
        python_model=str(Path(__file__).with_name("mlflow_model.py")),
        artifacts={"model": str(model)},
        code_paths=[str(model / PACKAGE)],
        signature=mlflow.models.infer_signature(frame, answers, params={"top_k": 5}),
        input_example=frame,
        pip_requirements=requirements(["mlflow", "pandas"]).split(),
    )
    shutil.copyfile(model / "README.md", folder / "README.md")


def answers_of_mlflow(folder: Path, images: Sequence[bytes]) -> pandas.DataFrame:
    """The answers of an MLflow model that was written."""
    import mlflow
    import pandas

    return mlflow.pyfunc.load_model(str(folder)).predict(pandas.DataFrame({"image": images}))
