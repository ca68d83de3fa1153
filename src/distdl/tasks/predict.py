"""Predicts a row per sample, each exactly once at any number of ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from distdl.callbacks.checkpointer import KEY
from distdl.data.encoded import EncodedImages
from distdl.data.sampling import EvalBatches
from distdl.distributed import process_group
from distdl.models.classifier import ImageClassifier
from distdl.runs import checkpoints
from distdl.runs.directory import shown
from distdl.tasks.evaluate import checkpoint_of
from distdl.tasks.needs import needs
from distdl.tasks.prediction_rows import FORMATS, Rows
from distdl.util.errors import Problem, UserError
from distdl.worker.build import Built, data_share
from distdl.worker.initial_state import start

Columns = dict[str, np.ndarray]


def predict(
    context: Built,
    checkpoint: str = "best",
    source: str | None = None,
    output: str = "predictions",
    format: str = "parquet",
    top_k: int = 5,
    part_samples: int = 10_000,
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
        format: One of `FORMATS`.
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
    described = {"checkpoint": identity(path), "source": source, "top_k": top_k}
    rows = Rows(context.run.path / output, format, described)
    if context.trainer.is_global_zero:
        rows.open()
    rows.parts, rows.complete = process_group.broadcast((rows.parts, rows.complete))
    if not rows.complete:
        context.checkpointer.position.predicted = rows.count
        collector = Collector(context, rows, top_k, part_samples)
        context.trainer.callbacks.append(collector)  # type: ignore[attr-defined]
        # `distribute` has given each rank its share; Lightning would replace the batch sampler.
        connector = context.trainer._data_connector
        connector._prepare_dataloader = lambda loader, *_, **__: loader  # type: ignore[method-assign]
        start(context, path, context.trainer.predict, return_predictions=False)
        if context.trainer.is_global_zero:
            rows.finish()
    if context.trainer.is_global_zero:
        print(f"rows    {shown(rows.folder)}: {rows.count:,} in {len(rows.parts)} x {format}")
    counts = process_group.broadcast(rows.counts)
    metrics = {"predict/samples": rows.count}
    if "damaged" in counts:
        metrics["predict/damaged"] = counts["damaged"]
    if counts.get("labels") and counts["labels"] == rows.count - counts["damaged"]:
        metrics["predict/acc1"] = counts["hits"] / counts["labels"]
    return {name: float(value) for name, value in metrics.items()}


def identity(path: str | None) -> str:
    """Names a checkpoint by the sha256 of its files: `last` and `best` may be others later."""
    if path is None or Path(path).is_dir():
        return str(path)
    files = checkpoints.manifest_at(Path(path)).get("files") or {}
    return "+".join(each["sha256"] for each in files.values()) or checkpoints.sha256(Path(path))


def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of the task node; paths are relative to it."""
    yield from needs("predict_step", "predict_dataloader")(node, context)
    name = node.get("format", "parquet")
    if name not in FORMATS:
        yield Problem("format", f"is {name!r}", f"one of {', '.join(FORMATS)}")
    elif name == "parquet" and context["local"] and not importlib.util.find_spec("pyarrow"):
        remedy = "pip install 'distdl[data]', or task.format=csv"
        yield Problem("format", "parquet needs the package pyarrow", remedy)
    for key, usual in (("top_k", 5), ("part_samples", 10_000)):
        if type(value := node.get(key, usual)) is not int or value < 1:
            what = f"is {value!r}, not a whole number of at least 1"
            yield Problem(key, what, f"task.{key}={usual}")


predict.check = check  # type: ignore[attr-defined]


class Collector(Callback):
    """Collects the outputs of all ranks; rank 0 stores them in the order of the samples.

    In the batches of `EvalBatches`, row i of the r-th of W ranks is sample i * W + r.
    """

    def __init__(self, context: Built, rows: Rows, top_k: int, part_samples: int) -> None:
        self.context, self.rows, self.top_k, self.part_samples = context, rows, top_k, part_samples
        self.outputs: list[Columns] = []
        self.waiting = 0  # rows of this rank that are not stored yet
        self.classes: Sequence[str] | None = None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.classes = (checkpoint.get(KEY) or {}).get("classes")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rank, self.shares = data_share(trainer.strategy, trainer.global_rank, trainer.world_size)
        self.share = rank
        loader: Any = trainer.predict_dataloaders
        batches: Any = getattr(loader, "batch_sampler", None)
        if batches is None:
            batches = getattr(getattr(loader, "sampler", None), "batches", None)
        if not isinstance(batches, EvalBatches) or batches.batched:
            what = "predict_dataloader: its samples cannot be counted"
            raise UserError.at("data", what, "return one DataLoader over a map-style dataset")
        self.batches, self.dataset = batches, loader.dataset.dataset
        if self.classes is None:
            self.classes = getattr(trainer.datamodule, "classes", None)  # type: ignore[attr-defined]

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        columns = self._columns(pl_module, outputs)
        if isinstance(self.dataset, EncodedImages):
            columns["error"] = np.array(batch["damaged"], dtype=object)
        self.outputs.append(columns)
        self.waiting += len(next(iter(columns.values())))
        if self.waiting * self.shares >= self.part_samples:
            self._store()

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.outputs:
            self._store()

    def _columns(self, module: LightningModule, outputs: Any) -> Columns:
        """One array per column, [B, ...]."""
        if isinstance(module, ImageClassifier) and isinstance(outputs, torch.Tensor):
            best = outputs.float().softmax(dim=1).topk(min(self.top_k, outputs.shape[1]))
            outputs = {"class": best.indices, "probability": best.values}
        named = outputs if isinstance(outputs, Mapping) else {"prediction": outputs}
        columns: Columns = {}
        for name, value in named.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                what = f"predict_step returned {type(value).__name__} for {name!r}"
                remedy = "a tensor, or a dict of tensors, whose first dimension is the batch"
                raise UserError.at("model", what, f"return {remedy}")
            value = value.detach().cpu()
            floats = value.is_floating_point() and value.dtype != torch.float64
            columns[str(name)] = (value.float() if floats else value).numpy()
        return columns

    def _store(self) -> None:
        """Gathers the rows of all ranks, and stores them as a part."""
        names = self.outputs[0]
        mine = {name: np.concatenate([each[name] for each in self.outputs]) for name in names}
        self.outputs, self.waiting = [], 0
        by_share = dict(reversed(process_group.gather((self.share, mine))))
        merged = {
            name: np.stack([by_share[share][name] for share in range(self.shares)], axis=1)
            for name in mine
        }
        before = self.rows.count - self.context.checkpointer.position.predicted
        left = self.batches.num_samples - before
        flat = {k: v.reshape(-1, *v.shape[2:])[:left] for k, v in merged.items()}
        count = len(next(iter(flat.values())))
        assert self.batches.order is not None  # `distribute` gives one for predictions
        indices = self.batches.order[before : before + count].tolist()
        if self.context.trainer.is_global_zero:
            self.rows.add(*self._table(indices, flat))
        else:
            self.rows.parts.append({"rows": count})
        process_group.check_all(self.context.checkpointer.stop, "between two parts of predictions")

    def _table(self, indices: list[int], columns: Columns) -> tuple[dict[str, Any], dict[str, int]]:
        """Columns of a part, and what to count in it."""
        if not isinstance(self.dataset, EncodedImages):
            return {"index": indices, **{k: v.tolist() for k, v in columns.items()}}, {}
        errors = [str(text) or None for text in columns.pop("error")]
        labels = [self.dataset.label_name(index) for index in indices]
        table: dict[str, Any] = {"name": [self.dataset.sample_name(index) for index in indices]}
        table["label"] = labels
        counts = {"damaged": sum(map(bool, errors)), "labels": 0, "hits": 0}
        if "class" in columns:
            known = self.classes
            ranked = columns.pop("class").T.tolist()
            for place, (row, chances) in enumerate(
                zip(ranked, columns.pop("probability").T.tolist(), strict=True), 1
            ):
                called = [known[i] if known else str(i) for i in row]
                table[f"class_{place}"] = _unless(errors, called)
                table[f"probability_{place}"] = _unless(errors, chances)
            pairs = zip(labels, table["class_1"], errors, strict=True)
            labelled = [(a, b) for a, b, bad in pairs if a in (known or ()) and not bad]
            counts |= {"labels": len(labelled), "hits": sum(a == b for a, b in labelled)}
        for name, values in columns.items():
            table[name] = _unless(errors, values.tolist())
        return {**table, "error": errors}, counts


def _unless(errors: Sequence[str | None], values: Sequence[Any]) -> list[Any]:
    return [None if bad else value for bad, value in zip(errors, values, strict=True)]
