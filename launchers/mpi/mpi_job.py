"""A background mpirun, which a later shell on the same machine can find."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distdl.job import JobBase, JobState
from distdl.launchers.mpi.supervisor import LOG, RECORD
from distdl.launchers.queried_job import wait_until_ended
from distdl.util.errors import UserError
from distdl.util.processes import is_alive


class MpiJob(JobBase):
    """One attempt whose mpirun has a supervisor. Its state is read from the attempt's folder."""

    ends_with_shell = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def attach(cls, handle: str) -> MpiJob:
        """The job of a handle `mpi://<host>/<attempt folder>`."""
        match = re.fullmatch(r"mpi://([^/]*)(/.+)", handle)
        if match is None:
            raise UserError.at(
                handle,
                what="is not an mpi job",
                remedy="mpi://<host>/<attempt folder>",
                code="wrong-kind",
            )
        job = cls(Path(match[2]))
        host = job.record().get("host")
        if host is None:
            raise UserError.at(
                handle,
                what=f"{job.folder} has no {RECORD} on this machine, so no job was started there",
                remedy=f"if the job is on {match[1]}, run this command there" if match[1] else "",
                code="not-found",
            )
        if host != match[1]:
            raise UserError.at(
                handle,
                what=f"the job of that folder is on {host}",
                remedy=job.handle,
                code="mismatch",
            )
        return job

    @property
    def handle(self) -> str:
        return f"mpi://{self.record().get('host', '')}{self.folder}"

    def record(self) -> dict[str, Any]:
        """The supervisor's record; empty if the file is absent or has other content."""
        try:
            record = json.loads((self.folder / RECORD).read_text())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and isinstance(record.get("host"), str) else {}

    def state(self) -> JobState:
        record = self.record()
        if "exit_code" in record:
            self.exit_code = record["exit_code"]
            self.killed = record.get("killed") or ""
            if record.get("cancelled"):
                return JobState.CANCELLED
            if record.get("preempted"):
                return JobState.PREEMPTED
            return JobState.FAILED if record["exit_code"] else JobState.SUCCEEDED
        if not record or record["host"] != socket.gethostname():
            self.why = f"it is on {record['host']}" if record else "its files are elsewhere"
            return JobState.UNKNOWN
        if "pid" not in record:
            return JobState.PENDING
        if self._is_supervised(record):
            return JobState.RUNNING
        if self.record() != record:  # the supervisor has just recorded mpirun's end
            return self.state()
        self.killed = f"mpirun's supervisor (pid {record['pid']} on {record['host']}) was killed"
        return JobState.FAILED

    def wait(self) -> JobState:
        return wait_until_ended(self, 0.2)

    def logs(self, follow: bool = False) -> Iterator[str]:
        from distdl.util.tail import tail

        yield from tail(self.folder / LOG, lambda: follow and not self.state().ended)

    def cancel(self) -> None:
        """Asks every rank for a checkpoint; ranks that run after `grace_seconds` are ended."""
        self._ask(signal.SIGINT)

    def preempt(self) -> None:
        """The same, for the platform that ends this command, not for the user."""
        self.preempted_here = True
        self._ask(signal.SIGTERM)

    def _ask(self, number: signal.Signals) -> None:
        record = self.record()
        if "exit_code" in record or not record:
            return
        if record["host"] != socket.gethostname():
            raise UserError.at(
                self.handle,
                what=f"mpirun runs on {record['host']}, not on {socket.gethostname()}",
                remedy="cancel the job there",
                code="unsupported",
            )
        if self._is_supervised(record):
            os.kill(record["pid"], number)

    def _is_supervised(self, record: dict[str, Any]) -> bool:
        """Whether the supervisor runs, and not a later process with the same pid."""
        pid = record["pid"]  # 0 and below would address process groups
        return isinstance(pid, int) and pid > 1 and is_alive(pid, record.get("birth"))
