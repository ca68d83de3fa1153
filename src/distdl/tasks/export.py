"""Exports a checkpoint's network with its preprocessing, verified on images of the validation."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import nn

from distdl.data.encoded import EncodedImages
from distdl.data.images import ImageData
from distdl.data.views import EvalView
from distdl.models.classifier import ImageClassifier
from distdl.models.weights import load_weights
from distdl.runs import checkpoints
from distdl.runs.directory import shown
from distdl.serving import formats, model_folder, registry
from distdl.serving.formats import Score
from distdl.tasks.evaluate import checkpoint_of
from distdl.tasks.needs import needs
from distdl.tracking.mlflow import NAME
from distdl.tracking.outbox import Outbox
from distdl.util.errors import Problem, Unfinished, UserError
from distdl.util.redact import redact
from distdl.worker.build import Built, make
from distdl.worker.initial_state import start

# The packages of each format, and the largest difference of a probability that is accepted. ONNX
# runs other kernels than torch.
FORMATS = {"pt2": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "mlflow": (), "weights": ()}
TOLERANCE = {"pt2": 1e-5, "onnx": 1e-3, "mlflow": 1e-5, "weights": 1e-5}

LEFT = ".part"  # the ending of a folder that is being written


class Disagrees(UserError):
    """The export does not answer as the network does."""

    exit_code = 1
    outcome = "the export is removed"


def export(
    context: Built,
    format: str = "pt2",
    checkpoint: str = "best",
    images: int = 64,
    output: str | None = None,
    register: str | None = None,
) -> dict[str, float]:
    """Writes a folder with the model (docs/export.md). If it answers otherwise than the network, it
    is removed.

    Args:
        format: One of `FORMATS`.
        checkpoint: As of `validate`.
        images: How many images of the validation split both answer for.
        output: A folder in the run's directory; None: `exports/<format>-<digest>`.
        register: The name under which MLflow's registry gets the model; only for "mlflow".

    Returns:
        `export/images`, `export/difference` (the largest one of a probability) and `export/top1`,
        the share of images for which both give the same class.

    Raises:
        UserError: The run has no such checkpoint, or its model or data cannot be exported.
        Disagrees: See above.
    """
    path = checkpoint_of(context, checkpoint)
    assert path is not None  # `check` refuses "none"
    name = output or f"{model_folder.EXPORTS}/{format}-{model_folder.digest(path)}"
    target = context.run.path / name
    if target.exists() and output:
        raise UserError.at("task.output", f"{shown(target)} exists", "name another folder")
    tracked = Outbox(context.run.path).exists
    if register and not tracked:
        raise UserError.at("task.register", "the run is not tracked in MLflow", "tracking=mlflow")
    compared = {} if target.exists() else write(context, path, format, images, target)
    print(f"export  {shown(target)}{'' if compared else ': it was there already'}")
    if compared:
        agreeing = f"{compared['top1'] * compared['images']:.0f} of {compared['images']} images"
        print(f"agrees  with the network on {agreeing}; probabilities differ by ", end="")
        print(f"{compared['difference']:.1e} at most")
    if format == "mlflow" and tracked:
        print(*registry.publish(context.run, target, register), sep="\n")
    if format in model_folder.SERVED:
        print(f"next    python -m distdl serve {shown(target)}", flush=True)
    return {f"export/{key}": float(value) for key, value in compared.items()}


def write(context: Built, path: str, format: str, images: int, target: Path) -> dict[str, Any]:
    """Writes and verifies the folder `target`; returns the comparison."""
    source = ExportSource(context, path)
    samples, expected = source.reference(images)
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".*{LEFT}"):  # by a killed export
        shutil.rmtree(left, ignore_errors=True)
    try:
        with tempfile.TemporaryDirectory(prefix=".", suffix=LEFT, dir=target.parent) as temporary:
            folder = Path(temporary) / "model"
            folder.mkdir()
            compared = source.write(folder, format, samples, expected)
            if format == "mlflow":
                model, folder = folder, Path(temporary) / "mlflow"
                needed = model_folder.requirements(["mlflow", "pandas"])
                formats.write_mlflow(model, folder, samples[0], needed)
                score = formats.score_mlflow(folder, source.classes)
                compared = compare(score(samples), expected, TOLERANCE[format])
            folder.rename(target)
    except OSError as error:
        what = f"cannot write into {shown(target.parent)}: {error.strerror or error}"
        raise Unfinished.at("task.output", what, "the same command starts again") from error
    return compared


def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of the task node; paths are relative to it."""
    yield from needs("predict_step", "predict_dataloader")(node, context)
    name = node.get("format", "pt2")
    if name not in FORMATS:
        yield Problem("format", f"is {name!r}", f"one of {', '.join(FORMATS)}")
    missing = [p for p in FORMATS.get(name, ()) if not importlib.util.find_spec(p)]
    if missing and context["local"]:
        yield Problem("format", f"{name} needs {', '.join(missing)}", "pip install 'distdl[onnx]'")
    if type(images := node.get("images", 64)) is not int or images < 1:
        yield Problem("images", f"is {images!r}, not a number of images", "task.images=64")
    if node.get("register") and name != "mlflow":
        yield Problem("register", f"takes MLflow models, not {name}", "task.format=mlflow")
    register = node.get("register")
    if register and not re.fullmatch(NAME, str(register)):
        yield Problem("register", f"{register!r} has other characters", f"as in {NAME}")
    if node.get("checkpoint") == "none":
        yield Problem("checkpoint", "is none: there is nothing to export", "task.checkpoint=best")


export.check = check  # type: ignore[attr-defined]


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


class Probabilities(nn.Module):
    """uint8 [B, 3, S, S] to probabilities float32 [B, C], normalised as in the run."""

    def __init__(self, network: nn.Module, layout: torch.memory_format, data: ImageData) -> None:
        super().__init__()
        self.network, self._layout, self._normalize = network, layout, data.normalize

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        normalised = self._normalize(images).contiguous(memory_format=self._layout)
        return self.network(normalised).float().softmax(dim=1)


class ExportSource:
    """What is exported: the network with a checkpoint's weights, on the CPU in float32, with the
    preprocessing of the validation."""

    def __init__(self, context: Built, path: str) -> None:
        module, data = context.module, context.datamodule
        if not isinstance(module, ImageClassifier):
            what = f"{type(module).__name__} is not distdl.models.ImageClassifier"
            raise UserError.at("model", what, "put your network into one: model.network._target_")
        context.trainer.limit_predict_batches = 0  # only load the weights
        start(context, path, context.trainer.predict, return_predictions=False)
        loader = data.predict_dataloader() if isinstance(data, ImageData) else None
        # `distribute` has wrapped the images in a dataset that seeds each sample.
        images = getattr(getattr(loader, "dataset", None), "dataset", None)
        view = getattr(images, "view", None)
        if not isinstance(images, EncodedImages) or not isinstance(view, EvalView):
            what = f"{context.data} reads no image files, so it has no preprocessing to export"
            raise UserError.at("data", what, "train on image files: data=imagenet data.root=FOLDER")
        assert isinstance(data, ImageData)
        network = module.network.cpu().float().eval()
        network._compiled_call_impl = None  # torch.export does not take a compiled network
        self.context, self.path, self.images, self.view = context, Path(path), images, view
        self.model = Probabilities(network, module.layout, data)
        names = context.checkpointer.classes or getattr(data, "classes", None)
        self.classes = [str(name) for name in names or range(module.num_classes)]

    def reference(self, count: int) -> tuple[list[bytes], np.ndarray]:
        """Image files spread over the validation split, and the network's probabilities [B, C]."""
        last, samples, pixels = len(self.images) - 1, [], []
        for index in np.linspace(0, last, min(count, last + 1)).round().astype(int).tolist():
            with contextlib.suppress(ValueError):  # a damaged image
                data = self.images.read(index)
                pixels.append(self.view.pixels(data, 0))
                samples.append(data)
        if not samples:
            raise UserError.at("data", "the validation split has no intact image to compare on")
        with torch.inference_mode():
            return samples, self.model(torch.stack(pixels)).numpy()

    def write(
        self, folder: Path, format: str, samples: list[bytes], expected: np.ndarray
    ) -> dict[str, Any]:
        """Writes and verifies a model folder; returns the comparison, which it also records."""
        kind = format if format in formats.WRITERS else "pt2"
        file = self._write(kind, folder)
        model_folder.write_package(folder)
        needed = model_folder.requirements(FORMATS[kind][2:])
        (folder / "requirements.txt").write_text(needed)
        recipe = redact(OmegaConf.to_yaml(self.context.run.recipe()))
        (folder / "recipe.yaml").write_text(recipe)
        description = {
            "kind": kind,
            "classes": self.classes,
            "image_size": self.view.image_size,
            "short_side": self.view.short_side,
            "source": self.facts(),
        }
        model_folder.describe(folder, [file], description)
        score = self.by_weights(folder / file) if kind == "weights" else formats.scorer(folder)
        compared = compare(score(samples), expected, TOLERANCE[kind])
        description["verification"] = compared
        model_folder.describe(folder, [file], description)
        model_folder.write_card(folder, description)
        return compared

    def _write(self, kind: str, folder: Path) -> str:
        try:
            return formats.WRITERS[kind](self.model, folder, self.view.image_size)
        except OSError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            what = f"torch cannot write this network as {kind}: {reason}"
            raise UserError.at("model.network", what, "another format: --to weights") from error

    def by_weights(self, file: Path) -> Score:
        """Scores by a new network, into which the written weights are loaded."""
        network = make(self.context.config.model).network
        load_weights(network, file)
        data: Any = self.context.datamodule
        model = Probabilities(network.float().eval(), self.model._layout, data)

        def score(images: Any) -> np.ndarray:
            with torch.inference_mode():
                return model(torch.stack([self.view.pixels(i, 0) for i in images])).numpy()

        return score

    def facts(self) -> dict[str, Any]:
        """Where the model comes from."""
        run, manifest = self.context.run, checkpoints.manifest_at(self.path)
        provenance, config = run.provenance(), self.context.config
        command, commit = provenance.get("command"), (provenance.get("git") or {}).get("commit")
        metrics = {k: v for k, v in (manifest.get("metrics") or {}).items() if k.startswith("val/")}
        return {
            "run": str(config.get("experiment_name")) + "/" + run.path.name,
            "checkpoint": manifest.get("alias_of") or self.path.name,
            "step": manifest.get("step"),
            "sha256": model_folder.identity(self.path),
            "metrics": metrics,
            "model": str(config.model.network.get("_target_")),
            "data_key": self.images.key,  # type: ignore[attr-defined]
            "data": f"{self.context.data}, {config.data.get('root')}",
            "command": command if isinstance(command, str) else shlex.join(map(str, command or ())),
            "commit": commit,
            "trained": provenance.get("created"),
            "exported": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "distdl": provenance.get("distdl"),
        }
