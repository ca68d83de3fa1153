"""Predicts a row per sample, each exactly once at any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from distdl.callbacks.checkpointer import class_names
from distdl.data.encoded import EncodedImages
from distdl.data.sampling import EvalBatches
from distdl.distributed import process_group
from distdl.models.classifier import ImageClassifier
from distdl.runs import checkpoints
from distdl.runs.directory import shown
from distdl.stores import is_remote, open_store
from distdl.tasks.evaluate import checkpoint_of
from distdl.tasks.needs import needs
from distdl.tasks.prediction_rows import Rows, column
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import Positive
from distdl.worker.build import Built, data_share
from distdl.worker.initial_state import start

BATCHES = 10  # after so many, the ranks ask each other whether any was asked to end
HALVES = (torch.float16, torch.bfloat16)  # which NumPy or JSON lack


def predict(
    context: Built,
    checkpoint: str = "best",
    source: str | None = None,
    output: str = "predictions",
    format: Literal["parquet", "csv", "jsonl"] = "parquet",
    top_k: Positive = 5,
    part_samples: Positive = 10_000,
) -> dict[str, float]:
    """Calls `predict_step` for each sample of the data's `predict_dataloader`, in its order.

    A row has the sample's name (or its index) and what `predict_step` returned for it: a tensor, or
    a dict of tensors, whose first dimension is the batch. With `ImageClassifier` it has the label,
    the most probable classes and their probabilities instead, or for a damaged image `error`.

    Rows are stored in parts, and a manifest at the end. The same command resumes behind the last
    complete part, on any number of ranks.

    Args:
        checkpoint: As of `validate`.
        source: Images to predict instead: a folder with or without class folders, a prepared data
            set (its validation split), or the URI of one of them.
        output: Folder of the rows, in the run's directory.
        format: Of the rows' files.
        top_k: How many classes the row of an image has.
        part_samples: The least number of rows in a part, except the last.

    Returns:
        `predict/samples`; of images also `predict/damaged`, and `predict/acc1` if all have labels.

    Raises:
        UserError: There is no such checkpoint or source, `output` holds other rows, or a part
            cannot be written.
    """
    path = checkpoint_of(context, checkpoint)
    if source:
        if not hasattr(context.datamodule, "predict_from"):
            what = f"{context.data} opens no other source"
            raise UserError.at("task.source", what, "define its predict_dataloader")
        context.datamodule.predict_from = source  # type: ignore[union-attr]
    facts: dict[str, Any] = {
        "checkpoint": path and checkpoints.identity(Path(path)),
        "source": source and without_signature(source),
        "format": format,
        "top_k": top_k,
    }
    trainer, rows = context.trainer, Rows(context.run.path / output, format)
    if trainer.is_global_zero:
        rows.open()
    context.checkpointer.position.predicted = process_group.broadcast(rows.stored.rows)
    collector = Collector(context, rows, facts, part_samples)
    trainer.callbacks.append(collector)  # type: ignore[attr-defined]
    # `distribute` has given each rank its share; Lightning would replace the batch sampler.
    connector = trainer._data_connector
    connector._prepare_dataloader = lambda loader, *_, **__: collector.opened(loader)  # type: ignore[method-assign]
    start(context, path, trainer.predict, return_predictions=False)
    if trainer.is_global_zero:
        if rows.stored.rows == collector.total and not rows.complete:
            rows.finish()
        parts = f"{len(rows.stored.parts)} x {format}"
        done = f"{rows.stored.rows:,} of {collector.total:,}"
        print(f"rows    {shown(rows.folder)}: {done} in {parts}")
    samples, counts = process_group.broadcast((rows.stored.rows, rows.stored.counts))
    metrics = {"predict/samples": float(samples)}
    if counts:
        metrics["predict/damaged"] = float(counts["damaged"])
        if 0 < counts["labels"] == samples - counts["damaged"]:
            metrics["predict/acc1"] = counts["hits"] / counts["labels"]
    return metrics


def without_signature(source: str) -> str:
    """The address of images, the same from every folder and without secrets."""
    if is_remote(source):
        return source.partition("?")[0]
    return str(Path(open_store(source).uri).absolute())


def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of the task node; paths are relative to it."""
    yield from needs("predict_step", "predict_dataloader")(node, context)
    source = str(node.get("source") or "")
    is_path = source and context["local"] and not is_remote(source)
    if is_path and not Path(folder := open_store(source).uri).is_dir():
        yield Problem("source", f"no such folder: {folder}", "a folder of images, or a URI")
    output = PurePath(str(node.get("output") or "predictions"))
    if output.is_absolute() or ".." in output.parts or not output.parts:
        what = f"is {str(output)!r}, not a folder in the run's directory"
        yield Problem("output", what, "task.output=predictions")


predict.check = check  # type: ignore[attr-defined]


class Collector(Callback):
    """Collects the outputs of all ranks; rank 0 stores them in the order of the samples.

    In the batches of `EvalBatches`, row i of the r-th of W ranks is sample i * W + r.

    Args:
        facts: What the rows are of, besides the data: see `Rows.describe`.
    """

    batches: EvalBatches | None = None

    def __init__(
        self, context: Built, rows: Rows, facts: Mapping[str, Any], part_samples: int
    ) -> None:
        self.context, self.rows, self.facts, self.part_samples = context, rows, facts, part_samples
        trainer = context.trainer
        place = trainer.strategy, trainer.global_rank, trainer.world_size
        self.share, self.shares = data_share(*place)
        self.first = self.stored = context.checkpointer.position.predicted
        self.outputs: list[dict[str, torch.Tensor]] = []
        self.errors: list[str] = []
        self.waiting = 0  # rows of this rank that are not stored yet

    def opened(self, loader: Any) -> Any:
        """Takes note of this rank's loader, before its first batch, and returns it."""
        batches = getattr(loader, "batch_sampler", None)
        if not isinstance(batches, EvalBatches) and not getattr(batches, "drop_last", False):
            batches = getattr(getattr(loader, "sampler", None), "batches", None)
        if not isinstance(batches, EvalBatches) or batches.batched or self.batches:
            what = "predict_dataloader: its samples cannot be counted"
            raise UserError.at("data", what, "return one DataLoader over a map-style dataset")
        self.batches, self.dataset = batches, loader.dataset.dataset
        self.total = self.first + batches.num_samples
        if self.context.trainer.is_global_zero:
            key = getattr(self.dataset, "key", "")[:12]
            self.rows.describe({**self.facts, "data": f"{self.total} samples {key}".strip()})
        if not batches.num_samples:
            warnings.filterwarnings("ignore", message="Total length of `DataLoader`")
        return loader

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        outputs, batch, batch_idx = args[:3]
        assert self.batches is not None
        done = batch_idx * self.batches.rows_per_batch
        size = min(self.batches.rows_per_batch, self.batches.rows - done)
        self.ranked = isinstance(pl_module, ImageClassifier) and isinstance(outputs, torch.Tensor)
        if self.ranked:  # stay on the device, and nobody waits for them
            self.network_classes = outputs.shape[1]
            top_k = min(self.facts["top_k"], self.network_classes)
            best = outputs.float().softmax(dim=1).topk(top_k)
            self.outputs.append({"class": best.indices, "probability": best.values})
        else:
            self.outputs.append(on_host(outputs, size))
        self.waiting += size
        if isinstance(self.dataset, EncodedImages):
            self.errors += batch["damaged"]
        stop = bool(self.context.checkpointer.stop)
        stops = batch_idx % BATCHES == 0 and any(process_group.gather(stop))
        if stops or self.waiting * self.shares >= self.part_samples:
            self._store()

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.outputs:
            self._store()

    def _store(self) -> None:
        """Gathers the rows of all ranks, and stores them as a part."""
        assert self.batches is not None and self.batches.order is not None
        names = [*self.outputs[0]]
        mine = {n: torch.cat([each[n] for each in self.outputs]).cpu().numpy() for n in names}
        if self.errors:
            mine["error"] = np.array(self.errors, dtype=object)
        done = self.stored - self.first
        indices = self.batches.order[done : done + self.waiting * self.shares].tolist()
        self.outputs, self.errors, self.waiting = [], [], 0
        self.stored += len(indices)
        # Of ranks that read the same data, the first one's rows.
        by_share = dict(reversed(process_group.gather((self.share, mine))))
        if self.context.trainer.is_global_zero:
            columns = {}
            for name in mine:
                rows = np.stack([by_share[share][name] for share in range(self.shares)], axis=1)
                columns[name] = rows.reshape(-1, *rows.shape[2:])[: len(indices)]
            self._add(indices, columns)
        when = f"after {self.stored:,} of {self.total:,} predictions"
        process_group.check_all(self.context.checkpointer.stop, when)

    def _add(self, indices: list[int], columns: dict[str, np.ndarray]) -> None:
        """Stores a part; the values of damaged images become null."""
        if not isinstance(self.dataset, EncodedImages):
            columns = {"index": np.array(indices), **columns}
            return self.rows.add({name: column(each) for name, each in columns.items()}, {})
        errors, known = columns.pop("error"), set[str]()
        bad = errors != ""
        if self.ranked:
            classes = self.context.checkpointer.classes or class_names(self.context.datamodule)
            if not classes or len(classes) != self.network_classes:
                classes = [str(number) for number in range(self.network_classes)]
            else:
                known = {*classes}
            names = np.array(classes, dtype=object)
            best, chances = columns.pop("class"), columns.pop("probability")
            for place in range(best.shape[1]):
                columns[f"class_{place + 1}"] = names[best[:, place]]
                columns[f"probability_{place + 1}"] = chances[:, place]
        labels = np.array([*map(self.dataset.label_name, indices)], dtype=object)
        judged = ~bad & [label in known for label in labels]
        hits = labels[judged] == columns.get("class_1", labels)[judged]
        table = {
            "name": column(np.array([*map(self.dataset.sample_name, indices)], dtype=object)),
            "label": column(labels),
            **{name: column(values, bad) for name, values in columns.items()},
            "error": column(errors, ~bad),
        }
        counts = {"damaged": bad.sum(), "labels": judged.sum(), "hits": hits.sum()}
        self.rows.add(table, {name: int(count) for name, count in counts.items()})


def on_host(outputs: Any, size: int) -> dict[str, torch.Tensor]:
    """What `predict_step` returned for a batch, each [size, ...]."""
    tensors = outputs if isinstance(outputs, Mapping) else {"prediction": outputs}
    for name, value in tensors.items() or [("no column", None)]:
        if not isinstance(value, torch.Tensor) or value.shape[:1] != (size,):
            shape = f" of shape {[*value.shape]}" if isinstance(value, torch.Tensor) else ""
            what = f"predict_step returned {type(value).__name__}{shape} for {name}"
            remedy = "a tensor, or a dict of tensors, whose first dimension is the batch"
            raise UserError.at("model", what, f"return {remedy}")
    return {
        str(name): (value.float() if value.dtype in HALVES else value).detach().cpu()
        for name, value in tensors.items()
    }
