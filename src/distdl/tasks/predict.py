"""Predicts a row per sample, each exactly once at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from distdl.callbacks.checkpointer import class_names
from distdl.data.encoded import EncodedImages
from distdl.data.loading import KeyedDataset
from distdl.data.sampling import EvalBatches
from distdl.distributed import process_group
from distdl.distributed.agreement import Agreement
from distdl.models.classifier import ImageClassifier
from distdl.runs import checkpoints
from distdl.runs.directory import shown
from distdl.tasks.evaluate import checkpoint_of
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import Positive
from distdl.util.safe_paths import odd
from distdl.worker.build import Built
from distdl.worker.initial_state import start
from distdl.worker.task import Metrics, Task

if TYPE_CHECKING:
    from distdl.tasks.prediction_rows import Rows

HALVES = (torch.float16, torch.bfloat16)  # which NumPy or JSON lack
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
NUMBERS = (torch.bool, torch.float32, torch.float64, torch.uint16, torch.uint32, *INTEGERS)
Columns = dict[str, tuple[str, tuple[int, ...]]]  # name -> type, and shape of a sample's value


class Predict(Task[Built]):
    """Calls `predict_step` for each sample of the data's `predict_dataloader`, in its order.

    A row has the sample's name (or its index) and what `predict_step` returned for it: a tensor, or
    a dict of tensors, whose first dimension is the batch. With `ImageClassifier` it has the label,
    the most probable classes and their probabilities instead, or for a damaged image `error`.

    Rows are stored in parts, and a manifest at the end. The same command resumes behind the last
    complete part, on any number of ranks.

    Args:
        checkpoint: As of `Validate`.
        output: Folder of the rows, in the run's directory.
        format: Of the rows' files.
        top_k: How many classes the row of an image has.
        part_samples: The least number of rows in a part, except the last.
    """

    evaluates = True
    calls = ("predict_step", "predict_dataloader")

    def __init__(
        self,
        checkpoint: str = "best",
        output: str = "predictions",
        format: Literal["parquet", "csv", "jsonl"] = "parquet",
        top_k: Positive = 5,
        part_samples: Positive = 10_000,
    ) -> None:
        self.checkpoint = checkpoint
        self.output = output
        self.format = format
        self.top_k = top_k
        self.part_samples = part_samples

    @classmethod
    def check(cls, node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem | str]:
        yield from super().check(node, context)
        output = str(node.get("output", "predictions"))
        if why := odd(output):
            yield Problem("output", f"{output!r} {why}", "name a folder in the run's directory")

    def run(self, context: Built) -> Metrics:
        """Returns `predict/samples`; of images also `predict/damaged`, and `predict/acc1` if all
        have labels.

        Raises:
            UserError: There is no such checkpoint, `output` holds other rows, or a part cannot be
                written.
        """
        from distdl.tasks.prediction_rows import Rows  # pyarrow, which no other task needs

        path = checkpoint_of(context, self.checkpoint)
        identity = path and checkpoints.identity(Path(path))
        folder = context.run.path / self.output
        rows = Rows(folder, self.format, checkpoint=identity, top_k=self.top_k)
        trainer = context.trainer
        stored = rows.open() if trainer.is_global_zero else 0
        context.checkpointer.position.predicted = process_group.broadcast(stored)
        collector = Collector(context, rows, self.top_k, self.part_samples)
        trainer.callbacks.append(collector)  # type: ignore[attr-defined]
        trainer.look_at_loader(collector.opened)  # `distribute` has given each rank its share
        start(context, path, trainer.predict, return_predictions=False)
        samples = collector.total - len(collector.order)
        if trainer.is_global_zero:
            if samples == collector.total:
                rows.finish()
            print(f"rows    {shown(rows.folder)}: {samples:,} of {collector.total:,}")
        metrics = {"predict/samples": float(samples)}
        if counts := process_group.broadcast(rows.record["counts"]):
            metrics["predict/damaged"] = float(counts["damaged"])
            if 0 < counts["labels"] == samples - counts["damaged"]:
                metrics["predict/acc1"] = counts["hits"] / counts["labels"]
        return metrics


class Collector(Callback):
    """Collects the outputs of all ranks; rank 0 stores them in the order of the samples.

    In the batches of `EvalBatches`, row i of the r-th of W ranks is sample i * W + r.
    """

    batches: EvalBatches  # of this rank's loader

    def __init__(self, context: Built, rows: Rows, top_k: int, part_samples: int) -> None:
        self.context = context
        self.rows = rows
        self.top_k = top_k
        self.part_samples = part_samples
        self.ranked = type(context.module).predict_step is ImageClassifier.predict_step
        self.agreement = Agreement(1)
        self.outputs: list[dict[str, torch.Tensor]] = []
        self.columns: Columns | None = None
        self.errors: list[str] = []

    def opened(self, loader: object) -> None:
        """Takes note of this rank's loader, before its first batch."""
        batches = getattr(loader, "batch_sampler", None)
        if not isinstance(batches, EvalBatches) and not getattr(batches, "drop_last", False):
            batches = getattr(getattr(loader, "sampler", None), "batches", None)
        keyed = getattr(loader, "dataset", None)
        if (
            not isinstance(batches, EvalBatches)
            or not isinstance(keyed, KeyedDataset)
            or batches.batched
            or hasattr(self, "batches")
        ):
            what = "predict_dataloader: its samples cannot be counted"
            raise UserError.at("data", what, "return one DataLoader over a map-style dataset")
        self.batches = batches
        self.dataset = keyed.dataset
        self.order: Any = batches.order  # indices of the samples without a stored row
        self.total = self.context.checkpointer.position.predicted + batches.num_samples
        if self.context.trainer.is_global_zero:
            key = getattr(self.dataset, "key", "")[:12]
            self.rows.describe(f"{self.total} samples {key}".strip())

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: object,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        per_batch = self.batches.rows_per_batch
        if self.ranked:  # stay on the device, and nobody waits for them
            assert isinstance(outputs, torch.Tensor)
            self.network_classes = outputs.shape[1]
            best = outputs.float().softmax(dim=1).topk(min(self.top_k, self.network_classes))
            self.outputs.append({"class": best.indices, "probability": best.values})
        else:
            size = min(per_batch, self.batches.rows - batch_idx * per_batch)
            self.outputs.append(on_host(outputs, size, self.reserved))
            self._refuse_other_columns(self.outputs[-1])
        if isinstance(self.dataset, EncodedImages):
            assert isinstance(batch, dict)
            self.errors += batch["damaged"]
        (stop,) = self.agreement.exchange(bool(self.context.checkpointer.stop))
        if stop or len(self.outputs) * per_batch * self.batches.world_size >= self.part_samples:
            self._store()

    @property
    def reserved(self) -> tuple[str, ...]:
        """The names of distdl's own columns."""
        return ("name", "label", "error") if isinstance(self.dataset, EncodedImages) else ("index",)

    def _refuse_other_columns(self, outputs: dict[str, torch.Tensor]) -> None:
        """All batches of all ranks give the same columns: refuses what differs from the first."""
        now = {name: (str(value.dtype), tuple(value.shape[1:])) for name, value in outputs.items()}
        if self.columns is None:
            self.columns = now
            for other in process_group.gather(now):
                refuse_difference(now, other)
        refuse_difference(self.columns, now)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.outputs:
            self._store()

    def _store(self) -> None:
        """Gathers the rows of all ranks, and stores them as a part."""
        names = [*self.outputs[0]]
        mine = {n: torch.cat([each[n] for each in self.outputs]).cpu().numpy() for n in names}
        if self.errors:
            mine["error"] = np.array(self.errors, dtype=object)
        world_size = self.batches.world_size
        count = len(mine[names[0]]) * world_size
        indices = self.order[:count]
        self.order = self.order[count:]
        self.outputs = []
        self.errors = []
        # Of ranks that read the same data, the first one's rows.
        by_rank = dict(reversed(process_group.gather((self.batches.rank, mine))))
        if self.context.trainer.is_global_zero:
            columns = {}
            for name in mine:
                rows = np.stack([by_rank[rank][name] for rank in range(world_size)], axis=1)
                columns[name] = rows.reshape(-1, *rows.shape[2:])[: len(indices)]
            self._add(indices, columns)
        when = f"with {len(self.order):,} of {self.total:,} predictions left"
        process_group.check_all(self.context.checkpointer.stop, when)

    def _add(self, indices: np.ndarray, columns: dict[str, np.ndarray]) -> None:
        """Stores a part; the values of damaged images become null."""
        if not isinstance(self.dataset, EncodedImages):
            return self.rows.add({"index": indices, **columns}, {})
        errors = columns.pop("error")
        known = set[str]()
        good = errors == ""
        if self.ranked:
            named = self.context.checkpointer.classes or class_names(self.context.datamodule) or ()
            named = named if len(named) == self.network_classes else ()
            numbers = map(str, range(len(named), self.network_classes))  # if they have no names
            known = {*named}
            classes = np.array([*named, *numbers], dtype=object)
            best, chances = columns.pop("class"), columns.pop("probability")
            for place in range(best.shape[1]):
                columns[f"class_{place + 1}"] = classes[best[:, place]]
                columns[f"probability_{place + 1}"] = chances[:, place]
        samples = indices.tolist()
        names = np.array([*map(self.dataset.sample_name, samples)], dtype=object)
        labels = np.array([*map(self.dataset.label_name, samples)], dtype=object)
        missing = {**dict.fromkeys(columns, ~good), "error": good}
        counts = {
            "damaged": int((~good).sum()),
            "labels": sum(label in known for label in labels[good]),
            "hits": int((labels == columns.get("class_1", ""))[good].sum()),
        }
        table = {"name": names, "label": labels, **columns, "error": errors}
        self.rows.add(table, missing, **counts)


def on_host(outputs: object, size: int, reserved: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """What `predict_step` returned for a batch, each [size, ...]. Raises UserError if it is no
    table of `size` rows, or has a column of a `reserved` name."""
    tensors: Mapping[Any, Any]
    tensors = outputs if isinstance(outputs, Mapping) else {"prediction": outputs}
    if not tensors:
        refuse_output("predict_step returned an empty dict")
    names = [*map(str, tensors)]
    for name, value in zip(names, tensors.values(), strict=True):
        if name in reserved or names.count(name) > 1:
            whose = "a column of distdl" if name in reserved else "another key"
            what = f"predict_step returned {name!r}, which is also the name of {whose}"
            raise UserError.at("model", what, "return it under another name")
        if why := unfit(value, size):
            refuse_output(
                f"predict_step returned {why}" + (f" as {name!r}" if outputs is tensors else "")
            )
    return {
        name: (value.float() if value.dtype in HALVES else value).detach().cpu()
        for name, value in zip(names, tensors.values(), strict=True)
    }


def unfit(value: object, size: int) -> str:
    """Why a value cannot be a column of `size` rows; "" if it can."""
    if not isinstance(value, torch.Tensor):
        return f"a value of type {type(value).__name__}"
    if value.is_nested:
        return "a nested tensor, whose rows differ in length"
    if value.layout is not torch.strided or value.is_quantized:
        return "a sparse or quantized tensor"
    if value.is_complex() or (value.dtype not in NUMBERS and value.dtype not in HALVES):
        return f"a tensor of {value.dtype}, which a table cannot hold"
    if value.shape[:1] != (size,):
        return f"a tensor of shape {[*value.shape]} for {size} samples"
    if 0 in value.shape:
        return f"a tensor of shape {[*value.shape]}, which has no values"
    return ""


def refuse_output(what: str) -> NoReturn:
    remedy = (
        "return a tensor of numbers, or a dict of such tensors, whose first dimension is the "
        "batch: complex numbers by torch.view_as_real, rows of other lengths padded"
    )
    raise UserError.at("model", what, remedy)


def refuse_difference(one: Columns, other: Columns) -> None:
    for name in one.keys() | other.keys():
        if one.get(name) != other.get(name):
            before, now = (
                f"{c[name][0]} {[*c[name][1]]}" if name in c else "none" for c in (one, other)
            )
            what = f"{name!r} is {before} per sample in one batch of predict_step, {now} in another"
            refuse_output(what)
