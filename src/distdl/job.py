"""What a launcher is: values and protocols, and what may stand in them; standard library only.

A launcher turns a `JobSpec` into a `Request` that can be printed, and a request into a `Job` that
can be watched. Composing, validating and freezing a run happens before; what a worker does, after.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from distdl.util.errors import Problem, UserError

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


# Of names of environment variables, what every shell, mpirun, srun, Azure ML and SageMaker take.
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def variables(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables of ranks, as text; of two with the same name the later.

    Raises:
        UserError: One has a name that is none, or a value that cannot be one.
    """
    given = {name: value for source in sources for name, value in source.items()}
    if problems := list(variable_problems({"env": given})):
        raise UserError(*(Problem(f"launcher.{p.path}", p.what, p.remedy) for p in problems))
    return {name: str(value) for name, value in given.items()}


def variable_problems(node: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with `env` and `forward_env` of any launcher's node, with relative paths."""
    remedy = "letters, digits and _, and no digit first"
    given = node.get("env") or {}
    if not isinstance(given, Mapping):
        yield Problem("env", f"{given!r} is no mapping", "launcher.env.NAME=value")
        given = {}
    for name, value in given.items():
        path = f"env.{name}" if str(name).isprintable() else f"env.{name!r}"
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            yield Problem(path, f"{name!r} is no name of a variable", remedy)
        elif not isinstance(value, (str, int, float)) or not is_value(str(value)):
            yield Problem(path, f"{value!r} is no value of a variable", "write text")
    names = node.get("forward_env") or ()
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        yield Problem("forward_env", f"{names!r} is no list", f"launcher.forward_env=[{names}]")
        return
    for name in names:
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            yield Problem("forward_env", f"{name!r} is no name of a variable", remedy)


def is_value(text: str) -> bool:
    """Whether a process can have it as the value of a variable."""
    try:
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def unprintable(text: str) -> str:
    """The first character that no script, log or terminal can show on one line; "" if none."""
    return next((c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), "")


@dataclass(frozen=True)
class JobSpec:
    """One attempt of a run, as a launcher gets it. Name and paths are of one line, and variables
    have names that are some: what becomes part of a script or a command is known to be so.

    Args:
        name: The run's id, for people and for job names: `<experiment>/<name>`.
        bundle: A folder to be read: config.yaml, launch.yaml and, for a job that leaves this
            machine, all code (`code/`). It is complete: copied or uploaded, it is the run.
        store: The run's directory, to be written: checkpoints, logs and status.
        attempt: Its number, from 1.
        resources: How many ranks, and on what.
        env: Variables each rank gets, none of them secret.
        forward_env: Names of variables whose values each rank gets, and that appear nowhere. When a
            job is submitted, all of them are set in this process.

    Raises:
        UserError: A name or a path has a line break, or a variable's name is none.
    """

    name: str
    bundle: str
    store: str
    attempt: int
    resources: Resources
    env: Mapping[str, str] = field(default_factory=dict)
    forward_env: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [*variable_problems({"env": self.env, "forward_env": self.forward_env})]
        problems = [Problem(f"launcher.{p.path}", p.what, p.remedy) for p in problems]
        for key, text in (("name", self.name), ("output_dir", self.store)):
            if found := unprintable(text):
                what = f"{text!r} has the character {found!r}, which no script or log can show"
                problems.append(Problem(key, what, "choose another"))
        if problems:
            raise UserError(*problems)

    def refuse(self, characters: str, why: str) -> None:
        """For a place where some characters of a path mean something else.

        Args:
            characters: Which, as they stand in a regular expression's brackets.
            why: What would happen: "mpirun splits it there".

        Raises:
            UserError: The run's folder has one of them.
        """
        if found := re.search(f"[{characters}]", str(self.folder)):
            remedy = "choose another output_dir, experiment_name or name"
            what = f"has {found[0]!r}: {why}"
            raise UserError.at(str(self.folder), what, remedy)

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
    """A job as its platform knows it. What the run itself reports is in the attempt's status.json;
    `distdl.launch.jobs` combines the two. Optional members:

    - `fetch(to)` copies a store that is not on this machine into the folder `to`.
    - `why`: the reason of the last UNKNOWN.
    - `exit_code` of a job that has ended, where one process represents it.
    - `killed`: what ended it from outside, as a sentence; empty if nothing did.
    - `first_end(logs)`, where only the platform saw the ranks end: rank, exit code (-N for signal
      N) and host of the first that failed, or None. `logs` is the attempt's folder of logs.
    - A static `ask(jobs)` asks the platform once about several jobs of the class; the next `state`
      of each is the answer to that.
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
    - static `notes(node)`: yields sentences to read before the job goes: what it could not check.
    - `reach(request)`: asks the place whether it is there and knows us, before the run is laid
      down. Changes nothing there; raises UserError.
    - a setting `files`, and `files()` of its requests (name -> text): a dry run writes these files
      and the bundle into that folder, for the place's own command line.
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
