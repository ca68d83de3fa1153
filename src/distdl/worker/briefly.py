"""A training of a few steps that leaves nothing behind, to measure one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from omegaconf import DictConfig, OmegaConf

from distdl.config import recipe as configs
from distdl.job import Resources
from distdl.ranks.environment import Environment
from distdl.ranks.stopping import StopRequest
from distdl.runs.directory import Attempt, RunDirectory
from distdl.worker.build import build

SHORT = {
    "trainer.max_epochs": -1,
    "trainer.limit_val_batches": 0,
    "trainer.num_sanity_val_steps": 0,
    "trainer.enable_model_summary": False,
}


def train_briefly(
    config: DictConfig,
    environment: Environment,
    resources: Resources,
    stop: StopRequest,
    without: tuple[type[Callback], ...],
    more: Sequence[Callback] = (),
) -> None:
    """Trains `trainer.max_steps` steps in a folder that is removed then. Collective.

    Args:
        without: Kinds of callbacks that are left out.
        more: Callbacks beside those of the config.
    """
    settings = configs.merge(config, OmegaConf.create({}), SHORT)
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder))
        attempt = Attempt(run.path / "attempts/001")
        built = build(settings, run, attempt, environment, resources, stop, [])
        trainer: Any = built.trainer
        trainer.callbacks = [*(c for c in trainer.callbacks if not isinstance(c, without)), *more]
        trainer.fit(built.module, datamodule=built.datamodule)
        built.release()
