"""Exports a checkpoint's network with its preprocessing, verified on images of the validation."""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from distdl.callbacks.checkpointer import KEY
from distdl.checkpoint import formats as checkpoint_formats
from distdl.data import StoredImages
from distdl.data.views import EvalView
from distdl.models import ImageClassifier
from distdl.models.weights import load_weights
from distdl.runs import checkpoints
from distdl.runs.directory import RunDirectory, shown
from distdl.serving import formats, model_folder, registry
from distdl.serving.scorer import Scorer
from distdl.tracking.outbox import Outbox
from distdl.util.errors import Unfinished, UserError
from distdl.util.redact import redact
from distdl.worker.build import make

LEFT = ".part"  # the ending of a folder that is being written


def export(
    config: DictConfig,
    run: RunDirectory,
    checkpoint: Path,
    format: str,
    images: int = 64,
    output: str | None = None,
    register: str | None = None,
) -> None:
    """Writes a folder with the model (docs/export.md). If it answers otherwise than the network, it
    is removed.

    Args:
        config: The run's, of `ImageClassifier` and `StoredImages`.
        checkpoint: In any form that `distdl.checkpoint.formats` reads.
        format: "pt2", "onnx", "mlflow" or "weights".
        images: How many images of the validation split both answer for.
        output: A new folder in the run's directory; None: `exports/<format>-<digest>`.
        register: The name under which MLflow's registry gets the model; only for "mlflow".

    Raises:
        UserError: `output` exists, a package is missing, or torch cannot write the network.
        Disagrees: See above.
        Unfinished: The disk is full, or the MLflow server failed.
    """
    if format == "onnx" and not all(map(importlib.util.find_spec, formats.ONNX)):
        remedy = "pip install 'distdl[onnx]'"
        raise UserError.at("--to", f"onnx needs {', '.join(formats.ONNX)}", remedy)
    target = run.path / (
        output or f"{model_folder.EXPORTS}/{format}-{model_folder.digest(checkpoint)}"
    )
    exists = target.exists()
    if exists and output:
        raise UserError.at("--output", f"{shown(target)} exists", "name another folder")
    if not exists:
        Export(config, run, checkpoint).write(format, images, target)
    model = target / "artifacts/model" if format == "mlflow" else target
    model_folder.refuse_damaged(model)
    print(f"export  {shown(target)}{': it was there already' if exists else ''}")
    print(f"agrees  {model_folder.agreement(model_folder.read(model))}")
    if format == "mlflow" and Outbox(run.path).exists:
        print(*registry.publish(run, target, register), sep="\n")
    if format in model_folder.SERVED:
        print(f"next    python -m distdl serve {shown(target)}", flush=True)


class Probabilities(nn.Module):
    """uint8 [B, 3, S, S] to probabilities float32 [B, C], normalised as in the run."""

    def __init__(self, module: ImageClassifier, data: StoredImages) -> None:
        super().__init__()
        self.network = module.network.float().eval()
        self._layout, self._normalize = module.layout, data.normalize

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        normalised = self._normalize(images).contiguous(memory_format=self._layout)
        return self.network(normalised).float().softmax(dim=1)


class Export:
    """What is exported: the network with a checkpoint's weights, on the CPU in float32, with the
    preprocessing of the validation."""

    def __init__(self, config: DictConfig, run: RunDirectory, checkpoint: Path) -> None:
        self.config, self.run, self.checkpoint = config, run, checkpoint
        self.data: StoredImages = make(config.data)
        self.data.setup("predict")
        self.images: Any = self.data.predict_dataloader().dataset
        self.view: EvalView = self.images.view
        self.model = self._with_weights(checkpoint)
        loaded = checkpoint_formats.read(checkpoint, mmap=True).get(KEY) or {}
        self.classes = [*map(str, loaded.get("classes") or self.data.classes or ())]

    def _with_weights(self, file: Path) -> Probabilities:
        module = make(self.config.model)
        load_weights(module.network, file)
        return Probabilities(module, self.data)

    def write(self, format: str, count: int, target: Path) -> None:
        """Writes and verifies the folder `target`."""
        samples = self._samples(count)
        self.data.teardown()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left in target.parent.glob(f".*{LEFT}"):  # by a killed export
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(suffix=LEFT, prefix=".", dir=target.parent) as parent:
                folder = Path(parent, "model")
                self._write_model("pt2" if format == "mlflow" else format, folder, samples)
                if format == "mlflow":
                    folder = formats.write_mlflow(folder, Path(parent, "mlflow"), samples)
                folder.rename(target)
        except OSError as error:
            what = f"cannot write into {shown(target.parent)}: {error.strerror or error}"
            raise Unfinished.at("--output", what, "the same command starts again") from error

    def _samples(self, count: int) -> list[bytes]:
        """Up to `count` image files that can be decoded, spread over the validation split."""
        samples, size = [], len(self.images)
        for index in np.linspace(0, size - 1, min(count, size)).round().astype(int).tolist():
            with contextlib.suppress(ValueError):  # a damaged image
                self.view.pixels(data := self.images.read(index), 0)
                samples.append(data)
        if not samples:
            raise UserError.at("data", "the validation split has no intact image to compare on")
        return samples

    def _write_model(self, kind: str, folder: Path, samples: list[bytes]) -> None:
        """Writes a model folder, and what it answers for `samples` compared with the network."""
        folder.mkdir()
        needed = "torch\nsafetensors\n"
        if kind != "weights":
            model_folder.write_package(folder)
            needed = model_folder.requirements(formats.ONNX[-1:] if kind == "onnx" else ())
        (folder / "requirements.txt").write_text(needed)
        (folder / "recipe.yaml").write_text(redact(OmegaConf.to_yaml(self.run.recipe())))
        pixels = torch.stack([self.view.pixels(data, 0) for data in samples])
        with torch.inference_mode():
            expected = self.model(pixels).numpy()
        file = formats.write(kind, self.model, folder, self.view.image_size)
        description = {
            "kind": kind,
            "classes": self.classes,
            "image_size": self.view.image_size,
            "short_side": self.view.short_side,
            "source": self._source(),
        }
        model_folder.describe(folder, description)
        if kind == "weights":
            with torch.inference_mode():
                scored = self._with_weights(folder / file)(pixels).numpy()
        else:
            scorer = Scorer(folder)
            scored = scorer.probabilities(torch.stack([*map(scorer.pixels, samples)]))
        description["verification"] = formats.compare(scored, expected, kind)
        model_folder.describe(folder, description)
        model_folder.write_card(folder, description, kind)

    def _source(self) -> dict[str, Any]:
        """Where the model comes from."""
        provenance, manifest = self.run.provenance(), checkpoints.manifest_at(self.checkpoint)
        metrics = {k: v for k, v in (manifest.get("metrics") or {}).items() if k.startswith("val/")}
        return {
            "run": f"{self.config.experiment_name}/{self.run.path.name}",
            "checkpoint": manifest.get("alias_of") or self.checkpoint.name,
            "sha256": checkpoints.identity(self.checkpoint),
            "metrics": metrics,
            "model": self.config.model.network.get("_target_"),
            "data": redact(self.config.data.root.partition("?")[0]),  # without a signature
            "data_key": self.images.key,
            "command": shlex.join(map(str, provenance.get("command") or ())),
            "commit": (provenance.get("git") or {}).get("commit"),
            "trained": provenance.get("created"),
            "exported": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "distdl": provenance.get("distdl"),
        }
