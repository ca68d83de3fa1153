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
from distdl.data.encoded import EncodedImages
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

# The largest difference of a probability that is accepted. ONNX runs other kernels than torch.
TOLERANCE = {"pt2": 1e-5, "onnx": 1e-3, "weights": 1e-5}
LEFT = ".part"  # the ending of a folder that is being written


class Disagrees(UserError):
    """The export does not answer as the network does."""

    exit_code = 1
    outcome = "the export is removed"


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
    missing = [p for p in formats.PACKAGES.get(format, ()) if not importlib.util.find_spec(p)]
    if missing:
        raise UserError.at("--to", f"{format} needs {missing[0]}", "pip install 'distdl[onnx]'")
    digest = model_folder.digest(checkpoint)
    target = run.path / (output or f"{model_folder.EXPORTS}/{format}-{digest}")
    exists = target.exists()
    if exists and output:
        raise UserError.at("--output", f"{shown(target)} exists", "name another folder")
    if not exists:
        Export(config, run, checkpoint).write(format, images, target)
    model = target / "artifacts/model" if format == "mlflow" else target
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
        self.module: ImageClassifier = make(config.model)
        self.data: StoredImages = make(config.data)
        load_weights(self.module.network, checkpoint)
        self.data.setup("predict")
        self.images: Any = self.data.predict_dataloader().dataset
        self.model = Probabilities(self.module, self.data)
        loaded = checkpoint_formats.read(checkpoint, mmap=True).get(KEY) or {}
        self.classes = [*map(str, loaded.get("classes") or self.data.classes or ())]

    def write(self, format: str, count: int, target: Path) -> None:
        """Writes and verifies the folder `target`."""
        samples = intact(self.images, count)
        self.data.teardown()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            for left in target.parent.glob(f".*{LEFT}"):  # by a killed export
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(
                prefix=".", suffix=LEFT, dir=target.parent
            ) as temporary:
                folder = Path(temporary) / "model"
                self._write_model("pt2" if format == "mlflow" else format, folder, samples)
                if format == "mlflow":
                    folder = wrapped(folder, Path(temporary) / "mlflow", samples)
                folder.rename(target)
        except OSError as error:
            what = f"cannot write into {shown(target.parent)}: {error.strerror or error}"
            raise Unfinished.at("--output", what, "the same command starts again") from error

    def _write_model(self, kind: str, folder: Path, samples: list[bytes]) -> None:
        model_folder.write_package(folder)
        needed = model_folder.requirements(formats.PACKAGES[kind][2:])
        (folder / "requirements.txt").write_text(needed)
        recipe = redact(OmegaConf.to_yaml(self.run.recipe()))
        (folder / "recipe.yaml").write_text(recipe)
        pixels = torch.stack([self.images.view.pixels(data, 0) for data in samples])
        with torch.inference_mode():
            expected = self.model(pixels).numpy()
        try:
            file = formats.WRITERS[kind](self.model, folder, self.images.view.image_size)
        except OSError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            what = f"torch cannot write this network as {kind}: {reason}"
            raise UserError.at("model.network", what, "another format: --to weights") from error
        description = {
            "kind": kind,
            "classes": self.classes,
            "image_size": self.images.view.image_size,
            "short_side": self.images.view.short_side,
            "source": self._source(),
        }
        model_folder.describe(folder, [file], description)
        if kind == "weights":
            module = make(self.config.model)
            load_weights(module.network, folder / file)
            with torch.inference_mode():
                scored = Probabilities(module, self.data)(pixels).numpy()
        else:
            scorer = Scorer(folder)
            scored = scorer.probabilities(torch.stack([*map(scorer.pixels, samples)]))
        description["verification"] = compare(scored, expected, TOLERANCE[kind])
        model_folder.describe(folder, [file], description)
        model_folder.write_card(folder, description)

    def _source(self) -> dict[str, Any]:
        """Where the model comes from."""
        provenance, manifest = self.run.provenance(), checkpoints.manifest_at(self.checkpoint)
        root = redact(str(self.config.data.root).partition("?")[0])  # without a signature
        metrics = {k: v for k, v in (manifest.get("metrics") or {}).items() if k.startswith("val/")}
        return {
            "run": f"{self.config.get('experiment_name')}/{self.run.path.name}",
            "checkpoint": manifest.get("alias_of") or self.checkpoint.name,
            "step": manifest.get("step"),
            "sha256": checkpoints.identity(self.checkpoint),
            "metrics": metrics,
            "model": str(self.config.model.network.get("_target_")),
            "data": root,
            "data_key": self.images.key,
            "command": shlex.join(map(str, provenance.get("command") or ())),
            "commit": (provenance.get("git") or {}).get("commit"),
            "trained": provenance.get("created"),
            "exported": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "distdl": provenance.get("distdl"),
        }


def intact(images: EncodedImages, count: int) -> list[bytes]:
    """Up to `count` image files that can be decoded, spread over `images`."""
    samples = []
    for index in np.linspace(0, len(images) - 1, min(count, len(images))).round().astype(int):
        with contextlib.suppress(ValueError):  # a damaged image
            data = images.read(int(index))
            images.view.pixels(data, 0)
            samples.append(data)
    if not samples:
        raise UserError.at("data", "the validation split has no intact image to compare on")
    return samples


def compare(scored: np.ndarray, expected: np.ndarray, tolerance: float) -> dict[str, Any]:
    """Compares probabilities [B, C] of an export with those of the network; raises Disagrees.

    Where the network's two best classes are closer than the tolerance, either is right.
    """
    if scored.shape != expected.shape or not np.isfinite(scored).all():
        what = f"answers {scored.shape}, not {expected.shape}, or not with numbers"
        raise Disagrees.at("export", what)
    difference = float(np.abs(scored - expected).max())
    chosen = np.take_along_axis(expected, scored.argmax(axis=1)[:, None], axis=1)[:, 0]
    agrees = expected.max(axis=1) - chosen <= tolerance
    if difference > tolerance or not agrees.all():
        what = f"differs from the network: a probability by {difference:.2g}, and the class of "
        what += f"{np.sum(~agrees)} of {len(agrees)} images"
        raise Disagrees.at("export", what, "report it, with the versions of torch and onnxruntime")
    return {"images": len(agrees), "difference": difference, "top1": float(agrees.mean())}


def wrapped(model: Path, folder: Path, samples: list[bytes]) -> Path:
    """Writes a model folder as an MLflow model, which must answer as the folder does."""
    import pandas

    formats.write_mlflow(model, folder, samples[0])
    answers = formats.answers_of_mlflow(folder, samples)
    expected = pandas.DataFrame(Scorer(model).score(samples))
    try:
        columns = ["class", "probability"]
        pandas.testing.assert_frame_equal(answers[columns], expected[columns], rtol=0, atol=1e-5)
    except AssertionError as error:
        raise Disagrees.at(
            "export", f"the MLflow model differs from its network: {error}"
        ) from None
    return folder
