"""What a launcher is: values and protocols, standard library only.

A launcher turns a `JobSpec` into a `Request` that can be printed, and a request into a `Job` that
can be watched. Composing, validating and freezing a run happens before; what a worker does, after.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
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
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)

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
        device_ids: Which GPUs of this machine, if not simply the first ones: by the names that
            $CUDA_VISIBLE_DEVICES has for them, such as "5" or "GPU-8f6e...".
    """

    num_nodes: int = 1
    devices: int = 1
    accelerator: str = "cpu"
    device_ids: tuple[str, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices


@dataclass(frozen=True)
class JobSpec:
    """One attempt of a run, as a launcher gets it.

    Args:
        name: The run's id, for people and for job names: `<experiment>/<name>`.
        bundle: A folder to be read: config.yaml, launch.yaml and, for a job that leaves this
            machine, all code (`code/`). It is complete: copied or uploaded, it is the run.
        store: The run's directory, to be written: checkpoints, logs and status.
        attempt: Its number, from 1.
        resources: How many ranks, and on what.
        env: Variables each rank gets, none of them secret.
        forward_env: Names of variables whose values each rank gets, and that appear nowhere.
    """

    name: str
    bundle: str
    store: str
    attempt: int
    resources: Resources
    env: Mapping[str, str] = field(default_factory=dict)
    forward_env: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where this attempt's own files are: launch.yaml, status.json, logs/."""
        return Path(self.store) / "attempts" / f"{self.attempt:03d}"

    def worker(self, bundle: str | None = None, store: str | None = None) -> tuple[str, ...]:
        """What each rank runs, without the interpreter.

        Args:
            bundle, store: Where these two are for the worker, if that is not where they are here.
        """
        bundle, store = bundle or self.bundle, store or self.store
        return ("-m", "distdl.worker", bundle, store, "--attempt", str(self.attempt))


class Request(Protocol):
    def render(self) -> str:
        """The request as text, as `dry_run=true` prints it."""
        ...


@runtime_checkable
class Job(Protocol):
    """A job as its place knows it. What the run itself says stands in the attempt's status.json;
    `distdl.jobs` puts the two together. A job may also have `fetch(to)`, which copies a store that
    is not on this machine into the folder `to`, and `why`: the reason of its last UNKNOWN.
    """

    @property
    def handle(self) -> str:
        """Names the job to a later shell: `slurm://123`."""
        ...

    @property
    def url(self) -> str | None:
        """Where to watch it in a browser."""
        ...

    def state(self) -> JobState:
        """One look; UNKNOWN where the place has forgotten it or cannot be reached."""
        ...

    def wait(self) -> JobState:
        """Blocks until it has ended."""
        ...

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Lines as they are; with `follow`, until the job has ended."""
        ...

    def cancel(self) -> None:
        """Asks it to end and leaves it time for a checkpoint; may be called again."""
        ...


class Launcher(Protocol):
    """A place where jobs run; its arguments are the keys of `launcher.*`.

    It may say more about itself, all of it optional:

    - `foreground = True`: the job lives and ends in this very process (local).
    - `in_turn = True`: nothing queues jobs there (mpi), so the members of `-m` run one by one.
    - static `check(node, context)`: yields Problems of its settings before anything is started,
      with paths relative to the node (`vm_size`).
    - static `devices(node)`: `(devices per node, accelerator)` of a size it knows, for
      `trainer.devices=auto`.
    - `reach(request)`: asks the place whether it is there and knows us, before the run is laid
      down. Changes nothing there; raises UserError.
    - `request_sweep(specs)`: one request for all members of `-m` (an array), or None to send one
      job each. `submit` then returns a list of jobs, one per spec.
    """

    def request(self, spec: JobSpec) -> Request:
        """Offline and without side effect: the same spec gives the same request.

        Raises:
            UserError: It cannot be sent; nothing has been written yet.
        """
        ...

    def submit(self, request: Request) -> Job:
        """The only side effect.

        Raises:
            UserError: The place refuses it, or is not there.
        """
        ...

    def attach(self, handle: str) -> Job:
        """The job of this handle, from any later shell.

        Raises:
            UserError: It is no handle of this launcher.
        """
        ...
