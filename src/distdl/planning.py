"""A composed config becomes a plan: every problem at once, and nothing written yet.

`plan` needs no torch: it is over in a moment, whatever it finds. `check_classes` takes seconds.
"""

from __future__ import annotations

import importlib
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distdl import batches, checkpoint, checks, jobs, kinds, provenance, resources, validate
from distdl import config as configs
from distdl.errors import Problem, UserError
from distdl.importing import uncollected
from distdl.job import JobState, Resources
from distdl.own_code import make_importable, own_folders
from distdl.run_directory import RunDirectory, shown
from distdl.suggest import written
from distdl.targets import Trust, problem_of

LOCAL = "distdl.launchers.local.LocalLauncher"
AGENT = "torch.distributed.launcher.api"  # starts several ranks here
# Groups without which nothing runs, whatever the task.
REQUIRED = ("model", "strategy", "launcher")


@dataclass
class Plan:
    """One attempt, and nothing written yet.

    Args:
        config: Recipe and where, merged, with this attempt's changes.
        recipe: What is or will be frozen.
        resources: The size.
        run: The run's directory; it exists if this goes on with one.
        run_id: `<experiment>/<name>`, or `<experiment>/<sweep>/<member>`: below output_dir.
        changes: What this attempt changes of the recipe, by path.
        notes: What a person should read before it starts.
        old_run: Where the run of this name goes that failed before its first checkpoint.
        overrides: What a new run was composed with, `key=value` each.
        swept: Those of them that its sweep varies.
    """

    config: DictConfig
    recipe: DictConfig
    resources: Resources
    run: RunDirectory
    run_id: str
    changes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    old_run: Path | None = None
    overrides: Sequence[str] = ()
    swept: Sequence[str] = ()

    @property
    def finished(self) -> bool:
        """This very training has succeeded before: starting it again would do nothing."""
        task = self.config.task.get("_target_")
        return task == configs.TRAIN and any(
            attempt.state() is JobState.SUCCEEDED
            and launch["where"]["task"]["_target_"] == task
            and (launch.get("changes") or {}) == self.changes
            for attempt in (self.run.attempts() if self.run.exists else ())
            for launch in [attempt.launch()]
        )


def plan(config: DictConfig, name: str | None = None) -> Plan:
    """A new run, or the run of this name if its recipe is the same.

    Args:
        config: As composed.
        name: Another name than the config's: that of a member of a sweep.

    Raises:
        UserError: Anything is wrong with the text of the config, the name belongs to another
            recipe, or its run is under way.
    """
    member, stamp = name is not None, time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        recipe = configs.recipe_of(config)
        name = name or config.name or f"{stamp}-{configs.hash_of(configs.to_yaml(recipe))}"
        run_id = f"{config.experiment_name}/{name}"
        run = RunDirectory(Path(str(config.output_dir)).resolve() / run_id)
    except OmegaConfBaseException:  # one of them leads nowhere
        size_of(config)
        raise
    planned = Plan(config, recipe, size_of(config, run), run, run_id)
    composed = OmegaConf.select(config, "hydra.overrides.task") or ()
    planned.overrides = [each.lstrip("+") for each in composed if not each.startswith("~")]
    if not run.exists:
        return planned
    stored = run.recipe()
    if not configs.same_recipe(stored, recipe):
        if never_trained(run):
            planned.old_run = run.spare_path()
            kept = shown(planned.old_run)
            planned.notes.append(
                f"the old {run_id} failed before its first checkpoint, kept as {kept}"
            )
            return planned
        raise UserError(
            Problem(
                "name",
                f"{run_id} exists with another config:\n{configs.difference(stored, recipe)}",
                "choose another name, or go on with that run: "
                f"python -m distdl resume {shown(run.path)}{_resumed(planned, stored)}",
            )
        )
    if not member:  # which is refused in its turn, and the others train
        refuse_second(planned)
    return proceed(planned, given=())


def _resumed(planned: Plan, stored: DictConfig) -> str:
    """What a resume is given: what was asked for, if it may change that, or else, of a run that has
    finished, to train longer."""
    old, new = (
        OmegaConf.to_container(configs.recipe_of(each), resolve=False)
        for each in (stored, planned.recipe)
    )
    assert isinstance(old, dict) and isinstance(new, dict)
    changed = []
    for path in configs.CHANGEABLE:
        section, key = path.split(".")
        mine, asked = old.get(section), new.get(section)
        if not isinstance(mine, dict) or not isinstance(asked, dict) or key not in asked:
            continue
        if key not in mine or mine[key] != asked[key]:
            mine[key] = asked[key]
            changed.append(shlex.quote(written(path, asked[key])))
    if old == new:
        return f" {' '.join(changed)}"
    return f" {configs.longer(stored)}" if planned.finished else ""


def never_trained(run: RunDirectory) -> bool:
    """Whether a run failed before its first checkpoint, and so has nothing to lose its name for."""
    states = [attempt.state() for attempt in run.attempts()]
    failed = bool(states) and all(s in (JobState.FAILED, JobState.CANCELLED) for s in states)
    return failed and not any(run.checkpoints.glob(f"*{checkpoint.SUFFIX}"))


def refuse_second(planned: Plan) -> None:
    """One run trains once at a time.

    Raises:
        UserError: An attempt of this one waits in a queue or runs.
    """
    if not planned.config.dry_run:
        jobs.refuse_second(planned.run)
        planned.run.refuse_under_way()


def proceed(planned: Plan, given: Sequence[str]) -> Plan:
    """Goes on with an existing run; a changed world size keeps the global batch.

    Args:
        planned: The plan as asked for.
        given: Paths that the user set himself in this attempt.

    Raises:
        UserError: The global batch cannot be kept, and nothing was said about it.
    """
    last = planned.run.last_attempt()
    if last is None:
        return planned
    before = last.launch()
    # A resume has looked at those before: another strategy drops the settings of the last one.
    changes = dict(planned.changes or before.get("changes") or {})
    keeps = batches.keep_global_batch(
        configs.merge(planned.recipe, configs.where_of(planned.config), changes),
        planned.resources,
        before.get("global_batch_size"),
        given,
        batches.recorded(attempt.status() for attempt in reversed(planned.run.attempts())),
    )
    changes.update(keeps.changes)
    planned.changes = changes
    planned.notes += keeps.notes
    planned.config = configs.merge(planned.recipe, configs.where_of(planned.config), changes)
    return planned


def missing_checkpoint(config: DictConfig, run: RunDirectory) -> Sequence[Problem]:
    """Whether `task.checkpoint` is there, if the task takes one and runs here."""
    task = config.task
    named = str(task.get("checkpoint", "best"))
    here = checks.runs_here(str(config.launcher["_target_"]))
    if here and named != "none" and task["_target_"] in configs.EVALUATE:
        return found_problems(named, "task.checkpoint", run.checkpoints)
    return ()


def missing_start(config: DictConfig, run: RunDirectory) -> Sequence[Problem]:
    """Whether `checkpoint.resume_from` is there, unless the run has a checkpoint of its own; of a
    job elsewhere, whether it is a path that its nodes may see."""
    given = config.checkpoint.get("resume_from")
    if not given or any(run.checkpoints.glob(f"*{checkpoint.SUFFIX}")):
        return ()
    if checks.runs_here(str(config.launcher["_target_"])):
        return found_problems(given, "checkpoint.resume_from")
    written = OmegaConf.to_container(config.checkpoint, resolve=False)
    assert isinstance(written, dict)
    if Path(given).is_absolute() or "${input:" in written["resume_from"]:
        return ()
    what = f"{given} is a path below this folder, and the job runs elsewhere"
    remedy = (
        "an absolute path that its nodes see, or checkpoint.resume_from='${input:start}' "
        "with launcher.inputs.start=..."
    )
    return [Problem("checkpoint.resume_from", what, remedy)]


def found_problems(named: str, key: str, own: Path | None = None) -> Sequence[Problem]:
    try:
        checkpoint.find(named, key, own)
    except UserError as error:
        return error.problems
    return ()


def size_of(config: DictConfig, run: RunDirectory | None = None) -> Resources:
    """The size of the run, and the first stage of validation.

    Args:
        config: As composed, or as a resume makes it.
        run: Its directory, which may have checkpoints.

    Raises:
        UserError: With every problem that the config's text shows.
    """
    written = OmegaConf.to_container(config, resolve=False)
    assert isinstance(written, dict)
    problems = [
        Problem(group, "missing", f"choose one: {group}=<option> (--help lists them)")
        for group in REQUIRED
        if not written.get(group)
    ]
    local, root = is_local(config), root_of(config)
    make_importable(own_folders(root))  # a launcher may be one of them
    size, uncounted = None, None
    known = getattr(launcher_class(config), "devices", None)
    try:
        trainer = configs.plain(config.trainer)
        node = written.get("launcher") or {}
        size = resources.resolve(trainer, local=local, known=known and known(node))
    except UserError as error:
        if said := "; ".join(notes_of(config)):
            problems += [Problem(p.path, f"{p.what}: {said}", p.remedy) for p in error.problems]
        elif known and known(node) is None:  # the launcher says what is wrong with its size
            uncounted = error
        else:
            problems += error.problems
    except (OmegaConfBaseException, TypeError, ValueError):
        pass  # a broken value: the first stage names it
    for look in (missing_checkpoint, missing_start):
        with suppress(OmegaConfBaseException, TypeError, KeyError, AttributeError):
            problems += look(config, run) if run else ()  # the first stage names what is broken
    if size is not None and size.accelerator == "cpu" and trainer.get("sync_batchnorm"):
        problems.append(
            Problem(
                "trainer.sync_batchnorm",
                "synchronised batch norm needs a GPU",
                "write trainer.sync_batchnorm=false; model.norm=group needs no synchronising",
            )
        )
    validate.refuse(config, size, project_root=str(root), further=problems)
    if uncounted is not None:
        validate.validate(config, None, project_root=str(root))
        raise uncounted
    assert size is not None
    return size


def check_classes(planned: Plan, *, apart: bool = False) -> None:
    """The second stage of validation, of what is not finished already.

    Args:
        planned: Its notes gain what could not be checked.
        apart: The run will have a process of its own, as the members of a sweep have.

    Raises:
        UserError: With all problems.
    """
    config, size, local = planned.config, planned.resources, is_local(planned.config)
    if planned.finished and not config.dry_run:
        return
    if planned.changes:  # else the first stage has seen this very config
        validate.refuse(config, size, project_root=str(root_of(config)))
    here = local and not apart and not config.dry_run
    # Which GPU is visible must be said before anything looks.
    goes_on = here and size.world_size == 1 and not size.device_ids
    with imported_meanwhile(AGENT) if here and not goes_on else nullcontext():
        problems, notes, facts = validate.check_bindings(
            config, size, str(root_of(config)), goes_on=goes_on
        )
    if problems:
        raise UserError(*problems)
    if facts.get("model_configures_optimizers") and config.get("optimizer"):
        notes.append(
            "the model's own configure_optimizers is used; optimizer= and schedule= are not"
        )
    planned.notes += [*notes, *notes_of(config)]


def notes_of(config: DictConfig) -> list[str]:
    """What the launcher says of its settings to whoever starts the job."""
    notes = getattr(launcher_class(config), "notes", None)
    return list(notes(OmegaConf.to_container(config.launcher, resolve=False))) if notes else []


def is_local(config: DictConfig) -> bool:
    return str((config.get("launcher") or {}).get("_target_", LOCAL)) == LOCAL


def root_of(config: DictConfig) -> Path:
    """The user's code; the default while `project.root` is not yet known to be a path."""
    try:
        given = OmegaConf.select(config, "project.root")
    except OmegaConfBaseException:
        given = None
    return provenance.project_root(given if isinstance(given, str) else None)


@contextmanager
def imported_meanwhile(module: str) -> Iterator[None]:
    """Imports what this process will need while a child validates: both take seconds."""
    # An import that fails here fails again, and is told, where it is needed.
    thread = threading.Thread(target=lambda: suppressed_import(module))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def suppressed_import(module: str) -> None:
    with suppress(Exception), uncollected():
        importlib.import_module(module)


def launcher_class(config: DictConfig) -> Any:
    """The class that `launcher._target_` names, or None: validation says what is wrong with it."""
    try:
        target = str(config.launcher["_target_"])
        trust = Trust(own_folders(root_of(config)), tuple(config.project.get("allow") or ()))
        found = None if problem_of(target, trust, ("launcher",)) else kinds.locate(target)
        return found if kinds.launches(found) else None
    except Exception:
        return None
