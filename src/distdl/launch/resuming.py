"""The next attempt of a run, with what a resume may change of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl.config import compose
from distdl.config import recipe as configs
from distdl.launch import external, jobs, planning
from distdl.ranks import environment
from distdl.runs.directory import RunDirectory
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean


def plan(
    run: RunDirectory, overrides: Sequence[str], started: environment.Environment | None = None
) -> planning.Plan:
    """The next attempt of `run`; `started` are the ranks that somebody else started for it.

    The run's files say what it is, not whose code may run: that is the project that the command is
    typed in, and `project.root` and `project.allow` of the command line.

    Raises:
        UserError: Anything is wrong with it; nothing that is not trusted has been imported.
    """
    recipe = run.recipe()
    last = run.last_attempt()
    before = last.launch() if last else new_launch_record(run, recipe)
    where = where_by_default(run, before)
    if last:  # a validation in between was an errand: the run is what it was started as
        where.task = run.attempts()[0].launch()["where"]["task"]
    earlier: dict[str, Any] = dict(before.get("changes") or {})
    with compose.hydra_session():
        parsed = compose.parse_overrides(overrides)
        groups = {o.key_or_group for o in parsed if compose.is_group(o.key_or_group)}
    changes = apply(parsed, groups, recipe, where, earlier)
    given = [override.key_or_group for override in parsed]
    if started is not None:
        asked = where.trainer.devices if "trainer.devices" in given else None
        external.place(where, started, asked)
    elif where.launcher["_target_"] == external.TARGET:  # nobody has started ranks this time
        where.launcher = compose.compose([]).launcher
    config, so_far = (configs.merge(recipe, where, each) for each in (changes, earlier))
    new = [
        p
        for p in changes
        if p in given and OmegaConf.select(config, p) != OmegaConf.select(so_far, p)
    ]
    # What is as it was is no change, and a finished run that is asked for it has still finished.
    changes = {p: value for p, value in changes.items() if p in new or p in earlier}
    with missing_code_located(config, before["where"]):
        size = planning.size_of(config, run)
    refuse_programs(config, given)
    notes = [] if last else [start_on_record(run)]
    typed = {o.key_or_group: str(o.input_line).partition("=")[2] for o in parsed}
    notes += [f"{p} is {typed[p]} from this attempt on" for p in new]
    planned = planning.Plan(config, recipe, size, run, before["run_id"], changes, notes)
    planning.refuse_second(planned)
    planning.proceed(planned, given)
    with missing_code_located(config, before["where"]):
        planning.check_classes(planned)
    return planned


def where_by_default(run: RunDirectory, before: dict[str, Any]) -> DictConfig:
    """Where the next attempt runs, if nothing else is asked for: as the one before, but for what
    only a command line may say.

    Args:
        before: The launch.yaml of the last attempt.
    """
    # The run lies where it was found, whatever folder it was first written to.
    folder = str(run.path.parents[before["run_id"].count("/")])
    here = {
        "output_dir": folder,
        "dry_run": False,
        "follow": True,
        "project": {"root": None, "allow": list(jobs.own_trust().allow)},
        "checkpoint": {"trust_pickle": False},  # what a run's own files say is no consent
    }
    later = {"project": {"max_snapshot_mb": 300}}  # a key that an older run lacks
    where = OmegaConf.merge(later, before["where"], here)
    assert isinstance(where, DictConfig)
    return where


def apply(
    parsed: Sequence[Any],
    groups: set[str],
    recipe: DictConfig,
    where: DictConfig,
    earlier: dict[str, Any],
) -> dict[str, Any]:
    """Changes `where` by the overrides, and returns what the attempt changes of the recipe.

    Args:
        parsed: Hydra's overrides.
        groups: Those of their keys that choose an option of a group.
        earlier: What the attempt before has changed.

    Raises:
        UserError: An override is none that a resume takes.
    """
    changes, problems = dict(earlier), []
    for override in parsed:
        path, value = override.key_or_group, override.value()
        if override.is_delete() or override.is_sweep_override():
            problems.append(Problem(path, "a resume sets values, it deletes and sweeps none"))
        elif path in groups:
            chosen = compose.compose([str(override.input_line)])
            if path in ("launcher", "task"):
                where[path] = chosen[path]
            # Checkpoints are portable, and where a run is logged is not what it is.
            elif path in ("strategy", "tracking"):
                changes = {k: v for k, v in changes.items() if not k.startswith(f"{path}.")}
                changes[path] = OmegaConf.to_container(chosen[path], resolve=False)
            else:
                problems.append(_refused(path))
        elif any(path == w or path.startswith(w + ".") for w in configs.WHERE):
            OmegaConf.update(where, path, value, force_add=True)
        elif path in configs.CHANGEABLE or path.startswith(("strategy.", "tracking.")):
            changes[path] = value
        else:
            problems.append(_refused(path, configs.flat_paths(recipe)))
    if problems:
        raise UserError(*problems)
    return changes


def start_on_record(run: RunDirectory) -> str:
    """A note for a run without attempts: how it was started."""
    command = run.provenance().get("command") or "unknown"
    started_by = command if isinstance(command, str) else shlex.join(map(str, command))
    return (
        "no attempt is on record: launcher, devices and task are those of a new start, where "
        f"you do not give them; the run was started by: {started_by}"
    )


def new_launch_record(run: RunDirectory, recipe: DictConfig) -> dict[str, Any]:
    """What launch.yaml says, for a run whose attempts were put aside, as theirs was damaged."""
    where = OmegaConf.to_container(configs.where_of(compose.compose([])), resolve=False)
    # Below output_dir: <experiment>/<name>, or <experiment>/<sweep>/<member>.
    experiment = recipe.get("experiment_name")
    deep = experiment == run.path.parents[1].name and experiment != run.path.parent.name
    return {"run_id": "/".join(run.path.parts[-3 if deep else -2 :]), "where": where}


@contextmanager
def missing_code_located(config: DictConfig, before: dict[str, Any]) -> Iterator[None]:
    """Adds to a refusal where the missing code is. The run's files say so, and they may come from
    somebody else: the code is not taken from there unasked.

    Args:
        before: The `where` of the last attempt.
    """
    try:
        yield
    except UserError as error:
        root = (before.get("project") or {}).get("root")
        here = planning.root_of(config)
        refused = [p for p in error.problems if p.path.endswith("_target_")]
        if refused and root and str(root) != str(here):
            names = (OmegaConf.select(config, problem.path) for problem in refused)
            what = (
                f"the run was started with the code of {root}, and this project, {here}, "
                f"has no {', '.join(dict.fromkeys(map(str, names)))}"
            )
            remedy = f"cd {root}, or if you trust it: project.root={root}"
            others = [p for p in error.problems if p not in refused]
            raise type(error)(Problem("project.root", what, remedy), *others) from None
        raise


def refuse_programs(config: DictConfig, given: Sequence[str]) -> None:
    """A dry run starts no program that the run's files name.

    Raises:
        UserError: The launcher would ask one of them what it is.
    """
    launcher = planning.launcher_class(config)
    if not config.dry_run or "launcher" in given:
        return
    names = [name for name in getattr(launcher, "programs", ()) if f"launcher.{name}" not in given]
    for name in names:
        value, default = config.launcher.get(name), launcher.programs[name]
        if value not in (None, default):
            what = f"launch.yaml of the run names the program {value}: a dry run does not start it"
            remedy = f"if it is yours: launcher.{name}={value}"
            raise UserError.at(f"launcher.{name}", what, remedy)


def _refused(path: str, known: Sequence[str] = ()) -> Problem:
    if known and path not in known:
        return Problem(path, "no such key", did_you_mean(path, [*known, *configs.CHANGEABLE]))
    others = ("strategy", "tracking", "launcher", "task", "trainer.devices", "trainer.num_nodes")
    may = ", ".join((*configs.CHANGEABLE, *others))
    remedy = f"a resume may change {may}; else start a new run"
    return Problem(path, "would make it another run", remedy)
