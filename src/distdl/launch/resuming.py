"""The next attempt of a run, and what a resume may change."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import choices, compose, consent, grammar, groups, programs
from distdl.config import recipe as configs
from distdl.config.own_code import make_importable, own_folders
from distdl.launch import external, jobs, planning
from distdl.launch import launch as launches
from distdl.ranks import environment
from distdl.runs.directory import RunDirectory
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def plan(
    run: RunDirectory, overrides: Sequence[str], started: environment.Environment | None = None
) -> planning.Plan:
    """Plans the next attempt of `run`. `started` describes ranks that another tool (torchrun) has
    started. The run's files define the run, but do not decide whose code is trusted, nor which
    programs are started (`config.consent`): only the current folder's project is, and what the user
    says. On a UserError no untrusted code has been imported."""
    recipe = run.recipe()
    if started is not None:
        external.refuse_program(recipe)
    last = run.main_attempt()  # an evaluation's settings were for itself
    before = last.launch() if last else new_launch_record(run, recipe)
    where = where_by_default(run, before)
    earlier: dict[str, Any] = dict(before.get("changes") or {})
    parsed = grammar.parse_overrides(overrides)
    changes = apply(parsed, recipe, where, earlier)
    typed_paths = [override.key_or_group for override in parsed]
    if started is not None:
        requested = where.trainer.devices if "trainer.devices" in typed_paths else None
        external.adopt_ranks(where, started, requested)
    elif where.launcher["_target_"] == external.TARGET:  # this time no tool has started ranks
        where.launcher = compose.compose([]).launcher
    config, so_far = (configs.merge(recipe, where, each) for each in (changes, earlier))
    new = [
        path
        for path in changes
        if path in typed_paths and OmegaConf.select(config, path) != OmegaConf.select(so_far, path)
    ]
    # Setting the same value again is not a change: a finished run stays finished.
    changes = {p: value for p, value in changes.items() if p in new or p in earlier}
    consent.refuse(config, parsed)
    with missing_code_located(config, before["where"]):
        launch = launches.of(config, parsed, run)
    notes = [] if last else [recorded_start(run)]
    typed = {o.key_or_group: str(o.input_line).partition("=")[2] for o in parsed}
    since = "in this attempt" if configs.evaluates(config) else "from this attempt on"
    notes += [f"{p} is {typed[p]} {since}" for p in new]
    planned = planning.Plan(launch, recipe, run, before["run_id"], changes, notes)
    planning.refuse_second(planned)
    planning.continue_run(planned, typed_paths)
    with missing_code_located(config, before["where"]):
        planning.check_classes(planned)
    return planned


def where_by_default(run: RunDirectory, before: dict[str, Any]) -> DictConfig:
    """The default `where` of the next attempt, from launch.yaml of the last one. Settings that only
    a command line may make are reset."""
    fresh: dict[str, Any] = {
        # The run may have been moved since launch.yaml was written.
        "output_dir": str(run.path.parents[before["run_id"].count("/")]),
        "dry_run": False,
        "follow": True,
        "project": {"root": None, "allow": list(jobs.allowed_here())},
        "checkpoint": {"trust_pickle": False},  # the run's own files cannot consent to it
    }
    if programs.is_program(run.recipe()):
        del fresh["checkpoint"]
    newer_keys = {"project": {"max_snapshot_mb": 300}}  # which an older run lacks
    # Hosts that the last attempt left out are used again if they answer (`left_out.fit`).
    whole = (before.get("left_out") or {}).get("where") or before["where"]
    where = OmegaConf.merge(newer_keys, whole, fresh)
    assert isinstance(where, DictConfig)
    return where


def apply(
    parsed: Sequence[Override],
    recipe: DictConfig,
    where: DictConfig,
    earlier: dict[str, Any],
) -> dict[str, Any]:
    """Applies Hydra's overrides to `where`; returns what this attempt and the `earlier` ones change
    in the recipe."""
    changes = dict(earlier)
    problems = []
    known = configs.flat_paths(recipe)
    changeable: tuple[str, ...] = configs.CHANGEABLE
    setting = [each for each in parsed if not each.is_delete() and not each.is_sweep_override()]
    with groups.hydra_session():
        options = [each for each in setting if groups.is_group(each.key_or_group)]
    chosen_groups = {each.key_or_group for each in options}
    if options:
        roots = [each for each in setting if each.key_or_group == "project.root"]
        chosen = compose.composed([*options, *roots]).config
    if any(each.key_or_group.partition(".")[0] == "task" for each in setting):
        asked = OmegaConf.merge(where, {"task": chosen.task} if "task" in chosen_groups else {})
        for each in setting:
            if each.key_or_group == "project.root" or each.key_or_group.startswith("task."):
                OmegaConf.update(asked, each.key_or_group, each.value(), force_add=True)
        assert isinstance(asked, DictConfig)
        make_importable(own_folders(launches.root_of(asked)))  # it may be the user's own
        if configs.evaluates(asked):
            changeable += configs.CHANGEABLE_TO_EVALUATE
    for override in parsed:
        path = override.key_or_group
        value = override.value()
        if override not in setting:
            problems.append(
                Problem(
                    path,
                    what="a resume can set values, but not delete or sweep them",
                    code="unsupported",
                )
            )
        elif path in chosen_groups:
            if path in ("launcher", "task"):
                where[path] = chosen[path]
            # Checkpoints work under every strategy, and tracking does not change the training.
            elif path in ("strategy", "tracking"):
                changes = {k: v for k, v in changes.items() if not k.startswith(f"{path}.")}
                changes[path] = OmegaConf.to_container(chosen[path], resolve=False)
            else:
                problems.append(_refused(path, changeable))
        elif any(path == w or path.startswith(w + ".") for w in configs.WHERE):
            OmegaConf.update(where, path, value, force_add=True)
        elif programs.is_about(path) and OmegaConf.select(recipe, path) == value:
            continue  # only said again, in consent
        elif (path, value) == choices.CHOICES["batch_size"][:2]:
            if OmegaConf.select(recipe, path) != value:
                problems.append(
                    Problem(
                        path,
                        what="a run keeps the batch that it was started with",
                        remedy="a number, or a new run",
                        code="mismatch",
                    )
                )
        elif path in changeable or path.startswith(("strategy.", "tracking.")):
            changes[path] = value
        else:
            problems.append(_refused(path, changeable, known))
    if problems:
        raise UserError(*problems)
    return changes


def recorded_start(run: RunDirectory) -> str:
    """A note for a run without attempts: how it was started."""
    command = run.provenance().get("command") or "unknown"
    started_by = command if isinstance(command, str) else shlex.join(map(str, command))
    default = "launcher, devices and task have the defaults of a new run unless you set them"
    return f"no attempt is recorded: {default}; the run was started by: {started_by}"


def new_launch_record(run: RunDirectory, recipe: DictConfig) -> dict[str, Any]:
    """A launch record for a run whose attempts were damaged and have been moved away."""
    where = OmegaConf.to_container(configs.where_of(compose.compose([])), resolve=False)
    # Below output_dir: <experiment>/<name>, or <experiment>/<sweep>/<member>.
    experiment = recipe.get("experiment_name")
    deep = experiment == run.path.parents[1].name and experiment != run.path.parent.name
    return {"run_id": "/".join(run.path.parts[-3 if deep else -2 :]), "where": where}


@contextmanager
def missing_code_located(config: DictConfig, before: dict[str, Any]) -> Iterator[None]:
    """Adds to a refusal the folder that has the missing code, according to the last attempt's
    `where`. That code is not used unasked, since the run may come from somebody else."""
    try:
        yield
    except UserError as error:
        root = (before.get("project") or {}).get("root")
        current = launches.root_of(config)
        refused = [p for p in error.problems if p.path.endswith("_target_")]
        if not refused or not root or str(root) == str(current):
            raise
        names = (OmegaConf.select(config, problem.path) for problem in refused)
        others = [p for p in error.problems if p not in refused]
        raise type(error)(
            Problem(
                "project.root",
                what=(
                    f"the run was started with the code of {root}, but this project, {current}, "
                    f"does not have {', '.join(dict.fromkeys(map(str, names)))}"
                ),
                remedy=f"cd {root}, or if you trust that code: project.root={root}",
                code="incomplete",
            ),
            *others,
        ) from None


def _refused(path: str, changeable: Sequence[str], known: Sequence[str] = ()) -> Problem:
    if known and path not in known:
        return Problem(
            path,
            what="no such key",
            remedy=did_you_mean(path, [*known, *changeable]),
            code="unknown-key",
        )
    others = ["strategy", "tracking", "launcher", "task", "trainer.devices", "trainer.num_nodes"]
    remedy = f"start a new run; a resume may only change {', '.join([*changeable, *others])}"
    if path in configs.CHANGEABLE_TO_EVALUATE:
        remedy += f"; {path} only for a task that evaluates (task=validate, test, predict, ...)"
    return Problem(path, what="would make it another run", remedy=remedy, code="mismatch")
