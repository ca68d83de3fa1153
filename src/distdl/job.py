"""What a launcher is: values and protocols, standard library only.

A launcher turns a `JobSpec` into a `Request` that can be printed, and a request into a `Job` that
can be watched. Composing, validating and freezing a run happens before; what a worker does, after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, runtime_checkable

# Exit codes of a worker and of the command line. 75 is EX_TEMPFAIL of sysexits.h: "try again".
EXIT_SUCCESS, EXIT_FAILURE, EXIT_REFUSED, EXIT_PREEMPTED, EXIT_CANCELLED = 0, 1, 2, 75, 130


class JobState(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    UNKNOWN = "UNKNOWN"

    @property
    def exit_code(self) -> int:
        """What the command line returns for a job that ended so."""
        return {
            JobState.SUCCEEDED: EXIT_SUCCESS,
            JobState.PREEMPTED: EXIT_PREEMPTED,
            JobState.CANCELLED: EXIT_CANCELLED,
        }.get(self, EXIT_FAILURE)


@dataclass(frozen=True)
class Resources:
    """The size of a run, in processes.

    Args:
        num_nodes: Machines.
        devices: Processes per node, one device each.
        accelerator: "cpu", "gpu" or "mps"; never "auto".
        device_ids: Which devices of this machine, if not simply the first ones.
    """

    num_nodes: int = 1
    devices: int = 1
    accelerator: str = "cpu"
    device_ids: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices


@dataclass(frozen=True)
class JobSpec:
    """One attempt of a run, as a launcher gets it.

    Args:
        name: The run's id, for people and for job names.
        bundle: Where the worker reads config and code (read-only).
        store: Where the worker writes checkpoints, logs and status (durable; a path or a URI).
        command: What each rank runs, without the interpreter: `("-m", "distdl.worker", ...)`.
        env: Variables each rank gets, none of them secret.
        forward_env: Names of variables whose values each rank inherits.
        resources: How many ranks, and on what.
        inputs: Names of data inputs and where they lie.
        outputs: Names of further outputs and where they go.
    """

    name: str
    bundle: str
    store: str
    command: tuple[str, ...]
    resources: Resources
    env: Mapping[str, str] = field(default_factory=dict)
    forward_env: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)


class Request(Protocol):
    def render(self) -> str:
        """The request as text, as `dry_run=true` prints it."""
        ...


@runtime_checkable
class Job(Protocol):
    @property
    def handle(self) -> str:
        """Names the job to a later shell: `slurm://123`."""
        ...

    @property
    def url(self) -> str | None: ...

    def state(self) -> JobState: ...

    def wait(self) -> JobState: ...

    def logs(self, follow: bool = False) -> Iterator[str]: ...

    def cancel(self) -> None: ...


class Launcher(Protocol):
    def request(self, spec: JobSpec) -> Request:
        """Pure and offline: the same spec gives the same request, and nothing is touched."""
        ...

    def submit(self, request: Request) -> Job:
        """The only side effect."""
        ...

    def attach(self, handle: str) -> Job: ...
