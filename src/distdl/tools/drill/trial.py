"""One fault, done to one run: what it does, and what is left of it in the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

from distdl.incident import incident
from distdl.job import JobState
from distdl.runs.directory import shown
from distdl.tools.drill.drilled_run import DrilledRun
from distdl.tools.drill.faults import BACK, FAILS, FAULTS
from distdl.tools.drill.subjects import STEP_S
from distdl.util.screen import say


@dataclass
class FaultRow:
    """What a fault did.

    Args:
        note: Why it was not done, or why the run did not survive it.
        survived: None: it was not done.
        detected_s, resumed_s: From the fault until the run reported it, and until the first step
            after it.
        named, rightly: The cause that the report names; whether cause and rank are right.
        lost, repeated: Samples in the final state, compared with the twin; None: not recorded.
        difference: The largest one of a weight from the twin's; 0.0: all bits are equal.
        again_s, of_s: For how long a program ran after the fault, and undisturbed.
        files: Of a program: whether its checkpoints' files equal the twin's.
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
    again_s: float | None = None
    of_s: float | None = None
    files: str = ""


def inject(row: FaultRow, run: DrilledRun, moment: float, random: Random) -> None:
    """Does the fault at `moment` of its progress, and follows the run to its end. `row.note` says
    why the run did not come to that."""
    subject = run.subject
    if not run.wait(lambda: run.progress() >= moment and subject.has_saved(run)):
        row.note = "the run ended before the fault"
        return
    time.sleep(random.uniform(0, STEP_S))
    fault = FAULTS[row.fault]
    start = time.monotonic()
    hit = [each.rank for each in fault.inject(run, random)]
    say(f"  done after {subject.reached(run.progress())}" + (f" to {hit}" if hit else ""))

    def noticed() -> bool:
        state = JobState(run.first.status().get("state") or JobState.UNKNOWN)
        return run.has_logged(FAILS) if run.server else state.ended

    def back() -> bool:
        return run.has_logged(BACK) if run.server else run.progress(attempt=2) > 0

    if not run.wait(noticed) and run.process.is_alive():
        row.note = f"not noticed within {run.limit:.0f} s"
        return
    row.detected_s = time.monotonic() - start
    if not run.server and run.first.state() is JobState.SUCCEEDED:
        row.note = "it came to its end all the same, and noticed nothing"
        return
    fault.repair(run)
    resumed = run.wait(back)
    if not (resumed or run.server or run.process.is_alive()):
        run.start(run.run)
        resumed = run.wait(back)
    row.resumed_s = time.monotonic() - start if resumed else None
    run.wait(lambda: False)
    if report := incident.read(run.first):
        row.named = report.cause
    else:
        row.named = "server fails" if run.server else str(run.first.status().get("state")).lower()
    row.rightly = row.named in fault.causes and (not report or report.rank in hit)
    if not resumed or not run.succeeded:
        row.note = "it did not come to its end" if resumed else "it did not resume"
    elif run.server and run.server.lacks(run.run.path):
        row.note = "metrics were not delivered"


def compare(row: FaultRow, run: DrilledRun, twin: DrilledRun, tolerance: float) -> None:
    """Whether the run has come to the same end as the twin."""
    row.survived = not row.note and run.subject.compare(row, run, twin, tolerance)
    if not row.survived:
        row.note = ": ".join(filter(None, (row.note, f"see {shown(run.log)}")))
