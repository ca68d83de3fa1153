"""What every rank runs, everywhere: `python -m distdl.worker BUNDLE STORE`.

It never runs Hydra on a command line: it reads the frozen config and launch.yaml, once each, finds
out which rank it is, builds, and does the task. The attempt's status.json and the exit code say how
it ended.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # before the slow imports: a signal during set-up must not be lost
    from distdl.orphans import PARENT, die_with_parent
    from distdl.stopping import StopRequest

    EARLY = StopRequest()
    EARLY.install()
    if PARENT in os.environ:
        die_with_parent()

import argparse
import bdb
import contextlib
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from omegaconf import DictConfig, OmegaConf

from distdl import config as configs
from distdl import environment as environments
from distdl import failures, kinds, lightning_names
from distdl.bundle import Bundle
from distdl.errors import UserError
from distdl.importing import FOR_AUTHORS, log_early, uncollected
from distdl.job import EXIT_REFUSED, JobState, Resources
from distdl.leaving import leave, outlive_readers
from distdl.own_code import make_importable, place_in
from distdl.redact import RedactingFilter, redact
from distdl.resolve import resolve
from distdl.run_directory import Attempt, RunDirectory
from distdl.stopping import Stopped, StopRequest
from distdl.targets import Trust

log = logging.getLogger("distdl.worker")

QUIET = ("urllib3",)  # it logs each retry; its callers report what comes of them
HANDLER = "distdl"  # the name of our log handlers
# Whose INFO lines a person wants to see: ours, and the table of `debug=profile`.
SHOWN = ("distdl", "lightning.pytorch.profilers")


def main(argv: Sequence[str] | None = None, stop: StopRequest | None = None) -> int:
    """Runs one rank of one attempt and returns its exit code.

    Args:
        argv: Of the command line, None for this process's own.
        stop: What has listened to signals since the process began, if anything has.
    """
    parser = argparse.ArgumentParser("python -m distdl.worker", description=__doc__)
    parser.add_argument("bundle", type=Path, help="where config.yaml is")
    parser.add_argument("store", type=Path, help="where checkpoints, logs and status go")
    parser.add_argument("--attempt", type=int, help="default: the newest")
    arguments = parser.parse_args(argv)

    stop = stop or StopRequest()
    stop.install()
    outlive_readers()
    run, bundle = RunDirectory(arguments.store.absolute()), Bundle(arguments.bundle.absolute())
    rank = 0
    state = JobState.FAILED
    try:
        attempt = bundle.create_store(run, arguments.attempt or newest(run))
    except UserError as error:
        print(f"distdl: {error}", file=sys.stderr)
        return EXIT_REFUSED
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
        metrics = perform(bundle, run, attempt, launch, resources, environment, stop)
        state = JobState.SUCCEEDED
        if rank == 0:
            attempt.end(state, metrics=metrics)
    except Stopped as ended:
        state = ended.state
        log.warning("%s: %s", state.lower(), ended)
        if rank == 0:
            attempt.end(state, error=str(ended))
    except KeyboardInterrupt:
        state = JobState.CANCELLED
        if rank == 0:
            attempt.end(state, error="interrupted")
    except UserError as error:
        print(f"distdl: {redact(str(error))}", file=sys.stderr)
        return fail(attempt, rank, error)
    except BaseException as error:  # whatever it was, it is recorded and named
        return fail(attempt, rank, error)
    finally:
        stop.uninstall()
    return state.exit_code


def newest(run: RunDirectory) -> int:
    last = run.last_attempt()
    return last.number if last else 1


def perform(
    bundle: Bundle,
    run: RunDirectory,
    attempt: Attempt,
    launch: dict[str, Any],
    resources: Resources,
    environment: environments.Environment,
    stop: StopRequest,
) -> dict[str, float]:
    """Process group -> build -> task; returns the task's metrics.

    Args:
        launch: What the attempt's launch.yaml holds, and `resources` its part of it.
    """
    with uncollected():  # all that is slow to import, before the ranks wait for each other
        from distdl import allocator, birth, build, cluster, fetching, summary, tracking  # noqa: F401

    adopt_lightnings_loggers()
    config = effective_config(bundle, launch)
    # The user's code comes before everything that is installed.
    python_path = bundle.python_path(launch)
    lightning_names.serve()
    make_importable(python_path)
    allow = OmegaConf.select(config, "project.allow") or ()
    with contextlib.chdir("."):  # an import may go elsewhere, and paths to type are from here
        kinds.refuse(resolve(config).values, Trust(tuple(python_path), tuple(allow)))
    stop.check()
    birth.refuse_missing_device(environment, resources.accelerator)
    if resources.accelerator == "cpu":
        allocator.keep_freed_memory()
    log.debug("imported; joins the other ranks")  # each may take minutes: the file says which
    cluster.connect(environment, resources.accelerator)
    failed = False
    try:
        return build_and_run(config, run, attempt, launch, resources, environment, stop)
    except Stopped:
        raise
    except BaseException as error:
        failed = True
        # Now: taking this rank down makes the others fail, and their errors must come second.
        note(attempt, environment.rank, error)
        raise
    finally:
        cluster.disconnect(failed)


def build_and_run(
    config: DictConfig,
    run: RunDirectory,
    attempt: Attempt,
    launch: dict[str, Any],
    resources: Resources,
    environment: environments.Environment,
    stop: StopRequest,
) -> dict[str, float]:
    """What follows once all ranks are connected: checkpoint, measured choices, tracking, task."""
    from distdl import birth, cluster, fetching, summary, tracking
    from distdl.build import build, make

    rank = environment.rank
    birth.announce(environment, resources.accelerator)
    birth.warn_without_bf16(resources.accelerator, config.trainer.get("precision"))
    chosen = newest_checkpoint(config, run) if rank == 0 else None
    checkpoint = fetching.provide(chosen, run.path, environment)
    if (config.get("strategy") or {}).get("autotune"):
        from distdl import autotune

        config = autotune.tuned(config, attempt, launch, environment, resources, stop)
    if (config.get("model") or {}).get("compile") == "measured":
        from distdl import compiling

        config = compiling.chosen(config, attempt, launch, environment, resources, stop)
    info = summary.run_info(config, run, attempt, launch, resources) if rank == 0 else None
    tracker = tracking.start_tracking(
        summary.for_rank(cluster.tell_all(info), environment),
        {k: make(node) for k, node in (config.get("tracking") or {}).items()},
    )
    state = JobState.FAILED
    try:
        with lightnings_refusals():
            built = build(
                config, run, attempt, environment, resources, stop, tracker.loggers, checkpoint
            )
            tracker.settle()
            stop.check()
            if rank == 0:
                # A strategy may leave a part of the model on each rank: it is counted before.
                complete = summary.parameters_of(built.module)
                summary.print_start(built, resources, launch)

                def on_start() -> None:
                    counted = summary.print_batch(built, resources, attempt, complete)
                    tracker.describe({f"parameters.{k}": v for k, v in counted.items()})

                built.metrics.tell = on_start
            metrics = perform_task(config, built)
        state = JobState.SUCCEEDED
        if rank == 0:
            started = attempt.status().get("started", 0)
            summary.print_end(built, metrics, tracker.how_to_open(), started)
        return metrics
    except Stopped as ended:
        state = ended.state
        raise
    except BaseException as error:
        note(attempt, rank, error)  # before the tracker, which may take its time
        raise
    finally:
        tracker.finish(str(state))


@contextlib.contextmanager
def lightnings_refusals() -> Iterator[None]:
    """Raises a UserError in place of what Lightning's own code raises, as that is for the user to
    change: without the traceback, which the log file has."""
    from distdl import misfits

    plain = (ValueError, TypeError, RuntimeError, NotImplementedError, ModuleNotFoundError)
    try:
        yield
    except Exception as error:
        if problem := misfits.explained(error):
            raise UserError(problem) from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raised = (frame.line or "").startswith("raise ") and type(error) in plain
        of_lightning = "/lightning/pytorch/" in Path(frame.filename).as_posix()
        if type(error).__name__ == "MisconfigurationException" or (raised and of_lightning):
            raise UserError(f"Lightning refuses it: {error}") from error
        raise


def perform_task(config: DictConfig, built: Any) -> dict[str, float]:
    """Calls the task by itself: through Hydra its exceptions would come out as Hydra's."""
    from hydra.utils import get_method

    arguments = configs.plain(config.task)
    task = get_method(str(arguments.pop("_target_")))
    return task(built, **arguments) or {}


def effective_config(bundle: Bundle, launch: dict[str, Any]) -> DictConfig:
    """The frozen recipe, where this attempt runs, and what this attempt changed."""
    return configs.merge(
        bundle.recipe(), OmegaConf.create(launch.get("where") or {}), launch.get("changes")
    )


def newest_checkpoint(config: DictConfig, run: RunDirectory) -> str | None:
    """What training starts from: the run's own newest, else `checkpoint.resume_from`."""
    from distdl import checkpoint

    newest = checkpoint.CheckpointStore(run.checkpoints).newest()
    if newest is not None:
        return str(newest)
    other = config.checkpoint.get("resume_from")
    # Absolute: `fetching.provide` takes what is relative as a part of the run.
    return str(checkpoint.find(other).absolute()) if other else None


class ScreenHandler(logging.StreamHandler[TextIO]):
    """Writes to what stderr is at that moment: a live progress bar puts itself in its place."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def start_logging(attempt: Attempt, rank: int) -> None:
    """Every rank into a file of its own; rank 0, and the errors of the others, on screen too."""
    attempt.logs.mkdir(parents=True, exist_ok=True)
    root = logging.getLogger()
    # A basicConfig in the user's code, imported before this, would show each line once more.
    screens = (sys.stderr, sys.stdout)
    for old in [*root.handlers]:
        plain = type(old) is logging.StreamHandler and old.stream in screens
        if old.name == HANDLER or plain:
            root.removeHandler(old)
    file = logging.FileHandler(attempt.logs / f"rank_{rank}.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = ScreenHandler()
    screen.setFormatter(
        logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
    )
    screen.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    screen.addFilter(
        lambda record: (
            record.name.startswith(SHOWN)
            or (record.levelno >= logging.WARNING and not record.name.startswith(QUIET))
        )
    )
    for handler in (file, screen):
        handler.name = HANDLER
        handler.addFilter(RedactingFilter())
        root.addHandler(handler)
    root.setLevel(logging.INFO)
    log.setLevel(logging.DEBUG)  # for the file: which variable said which rank
    logging.captureWarnings(True)
    for category in FOR_AUTHORS:
        warnings.filterwarnings("ignore", category=category)
    # It cannot see that our loaders do go on; distdl.data.loading names those that do not.
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before")
    # Lightning knows only its own way to Slurm.
    warnings.filterwarnings("ignore", message="The `srun` command is available")
    if rank:
        warnings.filterwarnings("ignore")
    log_early()


def adopt_lightnings_loggers() -> None:
    """Lightning, once imported, has handlers of its own: its warnings come by ours instead, and
    its chatter stays in the file."""
    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def note(attempt: Attempt, rank: int, error: BaseException) -> int:
    """Records what failed first on this rank, and logs it at once: what follows may take its time,
    or end with a kill. Returns the exit code."""
    code = JobState.FAILED.exit_code
    if isinstance(error, UserError):
        code = EXIT_REFUSED
    elif isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code or code  # whoever calls exit(0) in the middle has not trained
    text = redact("".join(traceback.format_exception(error)))
    more: dict[str, Any] = {"lost_peer": True} if failures.is_consequence(error) else {}
    more |= {"where": where} if (where := place_in(text)) else {}
    message = redact(str(error))
    if not attempt.record_error(rank, type(error).__name__, message, text, code, **more):
        return code
    first = attempt.first_error()
    debugged = isinstance(error, bdb.BdbQuit)
    caused = first and first["rank"] != rank and first.get("exit_code") == EXIT_REFUSED
    if debugged or caused or isinstance(error, UserError):
        log.debug("%s", text)  # for the file: what is on screen says it without a traceback
    if debugged:
        log.error("ended in the debugger")
    elif isinstance(error, UserError):
        pass
    elif first and caused:
        log.error("ends because rank %s failed first", first["rank"])
    else:
        log.error("%s%s", text, f"at {where}" if where else "")
    return code


def fail(attempt: Attempt, rank: int, error: BaseException) -> int:
    """Ends the attempt as failed and returns this rank's exit code."""
    code = note(attempt, rank, error)
    if rank == 0:
        facts = {"type": type(error).__name__, "message": redact(str(error)), "exit_code": code}
        attempt.fail(failures.told(facts), code)
    return code


if __name__ == "__main__":
    # Asked before: by then the user's code may have changed the environment.
    launcher = os.environ.get(environments.LAUNCHER_VARIABLE, "")
    leave(main(stop=EARLY), launcher)
