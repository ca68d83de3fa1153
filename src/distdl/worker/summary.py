"""What a run reports to the trackers at its start, and on the screen at its start and end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from distdl.config import batches, degrees, task_facts
from distdl.config import recipe as configs
from distdl.config.recipe import longer, plain, unit_of
from distdl.job import Resources
from distdl.models import recompute
from distdl.optim import learning_rates
from distdl.ranks.environment import Environment
from distdl.runs.directory import Attempt, shown
from distdl.tracking import RunInfo
from distdl.util.screen import say
from distdl.util.wording import first_few
from distdl.worker.build import Built


def for_rank(info: RunInfo, environment: Environment) -> RunInfo:
    names = ("rank", "local_rank", "node_rank")
    return dataclasses.replace(info, **{name: getattr(environment, name) for name in names})


def print_start(built: Built, size: Resources, launch: dict[str, Any]) -> None:
    """Prints run, devices and checkpoint; `print_batch` prints the rest once loaders are known."""
    last = built.run.last_attempt()
    say(f"run     {shown(built.run.path)}  (attempt {last.number if last else 0})")
    say(f"on      {size.num_nodes} x {size.devices} {size.accelerator}")
    for note in launch.get("notes") or []:
        say(f"note    {note}")
    if built.checkpoint and task_facts.of(built.config).trains:
        say(f"resume  {shown(Path(built.checkpoint))}")
    say()


def print_batch(
    built: Built, size: Resources, attempt: Attempt, before: Mapping[str, int]
) -> dict[str, int]:
    """Prints the parameters, samples per step and learning rate of the actual model and loaders.
    Records the first two for the report and for later attempts, and what identifies the data set,
    for comparisons. Returns the first. `before` are the parameters before the strategy, which may
    keep only a part of them on this rank."""
    counts = parameters_of(built.module)
    counts = counts if counts["total"] >= before["total"] else dict(before)
    record: dict[str, Any] = {"parameters": counts}
    total, trainable = counts["total"], counts["trainable"]
    all_of = "all" if total == trainable else f"{trainable:,}"
    say(f"model   {total:,} parameters, {all_of} trainable")
    if blocks := recompute.blocks_in(built.module):
        say(f"memory  {len(blocks)} blocks recompute: {first_few(blocks)}")
    config = built.config
    position = built.checkpointer.position
    for words in degrees.described(config, size):
        say(f"mesh    {words}")
    declared, shares, _ = batches.factors(config, size)
    global_batch = built.checkpointer.state.global_batch_size
    if position.samples:
        rows = position.samples // shares
        record["loaders"] = dataclasses.asdict(batches.Loaders(rows, declared, shares))
        other = f" (data.batch_size is {declared})" if declared not in (None, rows) else ""
        say(f"batch   {batches.product(rows, config, size)}{other}")
    elif declared is not None:
        say(f"batch   {batches.describe(config, size)}")
    if config.get("optimizer") and global_batch and not built.own_optimizer:
        say(f"rate    {learning_rates.describe_lr(plain(config.optimizer), global_batch)}")
    if built.own_optimizer:
        say("rate    the model's own configure_optimizers")
    elif layers := learning_rates.describe_groups(groups_of(built)):
        say(f"layers  {layers}")
    say()
    digest = getattr(built.datamodule, "digest", None)  # distdl's data sets have one
    if isinstance(digest, str):
        record["data"] = digest
    attempt.update(**record)
    return counts


def groups_of(built: Built) -> list[dict[str, Any]]:
    """The parameter groups of the optimizers."""
    return [group for optimizer in built.trainer.optimizers for group in optimizer.param_groups]


def parameters_of(module: nn.Module) -> dict[str, int]:
    """Counts the parameters whose shape is known: `total` and `trainable`."""
    known = [p for p in module.parameters() if not nn.parameter.is_lazy(p)]
    # Under DeepSpeed's ZeRO-3 a parameter is an empty tensor, and `ds_numel` is its size.
    sizes = [(getattr(p, "ds_numel", None) or p.numel(), p.requires_grad) for p in known]
    return {"total": sum(n for n, _ in sizes), "trainable": sum(n for n, learns in sizes if learns)}


def result_of(metrics: Mapping[str, object]) -> str:
    """The metrics in a line, without those of the speed."""
    values = {k: v for k, v in metrics.items() if not k.startswith(("perf/", "epoch"))}
    shown = {k: f"{v:.4g}" if isinstance(v, int | float) else str(v) for k, v in values.items()}
    return "  ".join(f"{k} {v}" for k, v in sorted(shown.items()))


def print_end(
    built: Built, metrics: dict[str, float], opens: Sequence[str], started: float
) -> None:
    """Prints the result, where it is, and what to type next."""
    minutes, seconds = divmod(int(time.time() - started), 60)
    say()
    say(f"done    {result_of(metrics) or 'no result was logged'}")
    line = f"time    {minutes} min {seconds} s"
    if speed := metrics.get("perf/images_per_second"):
        line += f"  {speed:,.1f} {unit_of(built.data)} (median)"
    if "perf/data_wait" in metrics:
        line += f"  data_wait {100 * metrics['perf/data_wait']:.0f} %"
    say(line)
    path = shown(built.run.path)
    say(f"run     {path}")
    for line in opens:
        say(f"watch   {line}")
    say(f"next    python -m distdl report {path}")
    # A benchmark and `trainer.fast_dev_run` leave no checkpoint to resume from.
    if task_facts.of(built.config).trains and any(built.run.checkpoints.glob("*.ckpt")):
        if twice := longer(built.config):
            say(f"        python -m distdl resume {path} {twice}")
        if not configs.not_exportable(built.config):
            format = configs.export_formats(built.config).formats[0]
            say(f"        python -m distdl export {path} --to {format}")
            say(f"        python -m distdl serve {path}")
