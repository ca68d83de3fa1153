"""A drill: an undisturbed run, and a copy of it for each fault."""

from __future__ import annotations

import copy
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from distdl.config import compose, consent, grammar, programs, task_facts
from distdl.incident import incident
from distdl.launch import launch, planning
from distdl.runs.directory import shown
from distdl.tools.drill import table, trial
from distdl.tools.drill.drilled_run import DrilledRun
from distdl.tools.drill.faults import FAULTS
from distdl.tools.drill.tracking_server import TrackingServer
from distdl.tools.drill.trial import FaultRow
from distdl.util.errors import UserError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

TWIN = "twin"
# How long each part of a trial may take: the longer of these two.
LIMIT_S = 300.0
LIMIT_TWINS = 10  # times the time of the undisturbed twin
# The watchdog's timeout in a trial: the longer of these two.
TIMEOUT_S = 5.0
TIMEOUT_STEPS = 4  # times the time of a step
TWIN_LIMIT_S = 86400.0
MLFLOW = {"_target_": "distdl.tracking.mlflow.MLflowLogger", "interval": 0.5}


def shortened(config: DictConfig, steps: int) -> DictConfig:
    """The config of a run of so many optimizer steps, with checkpoints, that reports to nobody."""
    short = copy.deepcopy(config)
    recorder = {"_target_": "distdl.callbacks.RecordSamples", "unknown": True}
    settings = {
        "trainer.max_steps": steps,
        "checkpoint.every_n_steps": max(1, steps // 10),
        "checkpoint.every_minutes": None,
        "callbacks.record_samples": recorder | {"step_seconds": trial.STEP_S},
        "tracking": {},
        "follow": True,
        "name": None,
    }
    if "max_attempts" in config.launcher:  # else its runs are started once
        settings["launcher.max_attempts"] = max(1, config.launcher.max_attempts or 1)
    for path, value in settings.items():
        OmegaConf.update(short, path, value, force_add=True, merge=False)
    return short


def refuse(config: DictConfig, typed: Sequence[Override]) -> None:
    """Refuses what cannot be drilled, or run."""
    programs.refuse(config, "drill")
    if not task_facts.of(config).trains:
        raise UserError.at(
            "task", "only a training can be drilled", "task=train", code="unsupported"
        )
    _, _, launcher_class = launch.code_of(config)
    if not launch.runs_in_turn(launcher_class):
        what = "its hosts cannot be reached from here, to kill processes on them"
        raise UserError.at("launcher", what, "launcher=local, or launcher=mpi", code="unreachable")
    if config.dry_run or sys.platform != "linux":
        what = "a drill trains, on Linux: there is no dry run of it"
        raise UserError.at("", what, code="incomplete")
    launch.of(config, typed)  # checks the settings that `shortened` replaces, too


def drill(config: DictConfig, options: Namespace) -> int:
    """Trains the twin, does each fault, prints the table. Returns 0 if the run survived all.

    Args:
        options: `run` (the words of the command line), `faults` (names), `seed`, `steps` (of the
            optimizer), and `tolerance` (the largest difference of weights that counts as none).
    """
    # Of a run: after its folder.
    typed = compose.typed(config) or grammar.parse_overrides(options.run[1:])
    consent.refuse(config, typed)
    refuse(config, typed)
    short = shortened(config, options.steps)
    began = time.monotonic()
    name = f"drill-{time.strftime('%Y-%m-%d_%H-%M-%S')}/{TWIN}"
    planned = planning.plan(short, name, typed)
    planning.check_classes(planned, apart=True)
    print(f"{TWIN}: {options.steps} steps without a fault", flush=True)
    with closing(DrilledRun(planned, TWIN_LIMIT_S)) as twin:
        twin.wait(lambda: False)
    seconds = time.monotonic() - began
    batches = twin.step()
    if not twin.succeeded or not batches:
        print(f"the run fails without a fault; see {shown(twin.log)}")
        if report := incident.read(twin.run.last_attempt() or twin.first):
            print(incident.head(report, command=False), file=sys.stderr)
        return 1
    print(f"  {seconds:.1f} s, {batches} batches", flush=True)
    if short.watchdog.timeout is None:
        short.watchdog.timeout = round(max(TIMEOUT_S, TIMEOUT_STEPS * seconds / batches))
    limit = max(LIMIT_S, LIMIT_TWINS * seconds)
    above = twin.run.path.parent
    rows = [FaultRow(name, FAULTS[name].lacking(planned)) for name in options.faults]
    for number, row in enumerate(rows, 1):
        print(f"[{number}/{len(rows)}] {row.fault}", flush=True)
        if not row.note:
            random = Random(f"{options.seed} {row.fault}")
            moment = random.randint(batches // 3, 3 * batches // 4)
            with started(copy.deepcopy(short), row.fault, above, limit, typed) as run:
                trial.inject(row, run, moment, random)
            trial.compare(row, run, twin.run.path, options.tolerance)
            if row.survived:  # its checkpoints may be large
                shutil.rmtree(run.run.checkpoints)
        print("  " + "  ".join(filter(None, table.cells(row)[1:])), flush=True)
        table.write(above, rows[:number], seed=options.seed, steps=options.steps)
    print()
    table.show(rows)
    print(f"\ntable   {shown(above / 'drill.md')}")
    done = [row for row in rows if row.survived is not None]
    if failed := [row.fault for row in done if not row.survived]:
        print(f"next    python -m distdl jobs status {shown(above / failed[0])}")
    return 0 if done and not failed else 1


@contextmanager
def started(
    config: DictConfig, fault: str, above: Path, limit: float, typed: Sequence[Override]
) -> Iterator[DrilledRun]:
    """A copy of the twin, as the fault needs it."""
    server = TrackingServer(above / "server") if fault == "tracking_down" else None
    try:
        if server:
            config.tracking = {"mlflow": MLFLOW | {"tracking_uri": server.uri}}
        planned = planning.plan(config, f"{above.name}/{fault}", typed)
        with closing(DrilledRun(planned, limit, fault == "cut_link", server)) as run:
            yield run
    finally:
        if server:
            server.stop()
