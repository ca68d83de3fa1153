"""Metrics of a step: nothing is read from the device between two of them."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.callbacks import EMAWeightAveraging, Progress, StepMetrics
from distdl.optim.optimizers import build_optimizer
from tests.prepared import quiet_trainer
from tests.unit import checkpointing
from tests.unit.sample_data import classifier, share, synthetic


def test_nothing_is_read_from_the_device_between_two_log_steps(tmp_path):
    """A read makes the host wait for the device. Reads are found in two ways: `.item()` and bool()
    by the operator that they end in, also inside torch; the others by their names in Python."""
    batches = set()

    class OfOperators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._local_scalar_dense.default:
                batches.add(trainer.fit_loop.epoch_loop.batch_idx)
            return func(*args, **(kwargs or {}))

    class ByName(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in ("tolist", "numpy", "cpu"):
                batches.add(trainer.fit_loop.epoch_loop.batch_idx)
            return func(*args, **(kwargs or {}))

    module = classifier()
    node = {"_target_": "torch.optim.AdamW", "lr": 0.1}
    module.configure_optimizers = lambda: build_optimizer(module, node, global_batch=4)
    trainer = quiet_trainer(
        tmp_path,
        log_every_n_steps=4,
        gradient_clip_val=1.0,
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[
            StepMetrics(4),
            Progress(bar=False),
            EMAWeightAveraging(decay=0.5),
            checkpointing.checkpointer(tmp_path),
        ],
    )
    with OfOperators(), ByName():
        trainer.fit(module, share(synthetic(train_samples=4 * 12)))
    assert trainer.global_step == 12
    # -1: before the first batch.
    assert batches - {-1} == {3, 7, 11}, "only where the loss is shown"
