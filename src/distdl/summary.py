"""What is told about a run: to the tracker at its start, to a person at its start and its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl import batches, optim
from distdl.build import Built
from distdl.config import TRAIN, longer, plain, unit_of
from distdl.environment import Environment
from distdl.job import Resources
from distdl.run_directory import CONFIG, PROVENANCE, Attempt, RunDirectory, read_json, shown
from distdl.tracking import RunInfo

# Few, and each useful as a column of a table of runs; the whole config is an artifact.
PARAMETERS = (
    "model._target_",
    "model.network._target_",
    "model.network.model_name",
    "model.norm",
    "data._target_",
    "data.batch_size",
    "data.image_size",
    "optimizer._target_",
    "optimizer.lr",
    "optimizer.lr_scaling",
    "optimizer.weight_decay",
    "schedule._target_",
    "schedule.warmup_epochs",
    "strategy._target_",
    "trainer.precision",
    "trainer.max_epochs",
    "trainer.accumulate_grad_batches",
    "seed",
)


def run_info(config: DictConfig, run: RunDirectory, attempt: Attempt) -> RunInfo:
    """What tracking records, without anything that names this rank."""
    launch = attempt.launch()
    run_id = launch["run_id"]
    size = attempt.resources()
    params = {path: _select(config, path) for path in PARAMETERS}
    if str(config.get("data", {}).get("_target_")).startswith("distdl."):  # others may divide it
        params["global_batch_size"] = launch.get("global_batch_size")
    git = read_json(run.path / PROVENANCE).get("git") or {}
    tags = {"git.commit": git.get("commit"), "world_size": size.world_size}
    if config.get("tags"):
        tags["tags"] = ",".join(config.tags)
    return RunInfo(
        run_dir=run.path,
        run_id=run_id,
        attempt=attempt.number,
        rank=0,
        local_rank=0,
        node_rank=0,
        world_size=size.world_size,
        output_dir=output_dir_of(run.path, run_id),
        experiment_name=run_id.split("/")[0],
        params={k: v for k, v in params.items() if v is not None},
        changed=launch.get("changes") or {},
        artifacts=[run.path / CONFIG, run.path / PROVENANCE],
        tags={k: v for k, v in tags.items() if v is not None},
    )


def output_dir_of(run: Path, run_id: str) -> Path:
    """The folder of all runs; a store that holds this one alone is its own."""
    return run.parents[run_id.count("/")] if str(run).endswith(run_id) else run


def for_rank(info: RunInfo, here: Environment) -> RunInfo:
    return dataclasses.replace(
        info, rank=here.rank, local_rank=here.local_rank, node_rank=here.node_rank
    )


def print_start(built: Built, size: Resources, launch: dict[str, Any]) -> None:
    """Where, how many and what it goes on from; what a step takes, when the loaders are known."""
    print(f"run     {shown(built.run.path)}  (attempt {launch_number(built.run)})")
    print(f"on      {size.num_nodes} x {size.devices} {size.accelerator}")
    for note in launch.get("notes") or []:
        print(f"note    {note}")
    if built.checkpoint and built.config.task.get("_target_") == TRAIN:
        print(f"resume  {shown(Path(built.checkpoint))}")
    print(flush=True)


def print_batch(built: Built, size: Resources, attempt: Attempt) -> None:
    """Samples per step and learning rate, by the loaders that there are now; and puts the first on
    record for the attempts that follow."""
    config, position = built.config, built.checkpointer.position
    declared, shares, _ = batches.factors(config, size)
    global_batch = built.checkpointer.global_batch_size
    if position.samples:
        rows = position.samples // shares
        attempt.update(loaders=dataclasses.asdict(batches.Loaders(rows, declared, shares)))
        other = f" (data.batch_size is {declared})" if declared not in (None, rows) else ""
        print(f"batch   {batches.product(rows, config, size)}{other}")
    elif declared is not None:
        print(f"batch   {batches.describe(config, size)}")
    if config.get("optimizer") and global_batch and not built.own_optimizer:
        print(f"rate    {optim.describe_lr(plain(config.optimizer), global_batch)}")
    if built.own_optimizer:
        print("rate    the model's own configure_optimizers")
    print(flush=True)


def launch_number(run: RunDirectory) -> int:
    last = run.last_attempt()
    return last.number if last else 0


def print_end(
    built: Built, metrics: dict[str, float], opens: Sequence[str], started: float
) -> None:
    """What came out, where it lies, and what to type next."""
    minutes, seconds = divmod(int(time.time() - started), 60)
    values = {k: v for k, v in metrics.items() if not k.startswith(("perf/", "epoch"))}
    print()
    print("done    " + "  ".join(f"{k} {v:.4g}" for k, v in sorted(values.items())))
    speed = metrics.get("perf/images_per_second")
    print(
        f"time    {minutes} min {seconds} s"
        + (f"  {speed:,.1f} {unit_of(built.data)} (median)" if speed else "")
        + (
            f"  data_wait {100 * metrics['perf/data_wait']:.0f} %"
            if "perf/data_wait" in metrics
            else ""
        )
    )
    path = shown(built.run.path)
    print(f"run     {path}")
    for line in opens:
        print(f"watch   {line}")
    print(f"next    python -m distdl report {path}", flush=True)
    # A benchmark keeps nothing to go on from, and neither does `trainer.fast_dev_run`.
    if built.config.task.get("_target_") == TRAIN and any(built.run.checkpoints.glob("*.ckpt")):
        print(f"        python -m distdl resume {path} {longer(built.config)}", flush=True)


def _select(config: DictConfig, path: str) -> Any:
    try:
        return OmegaConf.select(config, path)
    except Exception:  # an interpolation that only another machine can resolve
        return None
