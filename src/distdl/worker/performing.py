"""What a rank does once all ranks have joined: from the doctor to the end of the task."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig, OmegaConf

from distdl import tracking
from distdl.checkpoint import fetching
from distdl.config import choices, schema
from distdl.config import recipe as configs
from distdl.distributed import process_group, rank_table
from distdl.job import JobState
from distdl.loops.fit import Rebuilt
from distdl.models import lora
from distdl.models.weights import starting_keys
from distdl.ranks.stopping import Stopped
from distdl.runs import checkpoints
from distdl.runs.directory import RunDirectory
from distdl.runs.verdicts import Verdicts
from distdl.tracking import Tracking
from distdl.util.screen import say
from distdl.validation.kinds import locate
from distdl.worker import (
    autotune,
    batch_size,
    compiling,
    described,
    kept_choices,
    named_tools,
    reading_order,
    recomputing,
    summary,
)
from distdl.worker.build import Built, build, make
from distdl.worker.failing import lightnings_refusals, record_failure, refusal
from distdl.worker.rank_context import RankContext
from distdl.worker.task import Task, Unbuilt, make_task


def build_and_run(config: DictConfig, context: RankContext) -> dict[str, float]:
    """Performs the config's task, and returns its metrics."""
    announce(context)
    task = configured_task(config)
    if not task.needs_build:
        found = task.run(Unbuilt(config, context)) or {}
        result = summary.result_of(found)
        if result and context.environment.rank == 0:
            say(f"done    {result}")
        return found
    examine(config, context)
    checkpoint = starting_point(config, context)
    config = tune(config, context)
    tracker = track(config, context)
    with outcome_told(context, tracker):

        def build_once(again: bool) -> Built:
            newest = starting_point(config, context) if again else checkpoint
            built = build_run(begun(config, newest), context, tracker, newest, again)
            if task.evaluates and built.has_trained:
                name_by_task(built.trainer.loggers, str(config.task._target_).rpartition(".")[2])
            return built

        built, metrics = built_and_performed(task, build_once)
        end(built, context, tracker, metrics)
    return metrics


def built_and_performed(
    task: Task[Built], build_once: Callable[[bool], Built]
) -> tuple[Built, dict[str, float]]:
    """Builds the run and performs the task; again if its fit was left for that, as often as it is.

    Args:
        build_once: Takes whether it builds again; then from the newest checkpoint.
    """
    again = False
    while True:
        built = build_once(again)
        try:
            return built, perform_task(task, built)
        except Rebuilt:
            built.release()
        del built  # before another one needs the memory
        gc.collect()
        torch.cuda.empty_cache()
        again = True


def announce(context: RankContext) -> None:
    """Each rank says who it is and on which device; all of them watch each other from here on."""
    ranks = rank_table.announce(context.environment, context.resources.accelerator)
    if context.environment.rank == 0:
        context.attempt.record_ranks(ranks)
    if context.watchdog:
        context.watchdog.join(ranks)


def configured_task(config: DictConfig) -> Task[Any]:
    arguments = configs.plain(config.task)
    return make_task(locate(str(arguments.pop("_target_"))), arguments)


def examine(config: DictConfig, context: RankContext) -> None:
    """Lets the doctor look at the machines, if it is wanted."""
    if examiner := named_tools.examiner(config):
        examiner.examine(config, context, None)
    accelerator = context.resources.accelerator
    precision = config.trainer.get("precision")
    rank_table.warn_of_slow_bf16(accelerator, precision)


def starting_point(config: DictConfig, context: RankContext) -> str | None:
    """The checkpoint to start from, where this rank can read it."""
    newest = newest_checkpoint(config, context.run) if context.environment.rank == 0 else None
    return fetching.provide(newest, context.run.path, context.environment)


def begun(config: DictConfig, checkpoint: str | None) -> DictConfig:
    """The config without the file of weights that the run began with, once there is a checkpoint,
    which has all of them: the file may be gone, or be another one now. Adapters need it for ever.
    """
    model = config.get("model") or {}
    if checkpoint is None or model.get(lora.KEY):
        return config
    without = dict.fromkeys(f"model.{key}" for key in starting_keys(model))
    return configs.merge(config, OmegaConf.create(), without)


def newest_checkpoint(config: DictConfig, run: RunDirectory) -> str | None:
    """The newest checkpoint of this run, else `checkpoint.resume_from`."""
    newest = checkpoints.CheckpointStore(run.checkpoints).newest()
    if newest is not None:
        return str(newest)
    source = schema.Checkpoint.of(config.checkpoint).resume_from
    # Absolute: `fetching.provide` takes a relative path as one inside the run.
    return str(checkpoints.find(source).absolute()) if source else None


def tune(config: DictConfig, context: RankContext) -> DictConfig:
    """The config with what is to be chosen by a measurement on these devices."""
    config = kept_choices.kept(config, context)
    if choices.asks(config, "batch_size"):
        config = batch_size.tuned(config, context)
    if choices.asks(config, "recompute"):
        config = recomputing.tuned(config, context)
    if choices.asks(config, "order") and configs.is_own(config.data.get("_target_")):
        config = reading_order.tuned(config, context)
    if choices.asks(config, "autotune"):
        config = autotune.tuned(config, context)
    if choices.asks(config, "compile"):
        config = compiling.tuned(config, context)
    return config


def track(config: DictConfig, context: RankContext) -> Tracking:
    """Starts the journal, and what else the config tracks the run by."""
    environment = context.environment
    info = described.run_info(config, context) if environment.rank == 0 else None
    shared = process_group.broadcast(info)
    assert shared is not None
    return tracking.start_tracking(
        summary.for_rank(shared, environment),
        {k: make(node) for k, node in (config.get("tracking") or {}).items()},
    )


@contextlib.contextmanager
def outcome_told(context: RankContext, tracker: Tracking) -> Iterator[None]:
    """Records the failure of what is done inside, and tells the trackers how it ended."""
    state = JobState.FAILED
    try:
        with lightnings_refusals():
            yield
        state = JobState.SUCCEEDED
    except Stopped as request:
        state = request.state
        raise
    except BaseException as error:  # a training may raise anything
        # Before the tracker, which may be slow.
        record_failure(context.attempt, context.environment.rank, error, context.watchdog)
        raise
    finally:
        tracker.finish(str(state))


def build_run(
    config: DictConfig, context: RankContext, tracker: Tracking, checkpoint: str | None, again: bool
) -> Built:
    """Builds the run, which its watchdog, its trackers and, the first time, the start of the output
    then know."""
    attempt = context.attempt
    rank = context.environment.rank
    watchdog = context.watchdog
    if watchdog:
        watchdog.heartbeat.let_go()
    built = build(
        config,
        context.run,
        attempt,
        context.environment,
        context.resources,
        context.stop,
        tracker.loggers,
        checkpoint,
        monitor_typed="checkpoint.monitor" in context.run.typed_keys(context.launch),
        again=again,
    )
    tracker.settle()
    context.stop.check()

    def on_failure(error: BaseException) -> None:
        if not isinstance(error, Stopped):
            record_failure(attempt, rank, refusal(error) or error, watchdog)

    # At once: Lightning informs the loggers before it passes on an error.
    built.metrics.on_failure = on_failure
    if watchdog:
        watchdog.heartbeat.watch(built.trainer)
    if rank == 0 and (context.launch.get("search") or {}).get("judged"):
        built.checkpointer.search.verdicts = Verdicts.of(context.run.path)
    if rank == 0 and not again:
        # Count now: later a strategy may leave only a part of the model on each rank.
        counts = summary.parameters_of(built.module)
        summary.print_start(built, context.resources, context.launch)

        def on_start() -> None:
            counted = summary.print_batch(built, context.resources, attempt, counts)
            tracker.describe({f"parameters.{k}": v for k, v in counted.items()})

        built.metrics.on_start = on_start
    return built


def name_by_task(loggers: Iterable[Logger], task: str) -> None:
    """Makes loggers write metrics as `<task>/<name>`: no points in the curves of the training."""
    for each in loggers:
        each.log_metrics = functools.partial(_log_as, task, each.log_metrics)  # type: ignore[method-assign]


def _log_as(
    task: str,
    log: Callable[..., None],
    metrics: Mapping[str, Any],
    *args: object,
    **options: object,
) -> None:
    # `epoch` is that of the checkpoint, and hp_metric is a placeholder of TensorBoard's logger.
    same = ("epoch", "hp_metric")
    log({k if k in same else f"{task}/{k}": v for k, v in metrics.items()}, *args, **options)


def perform_task(task: Task[Built], built: Built) -> dict[str, float]:
    """The task's metrics, once all ranks have performed it."""
    metrics = task.run(built) or {}
    process_group.gather(None)  # nobody is done while another rank is not
    return metrics


def end(built: Built, context: RankContext, tracker: Tracking, metrics: dict[str, float]) -> None:
    """Prints the results, and what to type next."""
    if context.environment.rank == 0:
        summary.print_end(built, metrics, tracker.how_to_open(), context.started)
