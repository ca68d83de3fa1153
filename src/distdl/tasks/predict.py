"""Predicts a row per sample, each exactly once at any number of ranks."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from distdl.callbacks.checkpointer import KEY, class_names
from distdl.data.encoded import EncodedImages
from distdl.data.sampling import EvalBatches
from distdl.distributed import process_group
from distdl.models.classifier import ImageClassifier
from distdl.runs import checkpoints
from distdl.runs.directory import shown
from distdl.stores import is_remote, open_store
from distdl.tasks.evaluate import checkpoint_of
from distdl.tasks.needs import needs
from distdl.tasks.prediction_rows import FORMATS, Rows
from distdl.util.errors import Problem, UserError
from distdl.worker.build import Built, data_share
from distdl.worker.initial_state import start

BATCHES = 10  # after so many, the ranks ask each other whether any was asked to end
HALVES = (torch.float16, torch.bfloat16)  # which NumPy or JSON lack


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
    trainer, rows = context.trainer, Rows(context.run.path / output, format)
    if trainer.is_global_zero:
        rows.open()
        unsigned = source and source.partition("?")[0]  # a signature is a secret
        rows.describe(checkpoint=identity(path), source=unsigned, format=format, top_k=top_k)
    stored = process_group.broadcast(rows.stored.rows)
    context.checkpointer.position.predicted = stored
    collector = Collector(context, rows, stored, top_k, part_samples)
    trainer.callbacks.append(collector)  # type: ignore[attr-defined]
    # `distribute` has given each rank its share; Lightning would replace the batch sampler.
    connector = trainer._data_connector
    connector._prepare_dataloader = lambda loader, *_, **__: collector.opened(loader)  # type: ignore[method-assign]
    start(context, path, trainer.predict, return_predictions=False)
    if trainer.is_global_zero:
        parts, total = len(rows.stored.parts), collector.total
        if collector.stored == total and not rows.complete:
            rows.finish()
        print(
            f"rows    {shown(rows.folder)}: {collector.stored:,} of {total:,} in {parts} x {format}"
        )
    counts = process_group.broadcast(rows.stored.counts)
    metrics = {"predict/samples": collector.stored}
    if "damaged" in counts:
        metrics["predict/damaged"] = counts["damaged"]
        if counts["labels"] and counts["labels"] == collector.stored - counts["damaged"]:
            metrics["predict/acc1"] = counts["hits"] / counts["labels"]
    return {name: float(value) for name, value in metrics.items()}


def identity(path: str | None) -> str | None:
    """Names a checkpoint by the sha256 of its files: `last` and `best` may be others later."""
    if path is None:
        return None
    files = checkpoints.manifest_at(Path(path)).get("files") or {}
    if not files and Path(path).is_dir():
        return path
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
    source = str(node.get("source") or "")
    is_path = source and context["local"] and not is_remote(source)
    if is_path and not Path(folder := open_store(source).uri).is_dir():
        yield Problem("source", f"no such folder: {folder}", "a folder of images, or a URI")
    output = PurePath(node.get("output", "predictions"))
    if output.is_absolute() or ".." in output.parts or not output.parts:
        what = f"is {str(output)!r}, not a folder in the run's directory"
        yield Problem("output", what, "task.output=predictions")
    for key, usual in (("top_k", 5), ("part_samples", 10_000)):
        if type(value := node.get(key, usual)) is not int or value < 1:
            what = f"is {value!r}, not a whole number of at least 1"
            yield Problem(key, what, f"task.{key}={usual}")


predict.check = check  # type: ignore[attr-defined]


class Collector(Callback):
    """Collects the outputs of all ranks; rank 0 stores them in the order of the samples.

    In the batches of `EvalBatches`, row i of the r-th of W ranks is sample i * W + r.

    Args:
        stored: How many rows an interrupted call has stored.
    """

    batches: EvalBatches | None = None
    network_classes = 0

    def __init__(
        self, context: Built, rows: Rows, stored: int, top_k: int, part_samples: int
    ) -> None:
        self.rows, self.top_k, self.part_samples = rows, top_k, part_samples
        self.stop, self.datamodule = context.checkpointer.stop, context.datamodule
        trainer = context.trainer
        place = trainer.strategy, trainer.global_rank, trainer.world_size
        self.writes, (self.share, self.shares) = trainer.is_global_zero, data_share(*place)
        self.first = self.stored = stored
        self.outputs: list[dict[str, torch.Tensor]] = []
        self.errors: list[str] = []
        self.waiting = 0  # rows of this rank that are not stored yet
        self.classes: Sequence[str] | None = None

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.classes = (checkpoint.get(KEY) or {}).get("classes")

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
        self.classes = self.classes or class_names(self.datamodule)
        if self.writes:
            key = getattr(self.dataset, "key", "")[:12]
            self.rows.describe(data=f"{self.total} samples {key}".strip())
        if not batches.num_samples:
            warnings.filterwarnings("ignore", message="Total length of `DataLoader`")
        return loader

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        assert self.batches is not None
        done = batch_idx * self.batches.rows_per_batch
        size = min(self.batches.rows_per_batch, self.batches.rows - done)
        self.outputs.append(self._tensors(pl_module, outputs, size))
        self.waiting += size
        if isinstance(self.dataset, EncodedImages):
            self.errors += batch["damaged"]
        stops = batch_idx % BATCHES == 0 and any(process_group.gather(bool(self.stop)))
        if stops or self.waiting * self.shares >= self.part_samples:
            self._store()

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.outputs:
            self._store()

    def _tensors(self, module: LightningModule, outputs: Any, size: int) -> dict[str, torch.Tensor]:
        """Each [size, ...], on the host; ranked classes stay on the device, and nobody waits."""
        self.ranked = isinstance(module, ImageClassifier) and isinstance(outputs, torch.Tensor)
        if self.ranked:
            self.network_classes = outputs.shape[1]
            best = outputs.float().softmax(dim=1).topk(min(self.top_k, self.network_classes))
            return {"class": best.indices, "probability": best.values}
        tensors = outputs if isinstance(outputs, Mapping) else {"prediction": outputs}
        for name, value in tensors.items() or [("no column", None)]:
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (size,):
                shape = f" of shape {[*value.shape]}" if isinstance(value, torch.Tensor) else ""
                what = f"predict_step returned {type(value).__name__}{shape} for {name}"
                remedy = "a tensor, or a dict of tensors, whose first dimension is the batch"
                raise UserError.at("model", what, f"return {remedy}")
        return {str(name): value.detach().cpu() for name, value in tensors.items()}

    def _store(self) -> None:
        """Gathers the rows of all ranks, and stores them as a part."""
        assert self.batches is not None and self.batches.order is not None
        names, mine = self.outputs[0], dict[str, np.ndarray]()
        for name in names:
            values = torch.cat([each[name] for each in self.outputs])
            mine[name] = (values.float() if values.dtype in HALVES else values).cpu().numpy()
        if self.errors:
            mine["error"] = np.array(self.errors, dtype=object)
        done = self.stored - self.first
        indices = self.batches.order[done : done + self.waiting * self.shares].tolist()
        self.outputs, self.errors, self.waiting = [], [], 0
        self.stored += len(indices)
        shares = dict(reversed(process_group.gather((self.share, mine))))
        if self.writes:
            columns = {}
            for name in mine:
                rows = np.stack([shares[share][name] for share in range(self.shares)], axis=1)
                columns[name] = rows.reshape(-1, *rows.shape[2:])[: len(indices)]
            self.rows.add(*self._table(indices, columns))
        process_group.check_all(self.stop, f"after {self.stored:,} of {self.total:,} predictions")

    def _table(
        self, indices: list[int], columns: dict[str, np.ndarray]
    ) -> tuple[dict[str, list[Any]], dict[str, int]]:
        """Columns of a part, and what to count in it."""
        errors = [text or None for text in columns.pop("error", [""] * len(indices))]
        named = self.classes if len(self.classes or ()) == self.network_classes else None
        if self.ranked:
            names = np.array(named or [*map(str, range(self.network_classes))], dtype=object)
            ranked, chances = names[columns.pop("class")].T, columns.pop("probability").T
            for place, (best, chance) in enumerate(zip(ranked, chances, strict=True), 1):
                columns |= {f"class_{place}": best, f"probability_{place}": chance}
        table: dict[str, list[Any]] = {
            name: [
                None if bad else value for bad, value in zip(errors, values.tolist(), strict=True)
            ]
            for name, values in columns.items()
        }
        if not isinstance(self.dataset, EncodedImages):
            return {"index": indices, **table}, {}
        labels = [self.dataset.label_name(index) for index in indices]
        known = {*named} if self.ranked and named else set()
        judged = zip(labels, table.get("class_1", labels), errors, strict=True)
        hits = [label == best for label, best, bad in judged if label in known and not bad]
        counts = {"damaged": sum(map(bool, errors)), "labels": len(hits), "hits": sum(hits)}
        images: dict[str, list[Any]] = {
            "name": [_text(self.dataset.sample_name(index)) for index in indices],
            "label": [label and _text(label) for label in labels],
        }
        return {**images, **table, "error": errors}, counts


def _text(name: str) -> str:
    """A file's name as text, also if it is not UTF-8."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")
