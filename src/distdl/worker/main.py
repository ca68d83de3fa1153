"""What every rank runs, everywhere: `python -m distdl.worker BUNDLE STORE`.

It reads the frozen config and launch.yaml once each, finds out which rank it is, builds the run and
performs the task. The attempt's status.json and the exit code say how the rank ended.
"""

from __future__ import annotations

import argparse
import bdb
import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import recipe as configs
from distdl.config.own_code import last_user_line, make_importable
from distdl.health import incident
from distdl.health.watchdog import Watchdog
from distdl.job import EXIT_REFUSED, JobState
from distdl.ranks import environment as environments
from distdl.ranks import scratch
from distdl.ranks.process_exit import survive_closed_pipes
from distdl.ranks.stopping import Stopped, StopRequest
from distdl.runs import failures
from distdl.runs.bundle import Bundle
from distdl.runs.directory import Attempt, RunDirectory
from distdl.util import helpers, lightning_names
from distdl.util.errors import UserError
from distdl.util.imports import uncollected
from distdl.util.redact import redact
from distdl.validation import kinds
from distdl.validation.resolve import resolve
from distdl.validation.targets import Trust
from distdl.worker.rank_context import RankContext
from distdl.worker.rank_logging import adopt_lightnings_loggers, start_logging

log = logging.getLogger("distdl.worker")


def main(argv: Sequence[str] | None = None, stop: StopRequest | None = None) -> int:
    """Runs one rank of one attempt and returns its exit code. `stop` may have been listening for
    signals since the process started."""
    parser = argparse.ArgumentParser("python -m distdl.worker", description=__doc__)
    parser.add_argument("bundle", type=Path, help="folder with config.yaml")
    parser.add_argument("store", type=Path, help="folder for checkpoints, logs and status")
    parser.add_argument("--attempt", type=int, help="number of the attempt (default: the newest)")
    arguments = parser.parse_args(argv)

    stop = stop or StopRequest()
    stop.install()
    helpers.outlived_by_helpers()
    survive_closed_pipes()
    run, bundle = RunDirectory(arguments.store.absolute()), Bundle(arguments.bundle.absolute())
    try:
        last = run.last_attempt()
        attempt = bundle.create_store(run, arguments.attempt or (last.number if last else 1))
    except UserError as error:
        print(f"distdl: {error}", file=sys.stderr)
        return EXIT_REFUSED
    rank, facts, watchdog = 0, dict[str, Any](), None
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
            settings = launch["where"].get("watchdog") or {}
            if settings.get("enabled", True):
                new = Watchdog(attempt, environment, settings.get("timeout"))
                new.start()
                watchdog = new
            context = RankContext(attempt, launch, resources, environment, stop, watchdog)
            state, facts["metrics"] = JobState.SUCCEEDED, perform(bundle, context)
        except Stopped as request:
            state, facts["error"] = request.state, str(request)
            log.warning("%s: %s", state.lower(), request)
        except KeyboardInterrupt:
            state, facts["error"] = JobState.CANCELLED, "interrupted"
        if rank == 0:
            attempt.end(state, **facts)
        return state.exit_code
    except BaseException as error:  # every error is recorded
        if isinstance(error, UserError):
            print(f"distdl: {redact(str(error))}", file=sys.stderr)
        return fail(attempt, rank, error, watchdog)
    finally:
        if watchdog:
            watchdog.stop()
        failures.release(attempt.errors, rank)
        stop.uninstall()


def import_torch() -> None:
    """Imports what takes seconds: torch, Lightning and the worker's parts that use them."""
    with uncollected():
        from distdl import tracking  # noqa: F401
        from distdl.checkpoint import fetching  # noqa: F401
        from distdl.distributed import process_group, rank_table  # noqa: F401
        from distdl.doctor import examination, reach  # noqa: F401
        from distdl.worker import allocator, build, registration, summary  # noqa: F401


def perform(bundle: Bundle, context: RankContext) -> dict[str, float]:
    """Joins the process group, builds the run and performs the task. Returns the task's metrics."""
    config = effective_config(bundle, context.launch)
    scratch.refuse(config.get("data"), context.environment.local_world_size)
    import_torch()  # do the slow imports before ranks wait for each other
    from distdl.distributed import process_group, rank_table
    from distdl.doctor import examination, reach
    from distdl.worker import allocator, registration

    adopt_lightnings_loggers()
    # The user's code takes precedence over installed packages.
    python_path = bundle.python_path(context.launch)
    lightning_names.serve()
    make_importable(python_path)
    allow = OmegaConf.select(config, "project.allow") or ()
    with contextlib.chdir("."):  # an import may change the folder; shown paths depend on it
        kinds.refuse(resolve(config).values, Trust(tuple(python_path), tuple(allow)))
    context.stop.check()
    environment, accelerator = context.environment, context.resources.accelerator
    rank_table.refuse_missing_device(environment, accelerator)
    if accelerator == "cpu":
        allocator.keep_freed_memory()
    log.debug("imports are done; joining the other ranks")  # each may take minutes
    store, attempt = None, context.attempt.number
    if examination.wanted(config) and environment.world_size > 1:
        store = reach.rendezvous(environment, attempt)
        examination.record_transport(context)
    process_group.connect(environment, accelerator, attempt, store)
    failed = False
    try:
        metrics = build_and_run(config, context)
    except Stopped:
        raise
    except BaseException as error:
        failed = True
        # Record the error first: when this rank ends, the others fail too.
        record_failure(context.attempt, environment.rank, error, context.watchdog)
        raise
    finally:
        process_group.disconnect(failed)
    registration.register(config, context)
    return metrics


def build_and_run(config: DictConfig, context: RankContext) -> dict[str, float]:
    """Finds the checkpoint, measures choices, starts tracking, builds, and performs the task."""
    from hydra.utils import get_method

    from distdl import tracking
    from distdl.checkpoint import fetching
    from distdl.distributed import process_group, rank_table
    from distdl.doctor import examination
    from distdl.worker import summary
    from distdl.worker.build import build, make

    attempt, resources, environment = context.attempt, context.resources, context.environment
    run, rank, watchdog = context.run, environment.rank, context.watchdog
    ranks = rank_table.announce(environment, resources.accelerator)
    if rank == 0:
        attempt.record_ranks(ranks)
    if watchdog:
        watchdog.join(ranks)
    arguments = configs.plain(config.task)
    # Not through Hydra's `instantiate`, which would wrap the task's exceptions.
    task = get_method(str(arguments.pop("_target_")))
    if getattr(task, "before_build", False):
        metrics: dict[str, float] = task(context, config=config, **arguments)
        return metrics
    if examination.wanted(config):
        examination.examine(config, context, None)
    rank_table.warn_without_bf16(resources.accelerator, config.trainer.get("precision"))
    newest = newest_checkpoint(config, run) if rank == 0 else None
    checkpoint = fetching.provide(newest, run.path, environment)
    if (config.get("strategy") or {}).get("autotune"):
        from distdl.worker import autotune

        config = autotune.tuned(config, context)
    if (config.get("model") or {}).get("compile") == "measured":
        from distdl.worker import compiling

        config = compiling.tuned(config, context)
    info = summary.run_info(config, context) if rank == 0 else None
    tracker = tracking.start_tracking(
        summary.for_rank(process_group.broadcast(info), environment),
        {k: make(node) for k, node in (config.get("tracking") or {}).items()},
    )
    state = JobState.FAILED
    parts = (config, run, attempt, environment, resources, context.stop)
    try:
        with lightnings_refusals():
            built = build(*parts, tracker.loggers, checkpoint)
            tracker.settle()
            context.stop.check()
            # At once: Lightning informs the loggers before it passes on an error.
            built.metrics.on_failure = lambda error: (
                isinstance(error, Stopped)
                or (record_failure(attempt, rank, refusal(error) or error, watchdog))
            )
            if watchdog:
                watchdog.heartbeat.watch(built.trainer)
            if rank == 0:
                # Count now: later a strategy may leave only a part of the model on each rank.
                counts = summary.parameters_of(built.module)
                summary.print_start(built, resources, context.launch)

                def on_start() -> None:
                    counted = summary.print_batch(built, resources, attempt, counts)
                    tracker.describe({f"parameters.{k}": v for k, v in counted.items()})

                built.metrics.on_start = on_start
            metrics = task(built, **arguments) or {}
            process_group.gather(None)  # nobody is done while another rank is not
        state = JobState.SUCCEEDED
        if rank == 0:
            started = attempt.status().get("started", 0)
            summary.print_end(built, metrics, tracker.how_to_open(), started)
        return metrics
    except Stopped as request:
        state = request.state
        raise
    except BaseException as error:
        record_failure(attempt, rank, error, watchdog)  # before the tracker, which may be slow
        raise
    finally:
        tracker.finish(str(state))


@contextlib.contextmanager
def lightnings_refusals() -> Iterator[None]:
    """Raises the `refusal` instead of an error that has one."""
    try:
        yield
    except Exception as error:
        if refused := refusal(error):
            raise refused from error
        raise


def refusal(error: BaseException) -> UserError | None:
    """The UserError for an error that Lightning's code raises on purpose, whose cause the user can
    correct. The traceback is only in the log file."""
    from distdl.validation import misfits

    plain = (ValueError, TypeError, RuntimeError, NotImplementedError, ModuleNotFoundError)
    if isinstance(error, Exception) and (problem := misfits.explained(error)):
        return UserError(problem)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    raised = (frame.line or "").startswith("raise ") and type(error) in plain
    of_lightning = "/lightning/pytorch/" in Path(frame.filename).as_posix()
    if type(error).__name__ == "MisconfigurationException" or (raised and of_lightning):
        return UserError(f"Lightning refuses it: {error}")
    return None


def effective_config(bundle: Bundle, launch: dict[str, Any]) -> DictConfig:
    """The frozen recipe merged with launch.yaml: where this attempt runs, and what it changes."""
    return configs.merge(
        bundle.recipe(), OmegaConf.create(launch.get("where") or {}), launch.get("changes")
    )


def newest_checkpoint(config: DictConfig, run: RunDirectory) -> str | None:
    """The checkpoint to start from: the newest one of this run, else `checkpoint.resume_from`."""
    from distdl.runs import checkpoints

    newest = checkpoints.CheckpointStore(run.checkpoints).newest()
    if newest is not None:
        return str(newest)
    source = config.checkpoint.get("resume_from")
    # Absolute: `fetching.provide` takes a relative path as one inside the run.
    return str(checkpoints.find(source).absolute()) if source else None


def record_failure(
    attempt: Attempt, rank: int, error: BaseException, watchdog: Watchdog | None = None
) -> int:
    """Records this rank's first failure and logs it at once, since the process may be killed before
    it ends. Returns the exit code."""
    code = JobState.FAILED.exit_code
    if isinstance(error, UserError):
        code = error.exit_code
    elif isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code or code  # exit(0) in the middle is a failure
    text = redact("".join(traceback.format_exception(error)))
    more: dict[str, Any] = {"lost_peer": True} if failures.is_consequence(error) else {}
    more |= {"where": where} if (where := last_user_line(text)) else {}
    if watchdog and code != EXIT_REFUSED:
        more |= watchdog.failed(error)
    message = redact(str(error))
    if not attempt.record_error(rank, type(error).__name__, message, text, code, **more):
        return code
    first = attempt.first_error()
    quit_debugger = isinstance(error, bdb.BdbQuit)
    caused = first and first["rank"] != rank and first.get("exit_code") == EXIT_REFUSED
    if quit_debugger or caused or isinstance(error, UserError):
        log.debug("%s", text)  # the traceback goes only to the file
    if quit_debugger:
        log.error("ended in the debugger")
    elif first and caused and not isinstance(error, UserError):
        log.error("this rank ends because rank %s failed first", first["rank"])
    elif not isinstance(error, UserError):
        log.error("%s%s", text, f"at {where}" if where else "")
    return code


def fail(
    attempt: Attempt, rank: int, error: BaseException, watchdog: Watchdog | None = None
) -> int:
    """Records this rank's failure, on rank 0 also that of the attempt. Returns the exit code."""
    code = record_failure(attempt, rank, error, watchdog)
    if rank == 0:
        facts = {"type": type(error).__name__, "message": redact(str(error)), "exit_code": code}
        with contextlib.suppress(OSError):  # the store has failed, and the error says so
            attempt.fail(failures.describe(facts), code)
            incident.await_monitors(attempt)
            incident.write(attempt)  # again by whoever follows the job, if anybody does
    return code
