"""Lightning's Trainer with the loops and connectors of this package, each set once, here."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer as LightningTrainer

from distdl.loops.averaged import averaged
from distdl.loops.connectors import CheckpointConnector, DataConnector, Restores, SignalConnector
from distdl.loops.decides import who_decides
from distdl.loops.fit import FitLoop, Rebuilt


class Trainer(LightningTrainer):
    """Takes the arguments of Lightning's. `loops/fit.py` says what a training does besides; which
    callback decides when it saves and ends is found among the callbacks (`Decides`)."""

    fit_loop: FitLoop
    _checkpoint_connector: CheckpointConnector
    _data_connector: DataConnector

    @functools.wraps(LightningTrainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fit_loop = FitLoop(self)
        self._checkpoint_connector = CheckpointConnector(self)
        self._data_connector = DataConnector(self)
        self._signal_connector = SignalConnector(self)

    @functools.wraps(LightningTrainer.fit)
    def fit(self, *args: Any, **options: Any) -> None:  # type: ignore[override]
        super().fit(*args, **options)
        if self.fit_loop.was_left:
            raise Rebuilt

    @property
    def has_no_batch(self) -> bool:
        """Whether the loop that runs has no batch of its loader yet. Any thread may ask."""
        with suppress(AttributeError):  # no loop runs, or its loader has not begun
            fetcher: Any = self._active_loop._data_fetcher  # type: ignore[union-attr]
            return bool(fetcher.combined_loader._iterator._idx == 0)
        return False

    def restore_by(self, restores: Restores) -> None:
        """Restores the checkpoint of the next fit or evaluation in this way."""
        self._checkpoint_connector.restores = restores

    def restore_everything(self) -> None:
        """For `Restores.training`: all of the state, as Lightning restores it."""
        self._checkpoint_connector.restore_everything()

    def restore_optimizers(self) -> None:
        """For `Restores.training`. A ValueError if the parameter groups differ."""
        self._checkpoint_connector.restore_optimizers()

    def look_at_loader(self, opened: Callable[[object], None]) -> None:
        """Calls `opened` with the loader of a prediction, of which each rank has its share, before
        its first batch. Lightning then leaves its batch sampler alone."""
        self._data_connector.opened = opened

    def state_to_save(self) -> dict[str, Any]:
        """A complete checkpoint. Collective."""
        return self._checkpoint_connector.dump_checkpoint(weights_only=False)

    def save_checkpoint(self, filepath: _PATH, *args: Any, **options: Any) -> None:
        """For callbacks and modules.

        Raises:
            UserError: The path is in the folder into which only distdl writes.
        """
        if decides := who_decides(self):
            decides.refuse_path(filepath)
        with averaged(self, settled=False):
            super().save_checkpoint(filepath, *args, **options)
