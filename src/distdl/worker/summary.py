"""What a run reports to the trackers at its start, and on the screen at its start and end."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn

from distdl.config import batches, task_facts
from distdl.config import recipe as configs
from distdl.config.recipe import longer, plain, unit_of
from distdl.job import Resources
from distdl.optim import optimizers
from distdl.ranks.environment import Environment
from distdl.runs.directory import CONFIG, PROVENANCE, Attempt, read_json, shown
from distdl.tracking import RunInfo
from distdl.util.names import kept_apart
from distdl.validation.resolve import resolve
from distdl.worker.build import Built
from distdl.worker.rank_context import RankContext


def run_info(config: DictConfig, context: RankContext) -> RunInfo:
    """Collects what tracking records; the same for all ranks."""
    path = context.run.path
    launch = context.launch
    world_size = context.resources.world_size
    run_id = launch["run_id"]
    provenance = read_json(path / PROVENANCE)
    params = parameters(config, provenance)
    if configs.is_own((config.get("data") or {}).get("_target_")):  # others may divide the batch
        params["global_batch_size"] = launch.get("global_batch_size")
    git = provenance.get("git") or {}
    tags = {"git.commit": git.get("commit"), "world_size": world_size}
    tags["tags"] = ",".join(config.get("tags") or ()) or None
    return RunInfo(
        run_dir=path,
        run_id=run_id,
        attempt=context.attempt.number,
        **dict.fromkeys(("rank", "local_rank", "node_rank"), 0),
        world_size=world_size,
        # The folder of all runs. In a store that holds only this run, it is the store itself.
        output_dir=path.parents[run_id.count("/")] if str(path).endswith(run_id) else path,
        experiment_name=run_id.split("/")[0],
        name=member_name(provenance.get("swept") or ()) or run_id.rpartition("/")[2],
        key=configs.hash_of(f"{run_id} {provenance.get('created')}{provenance.get('id', '')}", 32),
        params=params,
        changed=launch.get("changes") or {},
        artifacts=[path / CONFIG, path / PROVENANCE],
        tags={k: v for k, v in tags.items() if v is not None},
    )


def parameters(config: DictConfig, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The run's parameters by dotted names: swept values first, then other overrides, then the rest
    of the config without null values. A value from the environment or from `${input:...}` stays an
    expression."""
    resolved = resolve(configs.recipe_of(config))
    hidden = {p: e for p, e in resolved.expressions.items() if "${oc.env:" in e or "${input:" in e}
    flat: dict[str, Any] = {}
    for path, value in leaves(resolved.values):
        parts = [e for p, e in hidden.items() if p[: len(path)] == path[: len(p)]]
        flat[".".join(path)] = " ".join(parts) or resolved.hide_environment(str(value))
    typed: dict[str, Any] = {}
    for override in (*(provenance.get("swept") or ()), *(provenance.get("overrides") or ())):
        key, _, value = str(override).partition("=")
        typed.setdefault(key, flat.get(key, value))
    return typed | {k: v for k, v in flat.items() if k not in typed and v != "None"}


def leaves(values: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Each value inside nested mappings, with its path. A list is one value."""
    if not isinstance(values, dict):
        yield path, values
    else:
        for key, value in values.items():
            yield from leaves(value, (*path, str(key)))


def member_name(swept: Sequence[str]) -> str:
    """The name of a sweep's member, made of its varied values: `lr=0.1 seed=2`. If two short keys
    are equal, all keys are written in full."""
    shorts = [re.sub(r"^[^=]*\.", "", override) for override in swept]
    keys = {override.partition("=")[0] for override in shorts}
    name = " ".join(shorts if len(keys) == len(shorts) else swept)
    return kept_apart(name, name)


def for_rank(info: RunInfo, environment: Environment) -> RunInfo:
    names = ("rank", "local_rank", "node_rank")
    return dataclasses.replace(info, **{name: getattr(environment, name) for name in names})


def print_start(built: Built, size: Resources, launch: dict[str, Any]) -> None:
    """Prints run, devices and checkpoint; `print_batch` prints the rest once loaders are known."""
    last = built.run.last_attempt()
    print(f"run     {shown(built.run.path)}  (attempt {last.number if last else 0})")
    print(f"on      {size.num_nodes} x {size.devices} {size.accelerator}")
    for note in launch.get("notes") or []:
        print(f"note    {note}")
    if built.checkpoint and task_facts.of(built.config).trains:
        print(f"resume  {shown(Path(built.checkpoint))}")
    print(flush=True)


def print_batch(
    built: Built, size: Resources, attempt: Attempt, before: Mapping[str, int]
) -> dict[str, int]:
    """Prints the parameters, samples per step and learning rate of the actual model and loaders.
    Records the first two for the report and for later attempts, and returns the first. `before` are
    the parameters before the strategy, which may keep only a part of them on this rank."""
    counts = parameters_of(built.module)
    counts = counts if counts["total"] >= before["total"] else dict(before)
    record: dict[str, Any] = {"parameters": counts}
    total, trainable = counts["total"], counts["trainable"]
    all_of = "all" if total == trainable else f"{trainable:,}"
    print(f"model   {total:,} parameters, {all_of} trainable")
    config = built.config
    position = built.checkpointer.position
    declared, shares, _ = batches.factors(config, size)
    global_batch = built.checkpointer.global_batch_size
    if position.samples:
        rows = position.samples // shares
        record["loaders"] = dataclasses.asdict(batches.Loaders(rows, declared, shares))
        other = f" (data.batch_size is {declared})" if declared not in (None, rows) else ""
        print(f"batch   {batches.product(rows, config, size)}{other}")
    elif declared is not None:
        print(f"batch   {batches.describe(config, size)}")
    if config.get("optimizer") and global_batch and not built.own_optimizer:
        print(f"rate    {optimizers.describe_lr(plain(config.optimizer), global_batch)}")
    if built.own_optimizer:
        print("rate    the model's own configure_optimizers")
    print(flush=True)
    attempt.update(**record)
    return counts


def parameters_of(module: nn.Module) -> dict[str, int]:
    """Counts the parameters whose shape is known: `total` and `trainable`."""
    known = [p for p in module.parameters() if not nn.parameter.is_lazy(p)]
    # Under DeepSpeed's ZeRO-3 a parameter is an empty tensor, and `ds_numel` is its size.
    sizes = [(getattr(p, "ds_numel", None) or p.numel(), p.requires_grad) for p in known]
    return {"total": sum(n for n, _ in sizes), "trainable": sum(n for n, learns in sizes if learns)}


def print_end(
    built: Built, metrics: dict[str, float], opens: Sequence[str], started: float
) -> None:
    """Prints the result, where it is, and what to type next."""
    minutes, seconds = divmod(int(time.time() - started), 60)
    values = {k: v for k, v in metrics.items() if not k.startswith(("perf/", "epoch"))}
    print()
    print("done    " + "  ".join(f"{k} {v:.4g}" for k, v in sorted(values.items())))
    line = f"time    {minutes} min {seconds} s"
    if speed := metrics.get("perf/images_per_second"):
        line += f"  {speed:,.1f} {unit_of(built.data)} (median)"
    if "perf/data_wait" in metrics:
        line += f"  data_wait {100 * metrics['perf/data_wait']:.0f} %"
    print(line)
    path = shown(built.run.path)
    print(f"run     {path}")
    for line in opens:
        print(f"watch   {line}")
    print(f"next    python -m distdl report {path}", flush=True)
    # A benchmark and `trainer.fast_dev_run` leave no checkpoint to resume from.
    if task_facts.of(built.config).trains and any(built.run.checkpoints.glob("*.ckpt")):
        print(f"        python -m distdl resume {path} {longer(built.config)}")
        if not configs.not_exportable(built.config):
            print(f"        python -m distdl export {path} --to pt2")
            print(f"        python -m distdl serve {path}", flush=True)
