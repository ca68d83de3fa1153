"""A complete, valid config as composing gives it, for the tests of validation."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from distdl.util.errors import UserError
from distdl.validation import validate

_YAML = """
name: null
experiment_name: sample
seed: 0
tags: []
output_dir: outputs
dry_run: false
follow: true
project: {root: null, allow: []}
checkpoint:
  every_n_steps: null
  every_minutes: 10
  every_n_epochs: 1
  keep_last: 2
  monitor: val/acc1
  mode: max
  resume_from: null
trainer:
  accelerator: auto
  devices: auto
  num_nodes: 1
  max_epochs: 90
  max_steps: -1
  precision: 32-true
  accumulate_grad_batches: 1
  limit_train_batches: null
  overfit_batches: 0.0
  benchmark: true
task: {_target_: distdl.tasks.train}
model: {_target_: lightning.pytorch.demos.boring_classes.BoringModel}
data:
  _target_: lightning.pytorch.demos.boring_classes.BoringDataModule
optimizer:
  _target_: torch.optim.SGD
  lr: 0.1
  lr_scaling: linear
  lr_reference_batch: 256
  decay_norm_and_bias: false
  momentum: 0.9
schedule:
  _target_: torch.optim.lr_scheduler.StepLR
  step_size: 3
  interval: epoch
strategy:
  _target_: lightning.pytorch.strategies.DDPStrategy
  find_unused_parameters: false
launcher: {_target_: distdl.launchers.local.LocalLauncher, forward_env: []}
tracking:
  csv: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: .}
callbacks:
  early_stopping:
    _target_: lightning.pytorch.callbacks.EarlyStopping
    monitor: ${checkpoint.monitor}
"""


def sample(changes: dict[str, Any] | None = None) -> DictConfig:
    """The config with some values set, as `++key=value` sets them."""
    config = OmegaConf.create(_YAML)
    for path, value in (changes or {}).items():
        OmegaConf.update(config, path, value, merge=False, force_add=True)
    assert isinstance(config, DictConfig)
    return config


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the second stage runs in this process, so that Lightning is imported once."""

    def answer(request: str) -> dict[str, Any]:
        from distdl.validation.child import answered

        return json.loads(json.dumps(answered(json.loads(request))))  # type: ignore[no-any-return]

    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(validate, "_ask_child", answer)


def refusals(config: DictConfig, root: Any = None) -> list[str]:
    """What both stages of validation refuse, as a user reads it."""
    try:
        validate.validate(config, None, local=True, project_root=str(root) if root else None)
    except UserError as error:
        return [str(problem) for problem in error.problems]
    return []
