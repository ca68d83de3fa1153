"""Exports a checkpoint's network with its preprocessing, verified on images of the validation."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf
from torch import nn

from distdl.callbacks.module_state import apply, changed, for_inference
from distdl.callbacks.training_state import KEY
from distdl.checkpoint import adapters
from distdl.checkpoint.formats import read
from distdl.checkpoint.settled import refuse_unsettled
from distdl.config.recipe import export_formats, plain
from distdl.data.encoded import EncodedData
from distdl.domains.answers import Answers
from distdl.domains.domain import domain_of
from distdl.domains.exports import Exports
from distdl.models import lora
from distdl.models.weights import load_weights, starting_keys
from distdl.runs import checkpoints, inputs
from distdl.runs.directory import RunDirectory, shown
from distdl.tools.serving import formats, model_folder, registry
from distdl.tools.serving.scorer import Scorer
from distdl.tracking.outbox import Outbox
from distdl.util.errors import Disagrees, Unfinished, UserError
from distdl.util.redact import redact
from distdl.util.screen import say
from distdl.worker.build import make, make_module

IMAGES = 64  # at most so many of the validation split are compared


def export(
    config: DictConfig,
    run: RunDirectory,
    checkpoint: Path,
    format: str,
    size: Sequence[int] | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Writes a folder with the model (docs/export.md), unless there is one. If it answers otherwise
    than the network, it is removed. An MLflow model is published, if MLflow tracks the run.

    Args:
        config: The run's, of a model and data in `distdl.config.recipe.EXPORTABLE`.
        checkpoint: In any form that `distdl.checkpoint.formats` reads.
        format: One of those that the model has.
        size: Height and width of the images that it takes, for a format that takes one size alone.

    Returns:
        The folder, and how far the model's answers are from the network's.

    Raises:
        UserError: A package is missing, torch cannot write the network, or the folder is damaged.
        Disagrees: See above.
        Unfinished: The disk is full, or the MLflow server failed.
    """
    target = model_folder.export_of(run.path, checkpoint, format, size)
    if not target.exists():
        Export(config, run, checkpoint, size).write(format, target)
    model = target / "artifacts/model" if format == "mlflow" else target
    description = model_folder.read(model)
    say(f"export  {shown(target)}")
    verified = description["verification"]
    say(f"agrees  with the network {verified['summary']}")
    for name, (before, after) in (verified.get("costs") or {}).items():
        where = f"on {verified['images']} images of the validation"
        say(f"costs   {name} {before:.4f} of the network, {after:.4f} in this format, {where}")
    if format == "mlflow" and Outbox(run.path).exists:
        registry.publish(config, run, target)
    if format != "weights":
        trust = " --trust" if description.get("runs_code") else ""
        say(f"next    python -m distdl serve {shown(target)}{trust}")
    return target, verified


def for_whole_weights(node: DictConfig) -> dict[str, Any]:
    """A model's node for weights of which adapters are a part, and that are loaded afterwards."""
    left_out = {lora.KEY, *starting_keys(node)}
    return {key: value for key, value in plain(node).items() if key not in left_out}


def random_network(config: DictConfig) -> nn.Module:
    """The network of a run's config as its module has it, with any weights."""
    module: Any = make_module(for_whole_weights(config.model))
    network: nn.Module = module.network
    return network


class Export:
    """What is exported: the network with a checkpoint's weights, on the CPU in float32, with the
    preprocessing of the validation."""

    def __init__(
        self,
        config: DictConfig,
        run: RunDirectory,
        checkpoint: Path,
        size: Sequence[int] | None = None,
    ) -> None:
        self.config = config
        self.run = run
        self.checkpoint = checkpoint
        self.size = size
        self.data: LightningDataModule = make(config.data)
        self.data.setup("predict")
        images: Any = self.data.predict_dataloader()
        self.images: EncodedData = images.dataset
        self.view: Any = self.images.view
        saved = read(checkpoint, mmap=True)
        self.module = self._module(checkpoint)
        self.settings = for_inference(saved)  # which callbacks changed, such as the eps of a norm
        apply(self.module, self.settings)
        self._trained_names = (saved.get(KEY) or {}).get("classes")
        self.leaves = self._exports(self.module)

    def _module(self, weights: Path) -> LightningModule:
        module: Any = self._adapted(weights)
        if module is None:
            module = make_module(for_whole_weights(self.config.model))
            load_weights(module.network, weights)
        module.float().eval().requires_grad_(False)
        return module

    def _adapted(self, file: Path) -> LightningModule | None:
        """The module with the adapters of a checkpoint merged; None: the file has all weights."""
        saved = read(file, mmap=True)
        if adapters.KEY not in saved:
            return None
        refuse_unsettled(saved, shown(file))
        kept = inputs.placed(self.config.copy(), self.run.path, self.run.provenance())
        module = make_module(kept.model)
        trained = lora.trained_names(module)
        digest = lora.digest_of(module, trained) if self.config.model.get(lora.KEY) else ""
        lora.refuse_others(saved, shown(file), digest)
        lora.refuse_missing(trained, saved["state_dict"], shown(file))
        module.load_state_dict(saved["state_dict"], strict=False)
        lora.without_adapters(module)
        return module

    def _exports(self, module: LightningModule) -> Exports[Any]:
        domain = domain_of(self.data, module)
        names = self._trained_names or domain.names(self.data) or ()
        leaves = domain.exports(module, self.data, self.view, names)
        if leaves is None:
            raise UserError.at(
                "model",
                what=f"models of the domain {domain.name} stay in their runs",
                remedy="task=predict stores what they say",
                code="unsupported",
            )
        return leaves

    def write(self, format: str, target: Path) -> None:
        """Writes and verifies the folder `target`."""
        indices = self._intact()
        part = target.with_name(f".{target.name}.part")
        try:
            shutil.rmtree(part, ignore_errors=True)  # left by a killed export
            folder = part / "model"
            kind = export_formats(self.config).formats[0] if format == "mlflow" else format
            self._write_model(kind, folder, indices)
            if format == "mlflow":
                samples = [self.images.read(index) for index in indices]
                folder = formats.write_mlflow(folder, part / "mlflow", samples)
            folder.rename(target)
        except OSError as error:
            raise Unfinished.at(
                "export",
                what=f"cannot write into {shown(target.parent)}: {error.strerror or error}",
                remedy="the same command starts again",
                code="not-writable",
            ) from error
        finally:
            self.data.teardown("predict")
            shutil.rmtree(part, ignore_errors=True)

    def _intact(self) -> list[int]:
        """Images that can be decoded, spread over those that are predicted."""
        step = math.ceil(len(self.images) / IMAGES)
        indices = [i for i in range(0, len(self.images), step) if not self.images[i]["damaged"]]
        if not indices:
            raise UserError.at(
                "data",
                what="the validation split has no intact image to compare on",
                code="incomplete",
            )
        return indices

    def _write_model(self, kind: str, folder: Path, indices: Sequence[int]) -> None:
        """Writes a model folder, and what it answers for images compared with the network."""
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(redact(OmegaConf.to_yaml(self.run.recipe())))
        samples = [self.images.read(index) for index in indices]
        answers = self.leaves.answers(kind, self.size)
        # First: an exporter may leave its own tensors in what the network keeps.
        expected = self.leaves.expected(answers, samples)
        description = dict(self._description(kind, answers))
        node = for_whole_weights(self.config.model)
        description |= formats.write(kind, self.leaves, answers, samples, folder, node)
        model_folder.describe(folder, description)
        scored = self._scored(kind, answers, samples, folder)
        try:
            verified = self.leaves.compare(scored, expected, kind, answers)
        except Disagrees as error:
            if kind in formats.GRAPHS or not self.settings:
                raise
            other = next(each for each in formats.GRAPHS if each in self.leaves.tolerance)
            raise Disagrees.at(
                "export",
                what=f"weights lack settings that a callback changed: {changed(self.settings)}",
                remedy=f"--to {other}, which has them",
                code="incomplete",
            ) from error
        if costs := self.leaves.costs(answers, map(self.images.__getitem__, indices), scored):
            verified["costs"] = costs
        description["verification"] = verified
        model_folder.describe(folder, description)
        model_folder.write_card(folder, description, kind)

    def _scored(
        self, kind: str, answers: Answers[Any, Any], samples: Sequence[bytes], folder: Path
    ) -> Any:  # noqa: ANN401 - of the domain
        """What the written model finds in the images."""
        if kind == "weights":
            again = self._exports(self._module(folder / formats.FILES[kind]))
            return again.expected(answers, samples)
        if kind == "package":
            return self.leaves.said(answers, formats.answered_alone(folder, samples))
        return self.leaves.scored(Scorer(folder), samples)

    def _description(self, kind: str, answers: Answers[Any, Any]) -> Mapping[str, Any]:
        """What the model is, and where it comes from."""
        provenance = self.run.provenance()
        manifest = checkpoints.manifest_at(self.checkpoint)
        return {
            "kind": kind,
            "domain": answers.domain,
            **answers.description(),
            "max_pixels": answers.max_pixels,
            "run": f"{self.config.experiment_name}/{self.run.path.name}",
            "checkpoint": manifest.get("alias_of") or self.checkpoint.name,
            "sha256": checkpoints.identity(self.checkpoint),
            "metrics": manifest.get("metrics") or {},
            "main_metric": domain_of(self.data, self.module).main_metric,
            "model": self.config.model.network.get("_target_"),
            "data": redact(self.config.data.root.partition("?")[0]),  # without a signature
            "data_key": self.images.key,
            "command": shlex.join(map(str, provenance.get("command") or ())),
            "commit": (provenance.get("git") or {}).get("commit"),
            "trained": provenance.get("created"),
            "exported": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
