"""`data.order=auto`: chosen by what the storage of each node can do, and frozen as by
`distdl.worker.kept_choices`."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from distdl.config import recipe as configs
from distdl.config import task_facts
from distdl.data.reading_order import choose, measure
from distdl.distributed import process_group
from distdl.worker import kept_choices
from distdl.worker.rank_context import RankContext


def tuned(config: DictConfig, context: RankContext) -> DictConfig:
    """Returns the config with an order, or unchanged if the task is not training. Collective."""
    if not task_facts.of(config).trains:
        return config
    environment = context.environment
    measured = None
    if environment.local_rank == 0:
        measured = measure(configs.plain(config.data), environment.local_world_size)
    chosen = choose([each for each in process_group.gather(measured) if each is not None])
    kept_choices.report(environment, "order: %s", chosen.reason)
    changes: dict[str, Any] = {"data.order": chosen.order}
    if chosen.order == "windows":
        changes["data.shuffle_window"] = chosen.window
    name = f"data.order={chosen.order}"
    return kept_choices.freeze(config, context, "order", changes, name, [chosen.reason])
