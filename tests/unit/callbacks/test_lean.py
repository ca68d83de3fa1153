"""What distdl's callbacks cost a step: Lightning calls no empty hook of theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import Profiler
from torch import nn
from torch.optim import Optimizer

from distdl.callbacks import Checkpointer, ModuleState, Pictures, Progress, StepMetrics
from distdl.callbacks.lean import LeanCallback

IN_STEP = ("zero_grad", "before_backward", "after_backward", "before_optimizer_step")


class Counting(Profiler):
    """Counts the hooks of callbacks that Lightning calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def start(self, action_name: str) -> None: ...

    def stop(self, action_name: str) -> None: ...

    @contextmanager
    def profile(self, action_name: str) -> Iterator[None]:
        if action_name.startswith("[Callback]"):
            self.calls[action_name.removeprefix("[Callback]")] += 1
        yield


class Watching(LeanCallback):
    """Uses one of the four hooks."""

    def __init__(self) -> None:
        self.steps = 0

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        self.steps += 1


def fitted(*callbacks: Callback) -> Counter[str]:
    counting = Counting()
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    off["enable_model_summary"] = False
    Trainer(
        accelerator="cpu",
        callbacks=[*callbacks],
        profiler=counting,
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=0,
        **off,
    ).fit(BoringModel())
    return counting.calls


def test_a_step_calls_no_empty_hook():
    calls = fitted(ModuleState(nn.Linear(1, 1)), LeanCallback())
    assert calls["ModuleState.on_train_batch_start"] == 3
    assert not [hook for hook in calls if hook.endswith(IN_STEP)]


def test_a_hook_that_is_defined_is_called():
    watching = Watching()
    calls = fitted(watching)
    assert watching.steps == 3
    assert calls["Watching.on_before_optimizer_step"] == 3


@pytest.mark.parametrize("kind", [Checkpointer, ModuleState, Pictures, Progress, StepMetrics])
def test_callbacks_of_every_run_are_lean(kind):
    assert issubclass(kind, LeanCallback)
