"""Runs of distdl for a benchmark: created by the library, executed in this process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from distdl.runs.directory import RunDirectory

CONF = Path(__file__).with_name("conf")


def create_run(folder: Path, *overrides: str) -> RunDirectory:
    """Creates a run with its first attempt below `folder`; no worker has begun it yet."""
    from distdl.config import compose
    from distdl.config import recipe as configs
    from distdl.launch import launch, submitting
    from distdl.launch.planning import Plan

    config = compose.compose([f"output_dir={folder}", *overrides], [str(CONF)])
    recipe = configs.recipe_of(config)
    run = RunDirectory(folder / f"run{len(list(folder.iterdir()))}")
    run.create(configs.to_yaml(recipe), {})
    launched = launch.of(config, compose.typed(config))
    plan = Plan(launched, recipe, run, f"bench/{run.path.name}")
    run.begin_attempt(submitting.launch_record(plan))
    return run


def work(run: RunDirectory) -> None:
    """Executes a run as one of its ranks: the real worker, in this process, without its output.

    Raises:
        RuntimeError: The worker failed; the message has the end of its output.
        KeyboardInterrupt: Ctrl-C, which a worker takes as a request to end.
    """
    from distdl.ranks.stopping import StopRequest
    from distdl.worker import main

    output = io.StringIO()
    stop = StopRequest()
    stop.install()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main.main([str(run.path), str(run.path)], stop)
    finally:
        stop.uninstall()
    if stop:
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"the worker ended with {code}: {output.getvalue()[-2000:]}")


def rank_main(path: str) -> None:
    """The main function of a process that only executes a run."""
    work(RunDirectory(Path(path)))
