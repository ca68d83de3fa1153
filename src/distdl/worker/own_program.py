"""What a rank does whose run is a program of the user's own. Imports no torch, unless the hosts are
examined first."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from omegaconf import DictConfig

from distdl.config import programs
from distdl.config.recipe import plain
from distdl.job import JobState
from distdl.program import running
from distdl.program.running import ProgramRank
from distdl.ranks.stopping import Stopped
from distdl.runs.bundle import Bundle
from distdl.tracking.mlflow import MLflowLogger
from distdl.util.redact import redact
from distdl.worker import described
from distdl.worker.rank_context import RankContext

log = logging.getLogger(__name__)

# MLflow's variables, by which a program's own calls reach the run.
SERVER, RUN = "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID"


def perform(config: DictConfig, bundle: Bundle, context: RankContext) -> None:
    """Runs this rank's program; see `distdl.program.running.run`."""
    if config.get("preflight"):
        examine(config, context)
    launch = context.launch
    with tracked(config, context) as variables:
        rank = ProgramRank(
            attempt=context.attempt,
            environment=context.environment,
            resources=context.resources,
            stop=context.stop,
            launch=launch,
            folder=bundle.project(launch) / str(launch.get("folder") or "."),
            python_path=bundle.python_path(launch),
            tracked=variables,
        )
        running.run(config, rank)


def examine(config: DictConfig, context: RankContext) -> None:
    """Lets the doctor look at the machines before the program starts. Raises a UserError if it
    should not."""
    from distdl.distributed import process_group
    from distdl.worker import named_tools, performing

    environment = context.environment
    examiner = named_tools.examiner(config)
    assert examiner is not None
    store = None
    if environment.world_size > 1:
        store = examiner.rendezvous(environment, context.attempt.number)
        examiner.record_transport(context)
    accelerator = context.resources.accelerator
    process_group.connect(environment, accelerator, context.attempt.number, store)
    failed = True
    try:
        performing.announce(context)
        examiner.examine(config, context, None)
        failed = False
    finally:
        process_group.disconnect(failed)


@contextlib.contextmanager
def tracked(config: DictConfig, context: RankContext) -> Iterator[dict[str, str]]:
    """The variables by which the program logs to the run in MLflow. Rank 0 creates it, and ends it
    with the state of the program; the other ranks hear of it from there."""
    node = (config.get("tracking") or {}).get(programs.TRACKED_BY)
    if node is None or context.environment.rank != 0:
        yield {}
        return
    arguments = plain(node)
    arguments.pop("_target_")
    tracker = MLflowLogger(**arguments)
    tracker.start(described.run_info(config, context))
    tracker.wait_until(lambda: context.stop or (tracker.delivery and tracker.delivery.run_id))
    run_id = tracker.delivery.run_id if tracker.delivery else None
    variables = {SERVER: tracker.uri, RUN: run_id} if run_id else {}
    if not run_id:
        log.warning("MLflow at %s: no run yet, so the program gets none", redact(tracker.uri))
    state = JobState.FAILED
    try:
        yield {name: value for name, value in variables.items() if value}
        state = JobState.SUCCEEDED
    except Stopped as request:
        state = request.state
        raise
    finally:
        tracker.finish(str(state))
