"""A domain: what samples are. Everything else of distdl asks it, and knows no kind of sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from distdl.domains.collate import stacked
from distdl.domains.drawing import Drawing
from distdl.domains.metric import Metric
from distdl.domains.record import Annotation, SampleRecord
from distdl.domains.rows import PredictedRows
from distdl.images.views import check_views, views_of
from distdl.util.errors import Problem

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule

    from distdl.domains.exports import Exports

# Bytes, epoch and what else its domain's `sample` passes, to the fields of a sample.
View = Callable[..., dict[str, Any]]

BLACK = b"P6 1 1 255\n\0\0\0"  # an image of one pixel, as PPM


class Domain:
    """What samples are: six parts. A subclass says what differs from the defaults below.

    A data module and a module name their domain in a class attribute, `domain = Classification()`,
    and the two must be of one domain. Neither has to: a module without one trains, and its
    predictions are the tensors that `predict_step` returns.

    An instance has no state of a run: it is pickled to the processes that load.
    """

    # As in manifests and messages, such as "classification".
    name = ""
    # The metric that decides which checkpoint is the best, if a run names no `checkpoint.monitor`,
    # and "max" or "min". A module may name an instance of its domain that has another one, as its
    # network decides what is measured. Asked by `callbacks.best`; the report begins with it.
    main_metric: str | None = None
    mode = "max"
    # Part 1: its record in a shard. Asked by `tools.prepare`, and by what reads prepared sets.
    record = SampleRecord()
    # The name in a sample of an annotation that is no mapping of fields.
    field = "target"

    # Part 2: views and augmentation.

    def check(self, node: Mapping[str, Any], *, local: bool = True) -> Iterable[Problem]:
        """Problems of the keys of the data node that `views` takes; paths are relative to the node.
        Called by the `check` of data modules, before anything starts.

        Args:
            local: Whether the run is on this machine, so that packages must be installed here.
        """
        return check_views(node, local)

    def views(self, node: Mapping[str, Any]) -> tuple[View, View]:
        """The views of training and of evaluation, by the same keys of the data node. Called by
        data modules in `__init__`, and with an empty mapping by `data check`, which measures how
        fast images are decoded."""
        return views_of(node)

    def sample(self, view: View, data: bytes, annotation: Annotation, epoch: int) -> dict[str, Any]:
        """The fields of a sample, of its encoded image and what is known of it. Called in a
        loader's worker, which has seeded the generators that views draw from.

        By default the view's fields ("image": uint8 [3, S, S]), and those of an annotation that is
        a mapping, or else the annotation as the field `field`.

        Args:
            view: One of `views`.
            epoch: From 0; 0 in an evaluation.

        Raises:
            DamagedImage: The sample is replaced by another one, and reported.
        """
        return {**view(data, epoch), **self.fields(annotation)}

    def fields(self, annotation: Annotation) -> dict[str, Any]:
        """Those of an annotation in a sample, as `sample` has them by default."""
        return {**annotation} if isinstance(annotation, Mapping) else {self.field: annotation}

    def blank(self, view: View, annotation: Annotation, epoch: int) -> dict[str, Any]:
        """The fields that stand for a damaged sample in a prediction, where its row says what is
        wrong. Called in a loader's worker. By default `sample`, of a black image of one pixel.

        Args:
            annotation: None if it is what is damaged.
        """
        return self.sample(view, BLACK, annotation, epoch)

    # Part 3: collate.

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """A batch of samples, on the host. Called in a loader's worker. Besides the fields of
        `sample` each has "weight" (float32, 1 or 0) and "damaged" (text, "" if intact), and in an
        exact evaluation "index" (int64). By default a tensor [B, ...] for each field, of images
        uint8 [B, 3, S, S]."""
        return stacked(samples)

    # Part 4: the metric over ranks.

    def metric(self) -> Metric[Any, Any]:
        """A new metric. Called by the module (`models.evaluated`)."""
        raise NotImplementedError(f"{type(self).__name__} has no metric")

    # Part 5: rows of predictions.

    def rows(self, *, named: bool, top_k: int) -> PredictedRows:
        """What `task=predict` stores. Called by it, on every rank, if the class that has the
        module's `predict_step` names the domain, too: other modules return rows of their own.

        Args:
            named: Whether the data set names its samples (`PredictedRows`).
            top_k: `task.top_k`.
        """
        return PredictedRows(named)

    def names(self, datamodule: object) -> list[Any] | None:
        """What each checkpoint keeps of the data, in types that `weights_only` loads, so that rows,
        exports and servers can name what the network says. Called by the checkpointer and by
        `task=predict`. By default the names in the data module's `classes`, by label; None if it
        has none."""
        names = getattr(datamodule, "classes", None)
        return [*map(str, names)] if isinstance(names, list | tuple) else None

    def known(
        self, annotations: Sequence[Annotation], classes: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """What rows say of samples beside their names, whatever predicts them: columns by name,
        each [N]. Called on rank 0.

        Args:
            annotations: Of N samples.
            classes: Names by label, as the data set has them; empty if it has none.
        """
        return {}

    def exports(
        self,
        module: LightningModule,
        datamodule: LightningDataModule,
        view: View,
        names: Sequence[object],
    ) -> Exports[Any] | None:
        """How models of the domain leave a run, and what they answer over HTTP (`domains.exports`,
        `domains.answers`). Called by `distdl export`, which `serve` and `deploy` start. None: they
        stay in their runs, where `task=predict` asks them.

        Args:
            module: With the weights of a checkpoint, on the CPU.
            view: That of evaluation, of the images that are predicted.
            names: As `names` gives them.
        """
        return None

    # Part 6: what people look at.

    def drawing(self, metric: Metric[Any, Any]) -> Drawing[Any, Any] | None:
        """A new drawing; None: nothing is drawn. Called by the module (`models.evaluated`).

        Args:
            metric: What `metric` has made for the same validations: a drawing may show its numbers.
        """
        return None


def domain_of(*parts: object) -> Domain:
    """The domain that the first of some modules and data modules names; if none does, a domain with
    the defaults alone."""
    named = (getattr(part, "domain", None) for part in parts)
    return next((domain for domain in named if isinstance(domain, Domain)), Domain())


def domain_of_predictions(module: object) -> Domain | None:
    """The domain whose outputs a module's `predict_step` returns: that of the class that defines
    the method. A subclass that overrides it returns tensors of its own, unless it names a domain
    beside it."""
    for cls in type(module).__mro__:
        if "predict_step" in vars(cls):
            domain = vars(cls).get("domain")
            return domain if isinstance(domain, Domain) else None
    return None
