"""`python -m distdl resume RUN [overrides]`: go on with a run where it was."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from distdl import compose, environment, external, jobs, launch, planning
from distdl import config as configs
from distdl.errors import Problem, UserError
from distdl.run_directory import RunDirectory, shown
from distdl.suggest import did_you_mean


def main(argv: Sequence[str]) -> int:
    """Starts the next attempt of a run.

    Where it runs may change (`launcher=`, `trainer.devices=`, `trainer.num_nodes=`, `task=`), and
    of the recipe `strategy=`, `data.batch_size`, accumulation, the length and the form of the
    checkpoints; anything else is another run.

    Raises:
        UserError: RUN is no run, or an override changes what a run is.
    """
    parser = argparse.ArgumentParser("python -m distdl resume", description=__doc__)
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run directory")
    parser.add_argument("overrides", nargs="*", help="e.g. trainer.max_epochs=20 trainer.devices=2")
    options = parser.parse_args(argv)
    if options.run is None or ("=" in options.run and not Path(options.run).exists()):
        newest = next(iter(jobs.runs_below(Path(compose.compose([]).output_dir))), None)
        remedy = "python -m distdl jobs list shows them"
        if newest is not None:
            remedy += f"; the newest: python -m distdl resume {shown(newest.path)}"
        raise UserError(Problem("RUN", "which run is to go on?", remedy))
    run = RunDirectory.open(options.run)
    if environment.detect() is not None:  # torchrun -m distdl resume RUN
        return external.main(lambda here: plan(run, options.overrides, here))
    planned = plan(run, options.overrides)
    if planned.config.dry_run:
        print(launch.render(planned))
        return 0
    return launch.start(planned, sys.argv)


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
    before = last.launch() if last else begun_anew(run, recipe)
    run_id = before["run_id"]
    # Where it lies is where it was found, whatever folder it was first written to.
    folder = str(run.path.parents[run_id.count("/")])
    mine = {"root": None, "allow": list(jobs.own_trust().allow)}
    here: dict[str, Any] = {"output_dir": folder, "dry_run": False, "follow": True, "project": mine}
    here["checkpoint"] = {"trust_pickle": False}  # what a run's own files say is no consent
    # A key that a run from before it existed lacks.
    later = {"project": {"max_snapshot_mb": 300}}
    where = OmegaConf.merge(later, before["where"], here)
    assert isinstance(where, DictConfig)
    # A validation in between was an errand: the run is what it was started as.
    if last:
        where.task = run.attempts()[0].launch()["where"]["task"]
    earlier: dict[str, Any] = dict(before.get("changes") or {})
    changes = dict(earlier)
    problems: list[Problem] = []
    given: list[str] = []
    with compose.hydra_session():
        parsed = compose.parse_overrides(overrides)
        groups = [o for o in parsed if compose.is_group(o.key_or_group)]
    for override in parsed:
        path, value = override.key_or_group, override.value()
        given.append(path)
        if override.is_delete() or override.is_sweep_override():
            problems.append(Problem(path, "a resume sets values, it deletes and sweeps none"))
        elif override in groups:
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
    if started is not None:
        asked = where.trainer.devices if "trainer.devices" in given else None
        external.place(where, started, asked)
    elif where.launcher["_target_"] == external.TARGET:  # nobody has started ranks this time
        where.launcher = compose.compose([]).launcher
    config = configs.merge(recipe, where, changes)
    so_far = configs.merge(recipe, where, earlier)
    new = [
        p
        for p in changes
        if p in given and OmegaConf.select(config, p) != OmegaConf.select(so_far, p)
    ]
    # What is as it was is no change, and a finished run that is asked for it has still finished.
    changes = {p: value for p, value in changes.items() if p in new or p in earlier}
    with told_of_code_elsewhere(config, before["where"]):
        size = planning.size_of(config, run)
    refuse_programs(config, given)
    notes: list[str] = []
    typed = {o.key_or_group: str(o.input_line).partition("=")[2] for o in parsed}
    if not last:
        command = run.provenance().get("command") or "unknown"
        started_by = command if isinstance(command, str) else shlex.join(map(str, command))
        notes.append(
            "no attempt is on record: launcher, devices and task are those of a new start, where "
            f"you do not give them; the run was started by: {started_by}"
        )
    notes += [f"{p} is {typed[p]} from this attempt on" for p in new]
    planned = planning.Plan(config, recipe, size, run, run_id, changes, notes)
    planning.refuse_second(planned)
    planning.proceed(planned, given)
    with told_of_code_elsewhere(config, before["where"]):
        planning.check_classes(planned)
    return planned


def begun_anew(run: RunDirectory, recipe: DictConfig) -> dict[str, Any]:
    """What launch.yaml says, for a run whose attempts were put aside, as theirs was damaged."""
    where = OmegaConf.to_container(configs.where_of(compose.compose([])), resolve=False)
    # Below output_dir: <experiment>/<name>, or <experiment>/<sweep>/<member>.
    experiment = recipe.get("experiment_name")
    deep = experiment == run.path.parents[1].name and experiment != run.path.parent.name
    return {"run_id": "/".join(run.path.parts[-3 if deep else -2 :]), "where": where}


@contextmanager
def told_of_code_elsewhere(config: DictConfig, before: dict[str, Any]) -> Iterator[None]:
    """Where the code is that is missing here: as the run's files say, so it is not taken from there
    unasked."""
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
    """A dry run starts no program that the run's files name, and nothing else looks at them first.

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
            raise UserError(Problem(f"launcher.{name}", what, remedy))


def _refused(path: str, known: Sequence[str] = ()) -> Problem:
    may = ", ".join(
        [
            *configs.CHANGEABLE,
            "strategy",
            "tracking",
            "launcher",
            "task",
            "trainer.devices",
            "trainer.num_nodes",
        ]
    )
    if known and path not in known:
        return Problem(path, "no such key", did_you_mean(path, [*known, *configs.CHANGEABLE]))
    return Problem(
        path, "would make it another run", f"a resume may change {may}; else start a new run"
    )
