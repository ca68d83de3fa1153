"""What every rank runs, everywhere: `python -m distdl.worker BUNDLE STORE`.

It reads the frozen config and launch.yaml once each, finds out which rank it is, builds the run and
performs the task. The attempt's status.json and the exit code say how the rank ended.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import programs
from distdl.config import recipe as configs
from distdl.config.own_code import make_importable
from distdl.health.watchdog import Watchdog
from distdl.job import JobState
from distdl.ranks import environment as environments
from distdl.ranks import scratch
from distdl.ranks.process_exit import survive_closed_pipes
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.runs import failures, inputs
from distdl.runs.bundle import Bundle
from distdl.runs.directory import RunDirectory
from distdl.util import helpers, lightning_names
from distdl.util.errors import UserError
from distdl.util.exit_codes import EXIT_REFUSED
from distdl.util.imports import uncollected
from distdl.util.redact import redact
from distdl.validation import kinds
from distdl.validation.resolve import resolve
from distdl.validation.targets import Trust
from distdl.worker import own_program
from distdl.worker.failing import fail, record_failure
from distdl.worker.rank_context import RankContext
from distdl.worker.rank_logging import adopt_lightnings_loggers, start_logging

log = logging.getLogger("distdl.worker")


def main(argv: Sequence[str] | None = None, stop: StopRequest | None = None) -> int:
    """Runs one rank of one attempt and returns its exit code. `stop` may have been listening for
    signals since the process started, and still does when this returns."""
    parser = argparse.ArgumentParser("python -m distdl.worker", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder with config.yaml")
    parser.add_argument("store", type=Path, help="folder for checkpoints, logs and status")
    parser.add_argument("--attempt", type=int, help="number of the attempt (default: the newest)")
    arguments = parser.parse_args(argv)

    listens_anyway = stop is not None
    if stop is None:  # `not stop` would be true of one that was not asked yet
        stop = StopRequest()
    stop.install()
    helpers.outlived_by_helpers()
    survive_closed_pipes()
    run = RunDirectory(arguments.store.absolute())
    bundle = Bundle(arguments.bundle.absolute())
    try:
        last = run.last_attempt()
        attempt = bundle.create_store(run, arguments.attempt or (last.number if last else 1))
    except UserError as error:
        print(f"distdl: {error}", file=sys.stderr)
        return EXIT_REFUSED
    rank = 0
    facts = dict[str, Any]()
    watchdog = None
    try:
        try:
            launch = attempt.launch()
            resources = attempt.resources(launch)
            environment = environments.resolve(resources=resources)
            rank = environment.rank
            environment.export()
            start_logging(attempt, rank)
            log.debug("%s", environment.describe())
            if rank == 0:
                attempt.begin()
            failures.reserve(attempt.errors, rank)
            config = effective_config(bundle, launch)
            program = programs.is_program(config)
            settings = launch["where"].get("watchdog") or {}
            if settings.get("enabled", True) and not program:
                new = Watchdog(attempt, environment, settings.get("timeout"))
                new.start()
                watchdog = new
            context = RankContext(attempt, launch, resources, environment, stop, watchdog)
            if program:
                own_program.perform(config, bundle, context)
            else:
                facts["metrics"] = perform(config, bundle, context)
            state = JobState.SUCCEEDED
        except Stopped as request:
            state = request.state
            facts["error"] = str(request)
            log.warning("%s: %s", state.lower(), request)
        except KeyboardInterrupt:
            state = JobState.CANCELLED
            facts["error"] = "interrupted"
        if rank == 0:
            attempt.end(state, **facts)
        return state.exit_code
    except BaseException as error:  # every error is recorded
        if isinstance(error, UserError):
            text = "\n".join(problem.shown() for problem in error.problems)
            print(f"distdl: {redact(text)}", file=sys.stderr)
        return fail(attempt, rank, error, watchdog)
    finally:
        if watchdog:
            watchdog.stop()
        failures.release(attempt.errors, rank)
        if not listens_anyway:
            stop.uninstall()


def import_torch() -> None:
    """Imports what takes seconds: torch, Lightning and the worker's parts that use them."""
    with uncollected():
        from distdl import tracking  # noqa: F401
        from distdl.checkpoint import fetching  # noqa: F401
        from distdl.distributed import process_group, rank_table  # noqa: F401
        from distdl.worker import allocator, named_tools, performing, registration  # noqa: F401


def perform(config: DictConfig, bundle: Bundle, context: RankContext) -> dict[str, float]:
    """Joins the process group, builds the run and performs the task. Returns the task's metrics."""
    scratch.refuse(config.get("data"), context.environment.local_world_size)
    import_torch()  # do the slow imports before ranks wait for each other
    from distdl.distributed import process_group, rank_table
    from distdl.worker import allocator, named_tools, performing, registration

    adopt_lightnings_loggers()
    # The user's code takes precedence over installed packages.
    python_path = bundle.python_path(context.launch)
    lightning_names.serve()
    make_importable(python_path)
    allow = OmegaConf.select(config, "project.allow") or ()
    with contextlib.chdir("."):  # an import may change the folder; shown paths depend on it
        kinds.refuse(resolve(config).values, Trust(tuple(python_path), tuple(allow)))
    context.stop.check()
    environment = context.environment
    accelerator = context.resources.accelerator
    rank_table.refuse_missing_device(environment, accelerator)
    if accelerator == "cpu":
        allocator.keep_freed_memory()
    log.debug("imports are done; joining the other ranks")  # each may take minutes
    store = None
    attempt = context.attempt.number
    examiner = named_tools.examiner(config)
    if examiner and environment.world_size > 1:
        store = examiner.rendezvous(environment, attempt)
        examiner.record_transport(context)
    process_group.connect(environment, accelerator, attempt, store)
    failed = False
    try:
        metrics = performing.build_and_run(config, context)
    except Stopped:
        raise
    except BaseException as error:  # a training may raise anything
        failed = True
        # Record the error first: when this rank ends, the others fail too.
        record_failure(context.attempt, environment.rank, error, context.watchdog)
        raise
    finally:
        process_group.disconnect(failed)
    registration.register(config, context)
    return metrics


def effective_config(bundle: Bundle, launch: dict[str, Any]) -> DictConfig:
    """The frozen recipe merged with launch.yaml: where this attempt runs, and what it changes. A
    name of weights becomes the path of their file."""
    where = OmegaConf.create(launch.get("where") or {})
    config = configs.merge(bundle.recipe(), where, launch.get("changes"))
    return inputs.placed(config, bundle.path, RunDirectory(bundle.path).provenance())
