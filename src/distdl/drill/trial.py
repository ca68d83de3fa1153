"""One fault, done to one run: what it does, and what is left of it in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from distdl.drill import faults, samples, weights
from distdl.drill.drilled_run import DrilledRun
from distdl.drill.faults import Fault
from distdl.health import incident
from distdl.job import JobState
from distdl.runs.directory import shown

STEP_S = 0.05  # the shortest step of a drilled run, so that there is a moment for the fault
SAVED = 2  # checkpoints before the fault


@dataclass
class Row:
    """What a fault did.

    Args:
        hit: What was done, for the screen.
        note: Why it was not done, or why the run did not survive it.
        survived: None: it was not done.
        detected_s, resumed_s: From the fault until the run reported it, and until the first step
            after it.
        named, rightly: The cause that the report names; whether cause and rank are right.
        lost, repeated: Samples in the final state, compared with the twin; None: not recorded.
        difference: The largest one of a weight from the twin's; 0.0: all bits are equal.
    """

    fault: str
    note: str = ""
    survived: bool | None = None
    detected_s: float | None = None
    named: str = ""
    rightly: bool | None = None
    resumed_s: float | None = None
    lost: int | None = None
    repeated: int | None = None
    difference: float | None = None


def inject(
    row: Row, run: DrilledRun, fault: Fault, moment: int, random: Random, limit: float
) -> None:
    """Does the fault after `moment` batches, and follows the run to its end, within `limit` seconds
    for each part of it."""
    due: Callable[[], bool] = lambda: run.step() >= moment and len(run.checkpoints) >= SAVED  # noqa: E731
    if not run.wait(due, limit):
        row.note = "the run ended before the fault"
        return
    time.sleep(random.uniform(0, STEP_S))
    start, hit = time.monotonic(), fault.inject(run, random)
    ranks = f" of rank {', '.join(map(str, sorted(hit)))}" if hit else ""
    print(f"  done after batch {run.step()}{ranks}", flush=True)

    def noticed() -> bool:
        if run.server:
            return run.said(faults.FAILS)
        return JobState(run.first.status().get("state") or JobState.UNKNOWN).ended

    def back() -> bool:
        return run.said(faults.BACK) if run.server else run.step(attempt=2) > 0

    if not run.wait(noticed, limit) and run.process.is_alive():
        row.note = f"not noticed within {limit:.0f} s"
        return
    row.detected_s = time.monotonic() - start
    fault.repair(run)
    resumed = run.wait(back, limit)
    if not resumed and not run.process.is_alive() and not run.server:
        run.start(run.run)
        resumed = run.wait(back, limit)
    row.resumed_s = time.monotonic() - start if resumed else None
    run.wait(lambda: False, limit)
    report = incident.read(run.first)
    state = str(run.first.status().get("state")).lower()
    row.named = report.cause if report else faults.SERVER_GONE if run.server else state
    row.rightly = row.named in fault.causes and (not report or report.rank in hit)


def compare(row: Row, run: DrilledRun, twin: Path, tolerance: float) -> None:
    """Whether the run has come to the same end as the twin."""
    last = run.run.last_attempt()
    state = last.state() if last else JobState.UNKNOWN
    if not row.note and row.resumed_s is None:
        row.note = "it did not resume"
    if not row.note and state is not JobState.SUCCEEDED:
        row.note = f"it is {state.lower()}"
    if not row.note:
        counts = samples.lost_and_repeated(run.run.path, twin)
        row.lost, row.repeated = counts or (None, None)
        row.difference = weights.largest_difference(run.run.path, twin)
        row.survived = not any(counts or ()) and row.difference <= tolerance
    else:
        row.survived = False
    if not row.survived:
        row.note = ": ".join(filter(None, (row.note, f"see {shown(run.log)}")))
