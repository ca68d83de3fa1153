"""Checks, before anything starts, that the checkpoint to start from exists."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import grammar
from distdl.config import recipe as configs
from distdl.job import LauncherBase, Resources
from distdl.launch import jobs
from distdl.runs import checkpoints
from distdl.runs.directory import RunDirectory, shown
from distdl.util.errors import Problem, UserError
from distdl.util.redact import redact_command
from distdl.validation import rules

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def for_task(config: DictConfig, run: RunDirectory, typed: Sequence[Override]) -> Sequence[Problem]:
    """Checks that `task.checkpoint` exists, if the task takes one and runs here. `typed`: the
    overrides of the command line, for the remedy."""
    default = "best" if configs.is_own(config.task.get("_target_")) else "none"
    named = str(config.task.get("checkpoint", default))
    is_local = rules.runs_here(str(config.launcher["_target_"]))
    if not is_local or named == "none" or not configs.evaluates(config):
        return ()
    problems = problems_of(named, "task.checkpoint", run.checkpoints)
    if problems and named in ("best", "last") and not any(run.checkpoints.glob("*.ckpt")):
        return [replace(each, remedy=_with_checkpoint(config, typed)) for each in problems]
    return problems


def _with_checkpoint(config: DictConfig, typed: Sequence[Override]) -> str:
    """What to type for a task that needs a checkpoint, when this run has none."""
    task = str(config.task["_target_"]).rpartition(".")[2]
    runs = jobs.runs_below(Path(str(config.output_dir)))
    trained = (run for run in runs if any(run.checkpoints.glob("*.ckpt")))
    if newest := next(trained, None):
        folder = shlex.quote(shown(newest.path))
        command = f"python -m distdl resume {folder} task={task}"
        return f"the newest run that has one: {command}; or task.checkpoint=FILE of another"
    # What is typed for a resume does not make up its config.
    composed_of = typed if "hydra" in config else ()
    texts = [each.lstrip("+") for each in grammar.texts_of(composed_of)]
    others = redact_command([each for each in texts if not each.startswith("task")])
    train = shlex.join(["python", "-m", "distdl", *others])
    return f"train first: {train}; then: python -m distdl resume RUN task={task}"


def for_start(config: DictConfig, run: RunDirectory) -> Sequence[Problem]:
    """Checks that `checkpoint.resume_from` exists, unless the run has a checkpoint of its own. For
    a job on other machines, checks that its nodes may be able to read the path."""
    start = config.checkpoint.get("resume_from")
    if not start or any(run.checkpoints.glob(f"*{checkpoints.SUFFIX}")):
        return ()
    if rules.runs_here(str(config.launcher["_target_"])):
        return problems_of(start, "checkpoint.resume_from")
    section = OmegaConf.to_container(config.checkpoint, resolve=False)
    assert isinstance(section, dict)
    if Path(start).is_absolute() or "${input:" in section["resume_from"]:
        return ()
    return [
        Problem(
            "checkpoint.resume_from",
            what=f"{start} is a path below this folder, but the job runs on other machines",
            remedy=(
                "write an absolute path that they can read, "
                "or checkpoint.resume_from='${input:start}' "
                "with launcher.inputs.start=..."
            ),
            code="unsupported",
        )
    ]


def for_parts(
    config: DictConfig, launcher: type[LauncherBase[Any]] | None, size: Resources | None
) -> Iterator[Problem]:
    """Refuses a checkpoint of which each rank writes a part, where the nodes share no folder: its
    manifest could be stored before the parts of other nodes are."""
    if launcher is None or size is None or size.num_nodes == 1 or not config.checkpoint.sharded:
        return
    node = OmegaConf.to_container(config.launcher, resolve=False)
    assert isinstance(node, dict)
    if shared := launcher.splits_store({str(key): value for key, value in node.items()}):
        yield Problem(
            "checkpoint.sharded",
            what=(
                f"the {size.num_nodes} nodes share no folder, in which its parts could be together"
            ),
            remedy=f"checkpoint.sharded=false, or {shared}",
            code="unsupported",
        )


def problems_of(named: str, key: str, folder: Path | None = None) -> Sequence[Problem]:
    try:
        checkpoints.find(named, key, folder)
    except UserError as error:
        return error.problems
    return ()
