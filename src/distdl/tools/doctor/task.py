"""Examines the ranks that would train, and trains nothing."""

from __future__ import annotations

from distdl.tools.doctor import examination
from distdl.util.ranges import AboveZero
from distdl.worker.task import Metrics, Task, Unbuilt


class Doctor(Task[Unbuilt]):
    """Prints a table of checks and writes ATTEMPT/doctor.json (docs/doctor.md).

    Args:
        expect: GB/s of a link between two hosts (on one host: of two ranks); None: by the VM size,
            where that is known.
    """

    examines = True
    needs_build = False

    def __init__(self, expect: AboveZero | None = None) -> None:
        self.expect = expect

    def run(self, context: Unbuilt) -> Metrics:
        """Returns how many checks pass and warn, as `doctor/...`; raises `Unfit` if one fails."""
        return examination.examine(context.config, context.context, self.expect, alone=True)
