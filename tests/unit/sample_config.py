"""A complete, valid config as composing gives it; tables of changes to it; both stages of
validation, in this process."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from omegaconf import DictConfig, OmegaConf

from distdl.util.errors import Problem
from distdl.validation.validate import check_bindings, problems_of

_YAML = """
name: null
experiment_name: sample
seed: 0
tags: []
output_dir: outputs
dry_run: false
follow: true
project: {root: null, allow: []}
checkpoint: {every_n_steps: null, every_minutes: 10, every_n_epochs: 1, keep_last: 2,
  monitor: val/acc1, mode: max, resume_from: null}
trainer: {accelerator: auto, devices: auto, num_nodes: 1, max_epochs: 90, max_steps: -1,
  precision: 32-true, accumulate_grad_batches: 1, limit_train_batches: null, overfit_batches: 0.0,
  benchmark: true}
task: {_target_: distdl.tasks.train}
model: {_target_: lightning.pytorch.demos.boring_classes.BoringModel}
data: {_target_: lightning.pytorch.demos.boring_classes.BoringDataModule}
optimizer: {_target_: torch.optim.SGD, lr: 0.1, lr_scaling: linear, lr_reference_batch: 256,
  decay_norm_and_bias: false, momentum: 0.9}
schedule: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 3, interval: epoch}
strategy: {_target_: lightning.pytorch.strategies.DDPStrategy, find_unused_parameters: false}
launcher: {_target_: distdl.launchers.local.LocalLauncher, forward_env: []}
tracking: {csv: {_target_: lightning.pytorch.loggers.CSVLogger, save_dir: .}}
callbacks: {early_stopping: {_target_: lightning.pytorch.callbacks.EarlyStopping,
  monitor: "${checkpoint.monitor}"}}
"""


def sample(changes: dict[str, Any] | None = None) -> DictConfig:
    """The config with some values set, as `++key=value` sets them."""
    config = OmegaConf.create(_YAML)
    for path, value in (changes or {}).items():
        OmegaConf.update(config, path, value, merge=False, force_add=True)
    return config


def node(target: str, *arguments: Any, **named: Any) -> dict[str, Any]:
    return {"_target_": target, **({"_args_": [*arguments]} if arguments else {}), **named}


def problems(changes: dict[str, Any], root: Any = None, size: Any = None) -> list[Problem]:
    """What both stages of validation refuse in a run on this machine."""
    config, root = sample(changes), str(root) if root else None
    first = problems_of(config, topology=size, local=True, project_root=root)
    with mock.patch.object(sys, "path", [*sys.path]):
        return first or check_bindings(config, size, root, local=True, in_process=True)[0]


def rows(table: str) -> list[tuple[str, list[str]]]:
    """Lines `what is typed | a part of what is read | the next part`."""
    lines = [line.split(" | ") for line in table.splitlines() if line and line[0] != "#"]
    return [(typed, parts) for typed, *parts in lines]


def change(text: str, **names: Any) -> dict[str, Any]:
    """`path = value in Python` as what `sample` takes."""
    path, _, value = text.partition(" = ")
    return {path: eval(value, {"node": node, **names})}


def check_parts(text: str, parts: list[str]) -> None:
    """Every part is in the text, in this order."""
    rest = text
    for part in parts:
        assert part in rest, text
        rest = rest.partition(part)[2]
