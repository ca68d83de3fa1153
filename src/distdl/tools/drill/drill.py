"""A drill: an undisturbed run, and a copy of it for each fault."""

from __future__ import annotations

import copy
import functools
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, ClassVar

from omegaconf import DictConfig

from distdl.config import compose, consent, grammar, programs, task_facts
from distdl.incident import incident
from distdl.launch import launch, planning
from distdl.runs.directory import shown
from distdl.tools.drill import table, trial
from distdl.tools.drill.drilled_run import DrilledRun
from distdl.tools.drill.faults import FAULTS
from distdl.tools.drill.subjects import OwnProgram, Subject, Training
from distdl.tools.drill.tracking_server import TrackingServer
from distdl.tools.drill.trial import FaultRow
from distdl.util.answers import Answer
from distdl.util.errors import UserError
from distdl.util.screen import say

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

TWIN = "twin"
STEPS = 40  # of the optimizer
# How long each part of a trial may take: the longer of these two.
LIMIT_S = 300.0
LIMIT_TWINS = 10  # times the time of the undisturbed twin
TWIN_LIMIT_S = 86400.0
TRIES = 3  # of a run that ends before the moment of its fault
MLFLOW = {"_target_": "distdl.tracking.mlflow.MLflowLogger", "interval": 0.5}


def subject_of(config: DictConfig, options: Namespace) -> Subject:
    """What a config runs.

    Raises:
        UserError: An option says something that a program does not have.
    """
    if not programs.is_program(config):
        return Training(STEPS if options.steps is None else options.steps)
    given = {"--steps": options.steps, "--tolerance": options.tolerance or None}
    what = "is for trainings: distdl does not know what a program computes"
    if named := [name for name, value in given.items() if value is not None]:
        raise UserError.at(
            named[0],
            what=what,
            remedy="leave it out; how long the program runs, its own arguments say",
            code="conflict",
        )
    return OwnProgram()


def refuse(config: DictConfig, typed: Sequence[Override]) -> None:
    """Refuses what cannot be drilled, or run."""
    if not task_facts.of(config).trains:
        raise UserError.at(
            "task", what="only a training can be drilled", remedy="task=train", code="unsupported"
        )
    _, _, launcher_class = launch.code_of(config)
    if not launch.runs_in_turn(launcher_class):
        raise UserError.at(
            "launcher",
            what="its hosts cannot be reached from here, to kill processes on them",
            remedy="launcher=local, or launcher=mpi",
            code="unreachable",
        )
    if config.dry_run or sys.platform != "linux":
        raise UserError.at(
            "",
            what="a drill runs what it disturbs, on Linux: there is no dry run of it",
            code="incomplete",
        )
    launch.of(config, typed)  # checks the settings that a copy does not have, too


@dataclass(frozen=True)
class Drilled:
    """What the run survived."""

    SCHEMA: ClassVar[str] = "drill/1"

    folder: str
    """The copies of the run, and the table."""
    rows: Sequence[FaultRow]
    """One for each fault; none if the run fails without a fault."""


def drill(config: DictConfig, options: Namespace) -> Answer:
    """Runs the twin, does each fault, prints the table. The exit code is 0 if the run survived all.

    Args:
        options: `run` (the words of the command line), `faults` (names), `seed`, `steps` (of the
            optimizer; None: 40), and `tolerance` (the largest difference of weights that counts as
            none).
    """
    # Of a run: after its folder.
    typed = compose.typed(config) or grammar.parse_overrides(options.run[1:])
    consent.refuse(config, typed)
    refuse(config, typed)
    subject = subject_of(config, options)
    short = subject.shortened(config)
    consent.remember(short)  # which may lack a folder of the program's
    began = time.monotonic()
    name = f"drill-{time.strftime('%Y-%m-%d_%H-%M-%S')}/{TWIN}"
    planned = planning.plan(short, name, typed)
    planning.check_classes(planned, apart=True)
    length = f"{subject.length()} without a fault".strip()
    say(f"{TWIN}: {length}")
    with closing(DrilledRun(planned, subject, TWIN_LIMIT_S)) as twin:
        twin.wait(lambda: False)
    seconds = time.monotonic() - began
    whole = twin.progress()
    if not twin.succeeded or not whole:
        say(f"the run fails without a fault; see {shown(twin.log)}")
        if report := incident.read(twin.run.last_attempt() or twin.first):
            say(incident.head(report, command=False), to=sys.stderr)
        return Answer(Drilled(shown(twin.run.path.parent), []), 1)
    say(f"  {seconds:.1f} s, {subject.reached(whole)}")
    if short.watchdog.timeout is None:
        short.watchdog.timeout = round(subject.timeout(seconds, whole))
    limit = max(LIMIT_S, LIMIT_TWINS * seconds)
    above = twin.run.path.parent
    rows = [FaultRow(name, _lacking(name, twin)) for name in options.faults]
    for number, row in enumerate(rows, 1):
        say(f"[{number}/{len(rows)}] {row.fault}")
        if not row.note:
            copied = functools.partial(started, short, subject, row.fault, above, limit, typed)
            run, whole = disturbed(row, copied, whole, options.seed)
            trial.compare(row, run, twin, options.tolerance)
            if row.survived:  # its checkpoints may be large
                shutil.rmtree(run.run.checkpoints)
        cells = table.cells(row, subject.columns)
        say("  " + "  ".join(filter(None, cells[1:])))
        facts = {"seed": options.seed} | subject.facts()
        table.write(above, rows[:number], subject.columns, **facts)
    say()
    table.show(rows, subject.columns)
    say(f"\ntable   {shown(above / 'drill.md')}")
    done = [row for row in rows if row.survived is not None]
    if failed := [row.fault for row in done if not row.survived]:
        say(f"next    python -m distdl jobs status {shown(above / failed[0])}")
    return Answer(Drilled(shown(above), rows), 0 if done and not failed else 1)


def disturbed(
    row: FaultRow,
    copied: Callable[[], AbstractContextManager[DrilledRun]],
    whole: float,
    seed: int,
) -> tuple[DrilledRun, float]:
    """Does the fault of a row to a copy of the twin. If the machine has become faster, the copy may
    end before the moment of its fault; another one then gets it earlier.

    Args:
        whole: How far the twin has come, or a copy if one has come less far.

    Returns:
        The disturbed copy, and `whole` as it is known now.
    """
    tries = 0
    while True:
        tries += 1
        random = Random(f"{seed} {row.fault}")
        with copied() as run:
            moment = run.subject.moment(whole, random)
            trial.inject(row, run, moment, random)
        whole = min(whole, run.progress())
        if whole >= moment or tries == TRIES:
            return run, whole
        say(f"  it took only {run.subject.reached(whole)}, so it is started again")
        row.note = ""
        shutil.rmtree(run.run.path)


def _lacking(fault: str, twin: DrilledRun) -> str:
    """Why a fault cannot be done here; "" if it can."""
    return twin.subject.lacking(fault, twin) or FAULTS[fault].lacking(twin.planned)


@contextmanager
def started(
    config: DictConfig,
    subject: Subject,
    fault: str,
    above: Path,
    limit: float,
    typed: Sequence[Override],
) -> Iterator[DrilledRun]:
    """A copy of the twin, as the fault needs it."""
    config = copy.deepcopy(config)
    server = TrackingServer(above / "server") if fault == "tracking_down" else None
    try:
        if server:
            config.tracking = {"mlflow": MLFLOW | {"tracking_uri": server.uri}}
        planned = planning.plan(config, f"{above.name}/{fault}", typed)
        with closing(DrilledRun(planned, subject, limit, fault == "cut_link", server)) as run:
            yield run
    finally:
        if server:
            server.stop()
