"""A validation inside a training, which a signal may cut short.

What holds when a signal comes in a validation:

1. All ranks skip the rest after the same number of batches.
2. The hooks at its end run, so that what a callback or the module has exchanged for the validation
   (moving averages of the weights) is put back. Those of EarlyStopping and ModelCheckpoint do not:
   they only judge metrics. A hook that fails on half a validation is logged, and the others run.
3. Its metrics count for nothing: nothing is logged, and `trainer.callback_metrics` has the values
   from before it, in those hooks too.
4. The state is that of before the validation, bit for bit: `SmallState` puts back what it copied.
   It compares a hash of the weights, which it does not copy. The Checkpointer saves this state, and
   a resumed run repeats the validation from its first batch. Other weights are not saved: the
   resumed run then continues from the checkpoint before.

An undisturbed validation is Lightning's, with three differences. The strategy's
`on_validation_start`, in which ranks may agree on weights, runs before that of the callbacks, which
may exchange them. Averages that the optimizer keeps take the place of the weights (`averaged`). And
no resumed run begins with a sanity check, which may change what was loaded; Lightning leaves it out
only after a resume inside an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.loops import _EvaluationLoop
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from distdl.loops.averaged import averaged
from distdl.loops.decides import Decides, who_decides
from distdl.loops.small_state import SmallState

log = logging.getLogger(__name__)


class ValidationLoop(_EvaluationLoop):
    """See this module's docstring.

    Args:
        trainer: Whose `fit_loop.epoch_loop.val_loop` this becomes.
    """

    def __init__(self, trainer: Trainer) -> None:
        fit, stage = TrainerFn.FITTING, RunningStage.VALIDATING
        super().__init__(trainer, fit, stage, verbose=False, inference_mode=False)
        self.decides: Decides | None = None
        self.was_cut = False  # the current or last validation
        self._before: SmallState | None = None
        self._done_before: dict[str, Any] = {}
        self.averages = ExitStack()  # open while averages are in the place of the weights

    @property
    def modes(self) -> dict[str, bool]:
        """`training` of each layer, by name, as it was before this validation."""
        return self._module_mode.mode

    def run(self) -> list[Any]:
        self.was_cut = False
        if self.trainer.sanity_checking and self.is_resuming:
            return []
        call._call_strategy_hook(self.trainer, "on_validation_start")
        self.decides = who_decides(self.trainer)
        # Before the loaders draw the seeds of their workers.
        self._before = SmallState(self.trainer, self.decides.held) if self.decides else None
        self._done_before = self.batch_progress.state_dict()
        try:
            with self.averages:
                if not self.trainer.sanity_checking:
                    self.averages.enter_context(averaged(self.trainer, settled=True))
                return super().run()
        finally:
            self._before = None

    def reset(self) -> None:
        if self.restarting:
            # A file from before a validation calls its first batch begun. Lightning keeps that in
            # the total, and would take each later file of the epoch for one from inside it too.
            self.batch_progress.total.reset_on_restart()
        super().reset()

    def _on_evaluation_start(self, *args: object, **kwargs: object) -> None:
        call._call_callback_hooks(self.trainer, "on_validation_start")
        call._call_lightning_module_hook(self.trainer, "on_validation_start")

    def _evaluation_step(
        self,
        batch: object,
        batch_idx: int,
        dataloader_idx: int,
        dataloader_iter: Iterator[Any] | None,
    ) -> None:
        super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
        self.was_cut = bool(self.decides and self.decides.cuts_validation(self.trainer))
        if self.was_cut:
            raise StopIteration  # as at the end of the data

    def _store_dataloader_outputs(self) -> None:
        if not self.was_cut:
            super()._store_dataloader_outputs()

    def on_run_end(self) -> list[Any]:
        if not self.was_cut:
            return super().on_run_end()
        trainer, before = self.trainer, self._before
        assert before is not None
        assert self.decides is not None
        before.put_back_metrics()
        self._run_hooks_at_the_end()
        self.averages.close()
        trainer._logger_connector.reset_results()
        if not trainer.sanity_checking:
            trainer.training = True
        before.put_back()
        self.batch_progress.load_state_dict(self._done_before)
        self.decides.validation_was_cut(trainer, before.changed_weight())
        return []

    def _run_hooks_at_the_end(self) -> None:
        trainer = self.trainer
        module = self.trainer.lightning_module
        callbacks = [
            (each, trainer, module)
            for each in trainer.callbacks  # type: ignore[attr-defined]
            if not isinstance(each, EarlyStopping | Checkpoint)
        ]
        for name in ("on_validation_epoch_end", "on_validation_end"):
            for owner, *arguments in (*callbacks, (module,)):
                self._run_hook(owner, name, *arguments)
        call._call_strategy_hook(trainer, "on_validation_end")
        self._on_evaluation_model_train()

    def _run_hook(self, owner: object, name: str, *arguments: object) -> None:
        module = self.trainer.lightning_module
        module._current_fx_name = name  # what `self.log` in it is for
        try:
            getattr(owner, name)(*arguments)
        except Exception as error:  # of the user's code, which may expect all batches
            what = f"{type(owner).__name__}.{name} failed in a validation that was cut short"
            log.warning("%s, which counts for nothing: %s: %s", what, type(error).__name__, error)
        finally:
            module._current_fx_name = None
