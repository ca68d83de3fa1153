"""A drill: an undisturbed run, and a copy of it for each fault."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from omegaconf import DictConfig, OmegaConf

from distdl.config import recipe as configs
from distdl.drill import table, trial
from distdl.drill.drilled_run import DrilledRun
from distdl.drill.faults import FAULTS
from distdl.drill.tracking_server import TrackingServer
from distdl.drill.trial import Row
from distdl.job import JobState
from distdl.launch import planning, start
from distdl.runs.directory import shown
from distdl.util.errors import UserError

TWIN = "twin"
LIMIT_S, LIMIT_TWINS = 300.0, 10  # how long each part of a trial may take; the second in twins
TIMEOUT_S, TIMEOUT_STEPS = 5.0, 4  # of the watchdog; the second in steps
TWIN_LIMIT_S = 86400.0
MLFLOW = {"_target_": "distdl.tracking.mlflow.MLflowLogger", "interval": 0.5}


def shortened(config: DictConfig, steps: int) -> DictConfig:
    """The config of a run of so many optimizer steps, with checkpoints, that reports to nobody."""
    short = copy.deepcopy(config)
    recorder = {"_target_": "distdl.callbacks.drill_recorder.DrillRecorder"}
    settings = {
        "trainer.max_steps": steps,
        "checkpoint.every_n_steps": max(1, steps // 10),
        "checkpoint.every_minutes": None,
        "callbacks.drill_recorder": recorder | {"step_seconds": trial.STEP_S},
        "tracking": {},
        "launcher.max_attempts": max(1, config.launcher.max_attempts),
        "follow": True,
        "name": None,
    }
    for path, value in settings.items():
        OmegaConf.update(short, path, value, force_add=True, merge=False)
    return short


def refuse(config: DictConfig) -> None:
    """Refuses what cannot be drilled."""
    if config.task.get("_target_") != configs.TRAIN:
        raise UserError.at("task", "only a training can be drilled", "task=train")
    if not start.runs_in_turn(config):
        what = "its hosts cannot be reached from here, to kill processes on them"
        raise UserError.at("launcher", what, "launcher=local, or launcher=mpi")
    if config.dry_run:
        raise UserError.at("dry_run", "a drill trains", "leave it out")


def drill(config: DictConfig, names: Sequence[str], seed: int, steps: int, tolerance: float) -> int:
    """Trains the twin, does each fault, prints the table. Returns 0 if the run survived all."""
    refuse(config)
    short = shortened(config, steps)
    folder = f"drill-{time.strftime('%Y-%m-%d_%H-%M-%S')}"
    planned = planning.plan(short, name=f"{folder}/{TWIN}")
    planning.check_classes(planned, apart=True)
    print(f"{TWIN}: {steps} steps without a fault", flush=True)
    began, twin = time.monotonic(), DrilledRun(planned)
    try:
        twin.wait(lambda: False, TWIN_LIMIT_S)
    finally:
        twin.stop()
    seconds, batches = time.monotonic() - began, twin.step()
    last = twin.run.last_attempt()
    if not last or last.state() is not JobState.SUCCEEDED or not batches:
        print(f"the run fails without a fault; see {shown(twin.log)}")
        return 1
    print(f"  {seconds:.1f} s, {batches} batches", flush=True)
    if short.watchdog.timeout is None:
        short.watchdog.timeout = round(max(TIMEOUT_S, TIMEOUT_STEPS * seconds / batches))
    limit, above = max(LIMIT_S, LIMIT_TWINS * seconds), twin.run.path.parent
    rows: list[Row] = []
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", flush=True)
        row, random = Row(name), Random(f"{seed} {name}")
        rows.append(row)
        row.note = FAULTS[name].lacking(planned)
        if not row.note:
            moment = random.randint(batches // 3, 3 * batches // 4)
            disturb(row, short, twin.run.path, moment, random, limit, tolerance)
        print("  " + "  ".join(filter(None, table.cells(row)[1:])), flush=True)
        table.write(above, rows, run=str(above), seed=seed, steps=steps, twin_seconds=seconds)
    print(f"\n{table.text(rows)}\ntable   {shown(above / 'drill.md')}")
    done = [row for row in rows if row.survived is not None]
    failed = [row.fault for row in done if not row.survived]
    if failed:
        print(f"next    python -m distdl jobs status {shown(above / failed[0])}")
    return 0 if done and not failed else 1


def disturb(
    row: Row,
    short: DictConfig,
    twin: Path,
    moment: int,
    random: Random,
    limit: float,
    tolerance: float,
) -> None:
    """A copy of the twin with a fault, compared with the twin."""
    above, config, server = twin.parent, copy.deepcopy(short), None
    try:
        if row.fault == "tracking_down":
            server = TrackingServer(above / "server")
            config.tracking = {"mlflow": MLFLOW | {"tracking_uri": server.uri}}
        planned = planning.plan(config, name=f"{above.name}/{row.fault}")
        run = DrilledRun(planned, own_network=row.fault == "cut_link", server=server)
        try:
            trial.inject(row, run, FAULTS[row.fault], moment, random, limit)
        finally:
            run.stop()
        trial.compare(row, run, twin, tolerance)
        if row.survived:  # its checkpoints may be large
            with suppress(OSError):
                shutil.rmtree(run.run.checkpoints)
    finally:
        if server:
            server.stop()
