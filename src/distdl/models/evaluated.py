"""Base of modules whose validation is that of a domain: exact at any number of ranks."""

from __future__ import annotations

import logging
import warnings
from typing import Any, Self

from lightning.pytorch import LightningModule
from torch import nn

from distdl.domains.domain import Domain
from distdl.domains.drawing import Drawing
from distdl.domains.metric import Metric, sum_over
from distdl.models.freezing import Frozen

log = logging.getLogger(__name__)


class Evaluated(LightningModule):
    """A module of a domain. It logs the values of the domain's metric after each validation as
    `val/...`, and after a test as `test/...`.

    A subclass names its `domain`, and calls `self.evaluated(batch, outputs)` in `validation_step`.
    A test takes the same step, unless it has a `test_step` of its own. Nothing is logged in
    training, and no optimizer is defined.
    """

    domain: Domain
    frozen = Frozen()  # of `self.network`
    unfreeze_at: int | None = None  # the epoch from which on that is trained, too

    def __init__(self) -> None:
        super().__init__()
        self.metric: Metric[Any, Any] = self.domain.metric()
        self.drawing: Drawing[Any, Any] | None = self.domain.drawing(self.metric)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.frozen.keep_statistics(self._frozen_in)
        return self

    def on_fit_start(self) -> None:
        # Lightning warns of modules in evaluation mode; those that are kept there are no mistake.
        kept = len(self.frozen.norms)
        warnings.filterwarnings("ignore", message=rf"Found {kept} module\(s\) in eval mode")

    @property
    def trained_later(self) -> frozenset[str]:
        """The names of frozen parameters that will be trained. The optimizer has them from the
        start, so that its groups are the same before and after."""
        if self.unfreeze_at is None:
            return frozenset()
        prefix = "" if self._frozen_in is self else "network."
        return frozenset(f"{prefix}{name}" for name in self.frozen.weights)

    def lay_out_all(self) -> None:
        """For a strategy that lays out what is trained once (`unfreezes = False`), before it does:
        what is frozen is due in the first epoch that this process trains."""
        self.frozen.thaw(self._frozen_in)

    def on_train_epoch_start(self) -> None:
        self._unfreeze_when_due()

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self._unfreeze_when_due()  # a resume inside an epoch does not start it

    def _unfreeze_when_due(self) -> None:
        if self.unfreeze_at is None or self.current_epoch < self.unfreeze_at:
            return
        if not self.frozen.weights:
            return
        self.frozen.thaw(self._frozen_in)
        count = len(self.frozen.weights)
        self.frozen = Frozen()
        log.info("model.unfreeze_at=%d: %d more weights are trained", self.unfreeze_at, count)

    @property
    def _frozen_in(self) -> nn.Module:
        network = getattr(self, "network", None)
        return network if isinstance(network, nn.Module) else self

    def on_validation_epoch_start(self) -> None:
        self.metric.start(self.device)
        if self.drawing is not None:
            self.drawing.start(self.device)

    def evaluated(self, batch: object, outputs: object) -> None:
        """Counts a batch of the validation or test, as it arrived at the step, and what the network
        gave for it."""
        self.metric.add(batch, outputs)
        if self.drawing is not None:
            self.drawing.add(batch, outputs)

    def on_validation_epoch_end(self) -> None:
        self._log_result("val")

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: object, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self._log_result("test")

    def _log_result(self, stage: str) -> None:
        values = self.metric.result(sum_over(self.trainer.strategy))
        # Lightning would recommend sync_dist, but all ranks have the same values.
        warnings.filterwarnings("ignore", message=rf"It is recommended to use `self.log\('{stage}/")
        named = {f"{stage}/{name}": value for name, value in values.items()}
        self.log_dict(named, rank_zero_only=False, sync_dist=False)
