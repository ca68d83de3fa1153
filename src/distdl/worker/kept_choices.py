"""What a run chooses by a measurement, once: launch.yaml keeps it, under `changes` and `chosen`.

`changes` is what the submitting side passes on to the next attempt. Where it cannot (the store of a
job in a cloud is not the folder that it was submitted from, and hosts under mpirun may each have a
folder of their own), the ranks take the choice from the attempts in the store of rank 0.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from omegaconf import DictConfig, OmegaConf

from distdl.config import batches, choices
from distdl.config import recipe as configs
from distdl.config.choices import Value
from distdl.distributed import process_group
from distdl.ranks.environment import Environment
from distdl.worker.rank_context import RankContext

log = logging.getLogger(__name__)


def report(environment: Environment, text: str, *arguments: object) -> None:
    """Logs at INFO on rank 0, and at DEBUG (only in the log file) on the other ranks."""
    log.log(logging.INFO if environment.rank == 0 else logging.DEBUG, text, *arguments)


def freeze(
    config: DictConfig,
    context: RankContext,
    choice: str,
    changes: Mapping[str, Value],
    name: str,
    lines: Sequence[str],
) -> DictConfig:
    """Applies rank 0's choice on all ranks, and writes it into the attempt's launch.yaml, from
    which a resume takes it. Collective.

    Args:
        choice: Of `distdl.config.choices`.
        changes: To the config, by path.
        name: Of these changes, in messages.
        lines: The measurements; launch.yaml has them under the name of the choice.
    """
    changes, name = process_group.broadcast((dict(changes), name))
    report(context.environment, "%s: this attempt and its resumes train with %s", choice, name)
    context.launch[choice] = [*lines]
    return _applied(config, context, choice, changes)


def kept(config: DictConfig, context: RankContext) -> DictConfig:
    """The config with what earlier attempts have chosen, where it still asks for that choice and
    nobody has asked for it anew in this attempt. Collective."""
    made: dict[str, tuple[int, dict[str, Value], int | None]] = {}
    if context.environment.rank == 0:
        for attempt in context.run.attempts():
            launch = attempt.launch()
            total = launch.get("global_batch_size")
            for choice, changes in choices.made_in(launch).items():
                made[choice] = (attempt.number, changes, total)
    for choice, (number, changes, total) in process_group.broadcast(made).items():
        anew = choices.CHOICES[choice].key in (context.launch.get("changes") or {})
        if choices.asks(config, choice) and not anew:
            report(context.environment, "%s: as attempt %d has chosen", choice, number)
            config = _applied(config, context, choice, changes, total)
    return config


def _applied(
    config: DictConfig,
    context: RankContext,
    choice: str,
    changes: Mapping[str, Value],
    global_batch: int | None = None,
) -> DictConfig:
    """`global_batch`: that of the attempt that has chosen, which may have had other devices; it is
    kept. Raises a UserError if these do not divide it."""
    made = configs.merge(config, OmegaConf.create({}), dict(changes))
    if "data.batch_size" in changes:
        kept = batches.keep_global_batch(made, context.resources, global_batch, ())
        changes = {**changes, **kept.changes}
        made = configs.merge(config, OmegaConf.create({}), dict(changes))
        context.launch["global_batch_size"] = batches.global_batch_size(made, context.resources)
    launch = context.launch
    launch["changes"] = {**(launch.get("changes") or {}), **changes}
    launch["chosen"] = {**choices.made_in(launch), choice: {**changes}}
    if context.environment.rank == 0:
        context.attempt.write_launch(launch)
    return made
