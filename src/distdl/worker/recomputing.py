"""`model.recompute=auto`: blocks recompute their activations if the batch does not fit otherwise.

This is what `distdl plan` measures without memory, for the memory of the smallest device, and on a
CPU for the memory that is free. The choice is kept as by `distdl.worker.kept_choices`.
"""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from distdl.config import batches, task_facts
from distdl.distributed import process_group
from distdl.worker import kept_choices, named_tools
from distdl.worker.batch_size import free_memory
from distdl.worker.rank_context import RankContext

KEY = "model.recompute"


def tuned(config: DictConfig, context: RankContext) -> DictConfig:
    """Returns the config with none or blocks; unchanged if nothing is trained, where neither makes
    a difference. Raises a UserError if the batch fits with neither. Collective."""
    if "training_step" not in task_facts.of(config).calls:
        return config
    memory = min(process_group.gather(memory_of_device(context)))
    chosen = planned_for(config, context, memory) if context.environment.rank == 0 else ("", "")
    value, reason = process_group.broadcast(chosen)
    kept_choices.report(context.environment, "recompute: %s", reason)
    name = f"{KEY}={value}"
    return kept_choices.freeze(config, context, "recompute", {KEY: value}, name, [reason])


def planned_for(config: DictConfig, context: RankContext, memory: float) -> tuple[str, str]:
    """The value for so many bytes of a device, and the reason."""
    world = context.environment.world_size
    global_batch = batches.global_batch_size(config, context.resources) or world
    found = named_tools.recompute_planner().recompute_for(config, global_batch, world, memory)
    return found.value, found.reason


def memory_of_device(context: RankContext) -> float:
    """Bytes of the smallest device that this rank sees; elsewhere its share of what is free."""
    accelerator = context.resources.accelerator
    if accelerator == "gpu":
        seen = range(torch.cuda.device_count())
        return float(min(torch.cuda.get_device_properties(n).total_memory for n in seen))
    return free_memory(accelerator) / context.environment.local_world_size
