"""Exports a checkpoint's network with its preprocessing, verified on images of the validation."""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from distdl.callbacks.checkpointer import KEY
from distdl.callbacks.module_state import apply, changed, for_inference
from distdl.checkpoint.formats import read
from distdl.data import StoredImages
from distdl.models.weights import load_weights
from distdl.runs import checkpoints
from distdl.runs.directory import RunDirectory, shown
from distdl.tools.serving import formats, model_folder, registry
from distdl.tools.serving.scorer import Scorer
from distdl.tracking.outbox import Outbox
from distdl.util.errors import Disagrees, Unfinished, UserError
from distdl.util.redact import redact
from distdl.worker.build import make

IMAGES = 64  # at most so many of the validation split are compared


def export(config: DictConfig, run: RunDirectory, checkpoint: Path, format: str) -> None:
    """Writes a folder with the model (docs/export.md), unless there is one. If it answers otherwise
    than the network, it is removed. An MLflow model is published, if MLflow tracks the run.

    Args:
        config: The run's, of `ImageClassifier` and `StoredImages`.
        checkpoint: In any form that `distdl.checkpoint.formats` reads.
        format: "pt2", "onnx", "mlflow" or "weights".

    Raises:
        UserError: A package is missing, torch cannot write the network, or the folder is damaged.
        Disagrees: See above.
        Unfinished: The disk is full, or the MLflow server failed.
    """
    target = model_folder.export_of(run.path, checkpoint, format)
    if not target.exists():
        Export(config, run, checkpoint).write(format, target)
    model = target / "artifacts/model" if format == "mlflow" else target
    description = model_folder.read(model)
    print(f"export  {shown(target)}")
    print(f"agrees  with the network {description['verification']['summary']}")
    if format == "mlflow" and Outbox(run.path).exists:
        registry.publish(config, run, target)
    if format != "weights":
        print(f"next    python -m distdl serve {shown(target)}", flush=True)


class Probabilities(nn.Module):
    """uint8 [B, 3, S, S] to probabilities float32 [B, C], by weights from a file, normalised as in
    the run."""

    def __init__(self, model: DictConfig, weights: Path, data: StoredImages) -> None:
        super().__init__()
        self.module = make(model)
        load_weights(self.module.network, weights)
        self.module.float().eval().requires_grad_(False)
        self._normalize = data.normalize

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.module(self._normalize(images)).float().softmax(dim=1)


class Export:
    """What is exported: the network with a checkpoint's weights, on the CPU in float32, with the
    preprocessing of the validation."""

    def __init__(self, config: DictConfig, run: RunDirectory, checkpoint: Path) -> None:
        self.config = config
        self.run = run
        self.checkpoint = checkpoint
        self.data: StoredImages = make(config.data)
        self.data.setup("predict")
        self.images: Any = self.data.predict_dataloader().dataset
        self.view = self.images.view
        self.model = Probabilities(config.model, checkpoint, self.data)
        saved = read(checkpoint, mmap=True)
        self.settings = for_inference(saved)  # which callbacks changed, such as the eps of a norm
        apply(self.model.module, self.settings)
        names = (saved.get(KEY) or {}).get("classes") or self.data.classes
        self.classes = [str(name) for name in names]

    def write(self, format: str, target: Path) -> None:
        """Writes and verifies the folder `target`."""
        samples = self._samples()
        part = target.with_name(f".{target.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)  # left by a killed export
            folder = part / "model"
            kind = "pt2" if format == "mlflow" else format
            self._write_model(kind, folder, samples)
            if format == "mlflow":
                folder = formats.write_mlflow(folder, part / "mlflow", samples)
            folder.rename(target)
        except OSError as error:
            what = f"cannot write into {shown(target.parent)}: {error.strerror or error}"
            raise Unfinished.at("export", what, "the same command starts again") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _samples(self) -> list[bytes]:
        """Image files that can be decoded, spread over the validation split."""
        samples = []
        for index in range(0, len(self.images), math.ceil(len(self.images) / IMAGES)):
            with contextlib.suppress(ValueError):  # a damaged image
                data = self.images.read(index)
                self.view.pixels(data, 0)
                samples.append(data)
        self.data.teardown()
        if not samples:
            raise UserError.at("data", "the validation split has no intact image to compare on")
        return samples

    def _write_model(self, kind: str, folder: Path, samples: list[bytes]) -> None:
        """Writes a model folder, and what it answers for `samples` compared with the network."""
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(redact(OmegaConf.to_yaml(self.run.recipe())))
        pixels = torch.stack([self.view.pixels(data, 0) for data in samples])
        expected = self.model(pixels).numpy()
        file = folder / formats.FILES[kind]
        description = self._description(kind)
        formats.write(kind, self.model, file, self.view.image_size)
        if kind == "weights":
            scored = Probabilities(self.config.model, file, self.data)(pixels).numpy()
        else:
            model_folder.write_package(folder, ["onnxruntime"] if kind == "onnx" else [])
            model_folder.describe(folder, description)
            scorer = Scorer(folder)
            scored = scorer.probabilities([*map(scorer.pixels, samples)])
        try:
            description["verification"] = formats.compare(scored, expected, kind)
        except Disagrees as error:
            if kind != "weights" or not self.settings:
                raise
            what = f"weights lack settings that a callback changed: {changed(self.settings)}"
            raise Disagrees.at("export", what, "--to pt2, which has them") from error
        model_folder.describe(folder, description)
        model_folder.write_card(folder, description, kind)

    def _description(self, kind: str) -> dict[str, Any]:
        """What the model is, and where it comes from."""
        provenance = self.run.provenance()
        manifest = checkpoints.manifest_at(self.checkpoint)
        return {
            "kind": kind,
            "classes": self.classes,
            "image_size": self.view.image_size,
            "short_side": self.view.short_side,
            "max_pixels": self.view.max_pixels,
            "run": f"{self.config.experiment_name}/{self.run.path.name}",
            "checkpoint": manifest.get("alias_of") or self.checkpoint.name,
            "sha256": checkpoints.identity(self.checkpoint),
            "metrics": manifest.get("metrics") or {},
            "model": self.config.model.network.get("_target_"),
            "data": redact(self.config.data.root.partition("?")[0]),  # without a signature
            "data_key": self.images.key,
            "command": shlex.join(map(str, provenance.get("command") or ())),
            "commit": (provenance.get("git") or {}).get("commit"),
            "trained": provenance.get("created"),
            "exported": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
