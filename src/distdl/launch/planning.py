"""Turns a composed config into a plan. All problems are reported at once, and nothing is written.

`plan` does not import torch, so it is fast. `check_classes` takes seconds.
"""

from __future__ import annotations

import importlib
import shlex
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from distdl.config import (
    batches,
    choices,
    compose,
    consent,
    epochs,
    grammar,
    programs,
    task_facts,
)
from distdl.config import recipe as configs
from distdl.job import JobState, Resources
from distdl.launch import inputs, one_attempt, program_checks
from distdl.launch import launch as launches
from distdl.launch.launch import Launch
from distdl.runs import checkpoints
from distdl.runs.directory import PREDICTING, Attempt, RunDirectory, shown
from distdl.runs.inputs import StoredInput
from distdl.util.answering import refuse_silent
from distdl.util.errors import UserError
from distdl.util.imports import uncollected
from distdl.util.redact import redact_command
from distdl.util.suggest import written
from distdl.validation import validate

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

AGENT = "torch.distributed.launcher.api"  # it starts several ranks on this machine


@dataclass
class Plan:
    """One attempt, before anything is written.

    Args:
        launch: What the config says about the start, with this attempt's changes.
        recipe: The part that config.yaml freezes: what the run is.
        run: The run's directory; it exists if this attempt resumes a run.
        run_id: `<experiment>/<name>`, or `<experiment>/<sweep>/<member>`: below output_dir.
        changes: What this attempt changes in the recipe, by path.
        notes: Notes for the user, to read before it starts.
        old_run: The new path of an old run of this name that failed before its first checkpoint.
        swept: `key=value` of a new run that vary in its sweep.
        imported: Files of the user's modules that the config's targets import, for a job elsewhere.
        started: Files of the project that the command of a program starts.
        inputs: Files that the config names, fetched; the config of `launch` has their paths.
        left_out: If the attempt does without some hosts of the run: these `hosts`, and `where` the
            run uses all of them.
        metrics: What the model is known to log (`validation.logged`), once its class was checked.
        search: Of a trial of a search, what its attempt has to know of that (`runs/verdicts.py`).
    """

    launch: Launch
    recipe: DictConfig
    run: RunDirectory
    run_id: str
    changes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    old_run: Path | None = None
    swept: Sequence[str] = ()
    imported: Sequence[str] = ()
    started: Sequence[str] = ()
    inputs: Sequence[StoredInput] = ()
    left_out: dict[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> DictConfig:
        """The recipe and `where` (the keys on where a run runs), with this attempt's changes."""
        return self.launch.config

    @property
    def resources(self) -> Resources:
        return self.launch.size

    @property
    def overrides(self) -> list[str]:
        """`key=value` of a new run."""
        texts = grammar.texts_of(self.launch.typed)
        return [text.lstrip("+") for text in texts if not text.startswith("~")]

    def resume_command(self, *words: str) -> str:
        """What continues the run, with these words and those that only the user may say, which a
        resume needs again."""
        again = [text.lstrip("+") for text in consent.asked_again(self.launch.typed)]
        said = redact_command(again)
        return shlex.join(["python", "-m", "distdl", "resume", shown(self.run.path), *words, *said])

    @property
    def last_attempt(self) -> Attempt | None:
        """The newest attempt of the run; None if the run is new."""
        return self.run.last_attempt() if self.run.exists else None

    @property
    def finished(self) -> bool:
        """Whether this same training has succeeded already: starting it again would do nothing."""
        task = (self.config.get("task") or {}).get("_target_")
        return task_facts.of(self.config).trains and any(
            attempt.state() is JobState.SUCCEEDED
            and (launch["where"].get("task") or {}).get("_target_") == task
            and (launch.get("changes") or {}) == self.changes
            for attempt in (self.run.attempts() if self.run.exists else ())
            for launch in [attempt.launch()]
        )


def plan(
    config: DictConfig, name: str | None = None, typed: Sequence[Override] | None = None
) -> Plan:
    """Plans a new run, or the next attempt of the run with this name if its recipe is the same. The
    name of a sweep's member replaces the name in the config. `typed`: the overrides of the command
    line; None parses them again."""
    typed = compose.typed(config) if typed is None else typed
    consent.refuse(config, typed)
    member = name is not None
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        recipe = configs.recipe_of(config)
        name = name or config.name or f"{stamp}-{configs.hash_of(configs.to_yaml(recipe))}"
        run_id = f"{config.experiment_name}/{name}"
        refuse_silent(Path(str(config.output_dir)))
        run = RunDirectory(Path(str(config.output_dir)).resolve() / run_id)
    except OmegaConfBaseException:  # a broken interpolation, which validation reports better
        launches.of(config, typed)
        raise
    planned = Plan(launches.of(config, typed, run), recipe, run, run_id)
    if not run.exists:
        return planned
    stored = run.recipe()
    if not configs.same_recipe(stored, recipe):
        if never_trained(run):
            planned.old_run = run.path_when_failed()
            what = f"the old {run_id} failed before its first checkpoint, kept as"
            planned.notes.append(f"{what} {shown(planned.old_run)}")
            return planned
        resume = planned.resume_command(*_resume_arguments(planned, stored))
        raise UserError.at(
            "name",
            what=f"{run_id} exists with another config:\n{configs.difference(stored, recipe)}",
            remedy=f"choose another name, or resume that run: {resume}",
            code="exists-already",
        )
    if not member:  # a member is refused when its turn comes, so that the others train
        refuse_second(planned)
    return continue_run(planned, chosen=())


def _resume_arguments(planned: Plan, stored: DictConfig) -> list[str]:
    """The arguments to suggest for a resume: the requested changes, if a resume may make all of
    them; else, if the run has finished, arguments to train longer."""
    old, new = (
        OmegaConf.to_container(configs.recipe_of(each), resolve=False)
        for each in (stored, planned.recipe)
    )
    assert isinstance(old, dict)
    assert isinstance(new, dict)
    changed = []
    for section, key in (path.split(".") for path in configs.CHANGEABLE):
        before = old.get(section)
        after = new.get(section)
        if not isinstance(before, dict) or not isinstance(after, dict) or key not in after:
            continue
        if key not in before or before[key] != after[key]:
            before[key] = after[key]
            changed.append(written(f"{section}.{key}", after[key]))
    if old == new:
        return changed
    longer = configs.longer(stored) if planned.finished else ""
    return longer.split()


def never_trained(run: RunDirectory) -> bool:
    """Whether a run failed before its first checkpoint, so that a new run may take its name. One
    that predicts with another run's checkpoint has rows instead."""
    states = [attempt.state() for attempt in run.attempts()]
    failed = bool(states) and all(s in (JobState.FAILED, JobState.CANCELLED) for s in states)
    kept = (*run.checkpoints.glob(f"*{checkpoints.SUFFIX}"), *run.path.glob(f"**/{PREDICTING}"))
    if programs.is_program(run.recipe()):  # its files have any name
        kept = tuple(run.checkpoints.glob("*"))
    return failed and not kept


def refuse_second(planned: Plan) -> None:
    """Refuses a second attempt of a run at the same time."""
    if not planned.config.dry_run:
        one_attempt.refuse_second(planned.run, planned.config.project.get("allow") or ())
        planned.run.refuse_under_way()


def continue_run(planned: Plan, chosen: Sequence[str]) -> Plan:
    """Plans the next attempt of an existing run. If the world size of a training changes, the
    global batch size is kept, except by keys that the user set (`chosen`)."""
    last = planned.run.main_attempt()
    if last is None or configs.evaluates(planned.config):
        return planned
    before = last.launch()
    # A resume has set `changes` already, without the settings of a strategy that it replaces.
    changes = dict(planned.changes or before.get("changes") or {})
    where = planned.launch.where
    config = configs.merge(planned.recipe, where, changes)
    keeps = batches.keep_global_batch(
        config,
        planned.resources,
        before.get("global_batch_size"),
        chosen,
        batches.recorded(attempt.status() for attempt in reversed(planned.run.attempts())),
    )
    planned.notes += keeps.notes
    changes |= keeps.changes
    if changes != planned.changes:
        planned.changes = changes
        config = configs.merge(planned.recipe, where, changes)
        planned.launch = planned.launch.with_config(config)
    return planned


def with_choices(planned: Plan, attempt: Attempt) -> Plan:
    """The plan of what follows an attempt of this same command: with what that one has chosen by a
    measurement. An attempt may have had fewer hosts; a choice whose batch does not divide the
    global one over those of the plan is left out, and made again."""
    before = attempt.launch()
    made = choices.made_in(before)
    changes = {path: value for each in made.values() for path, value in each.items()}
    if not changes:
        return planned
    config = configs.merge(planned.config, OmegaConf.create({}), changes)
    try:
        kept = batches.keep_global_batch(
            config,
            planned.resources,
            before.get("global_batch_size"),
            (),
            batches.recorded([attempt.status()]),
        )
    except UserError:
        if "batch_size" in made:  # which decides the global batch: another one is another run
            raise
        return planned
    changes |= kept.changes
    config = configs.merge(config, OmegaConf.create({}), kept.changes)
    launch = planned.launch.with_config(config)
    return replace(planned, launch=launch, changes=planned.changes | changes)


def check_classes(planned: Plan, *, apart: bool = False) -> None:
    """Runs the second stage of validation, unless the run has finished, and adds notes to the plan.
    `apart` says that the run will have a process of its own, as a sweep's members do."""
    config = planned.config
    size = planned.resources
    builds = task_facts.of(config).needs_build
    program = program_checks.section_of(config)
    if program is not None:
        folder = planned.launch.root / planned.launch.folder
        planned.notes += program_checks.hints(program, folder)
        planned.started = [str(each) for each in program_checks.files(program.command, folder)]
        planned.notes += program_checks.unused_params(config)
    elif not builds and configs.is_own(config.task.get("_target_")):
        return  # nothing of somebody else's is imported
    if planned.finished and not config.dry_run:
        return
    planned.launch = planned.launch.checked()
    if builds and (found := inputs.provide(config, None if planned.old_run else planned.run)):
        planned.inputs = found
        paths = {each.key: str(each.path) for each in found}
        config = configs.merge(config, OmegaConf.create(), paths)
        planned.launch = planned.launch.with_config(config).checked()
    launch = planned.launch
    assert launch.resolved is not None
    starts_here = launch.is_local and not apart and not config.dry_run
    # A process of its own trains if GPUs are chosen, since they must be set before anything queries
    # the devices, or if the rank may be started again.
    other_process = bool(size.device_ids or config.launcher.get("max_attempts"))
    trains_here = starts_here and size.world_size == 1 and not other_process and program is None
    own_launcher = configs.is_own(config.launcher.get("_target_"))
    agent = starts_here and not trains_here and size.world_size > 1
    with imported_in_background(AGENT) if agent else nullcontext():
        problems, notes, facts = validate.check_bindings(
            launch.resolved,
            size,
            launch.trust.folders,
            in_process=trains_here or (program is not None and own_launcher),
            new=not planned.run.exists,
            resumes=any(planned.run.checkpoints.glob("*.ckpt")),
            builds=builds,
            fetched=bool(planned.inputs),
        )
    if problems:
        raise UserError(*problems)
    if facts.get("model_configures_optimizers") and config.get("optimizer"):
        notes.append("the model's configure_optimizers is used; optimizer= and schedule= are not")
    planned.imported = facts.get("imported") or ()
    planned.metrics = facts.get("metrics") or {}
    notes += epochs.unreached(launch.resolved.values)
    planned.notes += [*notes, *launch.launcher_notes()]


@contextmanager
def imported_in_background(module: str) -> Iterator[None]:
    """Imports a module in a thread while a child process validates: both take seconds."""
    thread = threading.Thread(target=lambda: suppressed_import(module))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def suppressed_import(module: str) -> None:
    # A failure is reported later, when the import fails again where it is needed.
    with suppress(Exception), uncollected():
        importlib.import_module(module)
