"""Registers the model of a training that has ended (`tracking.mlflow.register`)."""

from __future__ import annotations

import logging

from omegaconf import DictConfig, OmegaConf

from distdl.config import task_facts
from distdl.runs.checkpoints import best_or_last
from distdl.runs.directory import shown
from distdl.worker import named_tools
from distdl.worker.rank_context import RankContext

log = logging.getLogger(__name__)


def register(config: DictConfig, context: RankContext) -> None:
    """Exports and registers the best checkpoint on rank 0, after the process group is gone. A
    failure leaves the training a success."""
    named = OmegaConf.select(config, "tracking.mlflow.register")
    if not named or context.environment.rank != 0 or not task_facts.of(config).trains:
        return
    try:
        best = best_or_last(context.run.checkpoints)
        named_tools.exporter().export(config, context.run, best, "mlflow")
    except Exception as error:  # the training has succeeded, whatever fails here
        again = f"python -m distdl export {shown(context.run.path)} --to mlflow"
        log.warning("the model is not registered: %s\n  to repeat it: %s", error, again)
