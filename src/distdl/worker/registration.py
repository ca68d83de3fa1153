"""Registers the model of a training that has ended (`tracking.mlflow.register`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.config.recipe import TRAIN
from distdl.job import Resources
from distdl.ranks.environment import Environment
from distdl.runs.directory import shown
from distdl.worker.rank_context import RankContext

log = logging.getLogger(__name__)

# One process on the CPU loads what any strategy wrote, in float32.
ALONE = {
    "strategy": {"_target_": "distdl.strategies.single"},
    "trainer": {"accelerator": "cpu", "precision": "32-true", "devices": 1, "num_nodes": 1},
}


def name_in_registry(config: Mapping[str, Any]) -> str | None:
    """The name that a tracker of the run has for the model, if it has one."""
    trackers = (config.get("tracking") or {}).values()
    names = (node.get("register") for node in trackers if node)
    return next((str(name) for name in names if name), None)


def register(config: DictConfig, context: RankContext) -> None:
    """Exports and registers the best checkpoint, by `task=export` in this process, on rank 0 after
    the process group is gone. A failure leaves the training a success."""
    name = name_in_registry(config)
    if not name or context.environment.rank != 0 or config.task.get("_target_") != TRAIN:
        return
    from hydra.utils import get_method

    from distdl.worker.build import build

    environment = Environment(context.environment.launcher)
    environment.export()
    model = {"compile": False} if "compile" in config.model else {}
    others = {key: config[key] for key in config if key != "strategy"}
    alone: Any = OmegaConf.merge(others, ALONE, {"model": model})
    best = (context.run.checkpoints / "best.ckpt").exists()
    parts = (alone, context.run, context.attempt, environment, Resources(), context.stop)
    try:
        task = get_method("distdl.tasks.export")
        task(
            build(*parts, []), format="mlflow", checkpoint="best" if best else "last", register=name
        )
    except Exception as error:
        log.debug("registration failed", exc_info=True)
        again = f"python -m distdl export {shown(context.run.path)} --to mlflow --register {name}"
        log.warning("the model is not registered: %s\n  to repeat it: %s", error, again)
