"""Predicts a row per sample, each exactly once at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from distdl.data.encoded import EncodedData
from distdl.data.keyed import KeyedDataset
from distdl.data.sampling import EvalBatches
from distdl.distributed import process_group
from distdl.distributed.agreement import Agreement
from distdl.domains.domain import Domain, domain_of, domain_of_predictions
from distdl.domains.rows import Columns, Predicted, PredictedRows, refuse_output
from distdl.runs import checkpoints
from distdl.runs.directory import shown
from distdl.tasks.evaluate import checkpoint_of
from distdl.util.errors import Problem, UserError
from distdl.util.ranges import Positive
from distdl.util.safe_paths import odd
from distdl.util.screen import say
from distdl.worker.build import Built
from distdl.worker.initial_state import start
from distdl.worker.task import Metrics, Task

if TYPE_CHECKING:
    from distdl.tasks.prediction_rows import Rows

Shapes = dict[str, tuple[str, tuple[int, ...]]]  # name -> type, and shape of a sample's value


class Predict(Task[Built]):
    """Calls `predict_step` for each sample of the data's `predict_dataloader`, in its order.

    A row has the sample's name (or its index) and what `predict_step` returned for it: a tensor, or
    a dict of tensors, whose first dimension is the batch. A module of a domain has its domain's
    rows instead (`Domain.rows`): a classifier the most probable classes and their probabilities.
    Of a damaged image a row says `error`.

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
            yield Problem(
                "output",
                what=f"{output!r} {why}",
                remedy="name a folder in the run's directory",
                code="wrong-kind",
            )

    def run(self, context: Built) -> Metrics:
        """Returns `predict/samples`; of images also `predict/damaged`; and what the domain says of
        all rows, such as `predict/acc1` of a classifier if all images have labels.

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
        stored = rows.open() if trainer.is_global_zero else 0  # samples that have rows
        context.checkpointer.position.predicted = process_group.broadcast(stored)
        collector = Collector(context, rows, self.top_k, self.part_samples)
        trainer.callbacks.append(collector)  # type: ignore[attr-defined]
        trainer.look_at_loader(collector.opened)  # `distribute` has given each rank its share
        start(context, path, trainer.predict, return_predictions=False)
        samples = collector.total - len(collector.order)
        if trainer.is_global_zero:
            if samples == collector.total:
                further = collector.kept.finish(rows.folder, rows.read, rows.columns)
                rows.finish()
                for name in further:
                    say(f"rows    {shown(rows.folder / name)}")
            say(f"rows    {shown(rows.folder)}: {samples:,} of {collector.total:,}")
        metrics = {"predict/samples": float(samples)}
        counts = process_group.broadcast(rows.record["counts"])
        return metrics | collector.kept.metrics(counts, samples)


class Collector(Callback):
    """Collects the outputs of all ranks; rank 0 stores them in the order of the samples.

    In the batches of `EvalBatches`, row i of the r-th of W ranks is sample i * W + r.
    """

    batches: EvalBatches  # of this rank's loader
    kept: PredictedRows

    def __init__(self, context: Built, rows: Rows, top_k: int, part_samples: int) -> None:
        self.context = context
        self.rows = rows
        self.top_k = top_k
        self.part_samples = part_samples
        self.agreement = Agreement(1)
        self.outputs: list[Columns] = []
        self.shapes: Shapes | None = None
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
            raise UserError.at(
                "data",
                what="predict_dataloader: its samples cannot be counted",
                remedy="return one DataLoader over a map-style dataset",
                code="unreadable",
            )
        self.batches = batches
        self.dataset = keyed.dataset
        self.named = isinstance(self.dataset, EncodedData)
        domain = domain_of_predictions(self.context.module)
        self.kept = (domain or Domain()).rows(named=self.named, top_k=self.top_k)
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
        size = min(per_batch, self.batches.rows - batch_idx * per_batch)
        self.outputs.append(self.kept.of_batch(outputs, size))
        if self.kept.uniform:
            self._refuse_other_columns(self.outputs[-1])
        if self.named:
            assert isinstance(batch, dict)
            self.errors += batch["damaged"]
        (stop,) = self.agreement.exchange(bool(self.context.checkpointer.stop))
        if stop or len(self.outputs) * per_batch * self.batches.world_size >= self.part_samples:
            self._store()

    def _refuse_other_columns(self, outputs: Columns) -> None:
        """All batches of all ranks give the same columns: refuses what differs from the first."""
        now = {name: (str(value.dtype), tuple(value.shape[1:])) for name, value in outputs.items()}
        if self.shapes is None:
            self.shapes = now
            for other in process_group.gather(now):
                refuse_difference(now, other)
        refuse_difference(self.shapes, now)

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.outputs:
            self._store()

    def _store(self) -> None:
        """Gathers the rows of all ranks, and stores them as a part."""
        names = [*self.outputs[0]]
        mine = {name: joined([each[name] for each in self.outputs]) for name in names}
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
        """Stores a part."""
        samples = Predicted(indices)
        if self.named:
            numbers = indices.tolist()
            samples.names = np.array([*map(self.dataset.sample_name, numbers)], dtype=object)
            samples.known = self.dataset.known(numbers)
            samples.errors = columns.pop("error")
            samples.classes = self.context.checkpointer.state.classes or self._names_of_data() or ()
        rows = self.kept.table(columns, samples)
        self.rows.add(rows.columns, rows.missing, **rows.counts)

    def _names_of_data(self) -> list[Any] | None:
        domain = domain_of(self.context.datamodule, self.context.module)
        return domain.names(self.context.datamodule)


def joined(parts: list[torch.Tensor | np.ndarray]) -> np.ndarray:
    """A column of several batches, on the host."""
    arrays = [each for each in parts if isinstance(each, np.ndarray)]
    if arrays:
        return np.concatenate(arrays)
    return torch.cat([each for each in parts if isinstance(each, torch.Tensor)]).cpu().numpy()


def refuse_difference(one: Shapes, other: Shapes) -> None:
    for name in one.keys() | other.keys():
        if one.get(name) != other.get(name):
            before, now = (
                f"{c[name][0]} {[*c[name][1]]}" if name in c else "none" for c in (one, other)
            )
            what = f"{name!r} is {before} per sample in one batch of predict_step, {now} in another"
            refuse_output(what)
