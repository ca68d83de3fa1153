"""What a launcher gets: the size of a run and one attempt of it. And the states of a job."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from distdl.util.errors import Problem, UserError
from distdl.util.exit_codes import EXIT_CANCELLED, EXIT_FAILURE, EXIT_PREEMPTED, EXIT_SUCCESS


class JobState(StrEnum):
    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    PREEMPTED = "PREEMPTED"
    PRUNED = "PRUNED"  # by a search, which saw that others are better: no failure
    UNKNOWN = "UNKNOWN"

    @property
    def ended(self) -> bool:
        """Whether this state is final."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)

    @property
    def exit_code(self) -> int:
        """The exit code of the command line for a job with this state (`util/exit_codes.py`)."""
        return {
            JobState.SUCCEEDED: EXIT_SUCCESS,
            JobState.PRUNED: EXIT_SUCCESS,
            JobState.PREEMPTED: EXIT_PREEMPTED,
            JobState.CANCELLED: EXIT_CANCELLED,
        }.get(self, EXIT_FAILURE)


@dataclass(frozen=True)
class Resources:
    """The size of a run, in processes.

    Args:
        num_nodes: The number of machines.
        devices: Processes per node, one device each.
        accelerator: "cpu", "gpu" or "mps"; never "auto".
        device_ids: The chosen GPUs of this machine, named as in $CUDA_VISIBLE_DEVICES ("5" or
            "GPU-8f6e..."); None for the first ones.
    """

    num_nodes: int = 1
    devices: int = 1
    accelerator: str = "cpu"
    device_ids: tuple[str, ...] | None = None

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices


# A variable of the ranks: the address of the store in which a search leaves its verdicts.
VERDICTS = "DISTDL_VERDICTS"
# Names of environment variables that every shell, mpirun, srun, Azure ML and SageMaker accept.
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def variables(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Merges environment variables of ranks, as text; a later source overrides an earlier one.

    Raises:
        UserError: A name or a value is not valid.
    """
    merged = {name: value for source in sources for name, value in source.items()}
    if problems := list(variable_problems({"env": merged})):
        raise UserError(*(replace(p, path=f"launcher.{p.path}") for p in problems))
    return {name: str(value) for name, value in merged.items()}


def variable_problems(node: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of `env` and `forward_env` in any launcher's node, with paths relative to it."""
    remedy = "use letters, digits and _, and do not begin with a digit"
    env = node.get("env") or {}
    if not isinstance(env, Mapping):
        yield Problem(
            "env",
            what=f"{env!r} is not a mapping",
            remedy="launcher.env.NAME=value",
            code="wrong-type",
        )
        env = {}
    for name, value in env.items():
        path = f"env.{name}" if str(name).isprintable() else f"env.{name!r}"
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            yield Problem(
                path,
                what=f"{name!r} is not a valid variable name",
                remedy=remedy,
                code="wrong-type",
            )
        elif not isinstance(value, (str, int, float)) or not is_value(str(value)):
            yield Problem(
                path,
                what=f"{value!r} is not a valid variable value",
                remedy="write text",
                code="wrong-type",
            )
    names = node.get("forward_env") or ()
    if isinstance(names, str) or not hasattr(names, "__iter__"):
        yield Problem(
            "forward_env",
            what=f"{names!r} is not a list",
            remedy=f"launcher.forward_env=[{names}]",
            code="wrong-type",
        )
        return
    for name in names:
        if not isinstance(name, str) or not VARIABLE.fullmatch(name):
            yield Problem(
                "forward_env",
                what=f"{name!r} is not a valid variable name",
                remedy=remedy,
                code="wrong-type",
            )


def is_value(text: str) -> bool:
    """Whether an environment variable can have this value."""
    try:
        return b"\0" not in text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False


def unprintable(text: str) -> str:
    """The first character that a script or log cannot show on one line; "" if there is none."""
    return next((c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), "")


@dataclass(frozen=True)
class JobSpec:
    """One attempt of a run, as a launcher receives it.

    The name and the paths are single lines and the variables have valid names, so all of them can
    be written into scripts and commands.

    Args:
        name: The run's id, for people and for job names: `<experiment>/<name>`.
        bundle: The folder to read: config.yaml, launch.yaml and, for a job on other machines, all
            code (`code/`). It is complete: a copy of it is enough to run.
        store: The run's directory, to which checkpoints, logs and status are written.
        attempt: Its number, from 1.
        resources: The number of ranks and their devices.
        env: Variables that each rank gets, none of them secret.
        forward_env: Names of further variables for each rank, whose values must not be written
            anywhere. When a job is submitted, all of them are set in this process.
        judged: Whether the ranks ask a search after each validation. If the run's folder is not
            the one here, they need the variable VERDICTS: the address to which `leave` of the job
            writes.

    Raises:
        UserError: The name or a path has an unprintable character, or a variable is not valid.
    """

    name: str
    bundle: str
    store: str
    attempt: int
    resources: Resources
    env: Mapping[str, str] = field(default_factory=dict)
    forward_env: tuple[str, ...] = ()
    judged: bool = False

    def __post_init__(self) -> None:
        node = {"env": self.env, "forward_env": self.forward_env}
        problems = [replace(p, path=f"launcher.{p.path}") for p in variable_problems(node)]
        bundle = self.bundle.removeprefix(self.store)
        for key, text in (("name", self.name), ("output_dir", self.store), ("output_dir", bundle)):
            if character := unprintable(text):
                problems.append(
                    Problem(
                        key,
                        what=(
                            f"{text!r} has the character {character!r}, "
                            "which no script or log can show"
                        ),
                        remedy="choose another",
                        code="wrong-kind",
                    )
                )
        if problems:
            raise UserError(*problems)

    def refuse(self, characters: str, why: str) -> None:
        """Refuses characters of a path that have a special meaning for the platform.

        Args:
            characters: The characters, as in the brackets of a regular expression.
            why: What would happen, such as "mpirun splits it there".

        Raises:
            UserError: The run's folder has one of them.
        """
        if match := re.search(f"[{characters}]", str(self.folder)):
            raise UserError.at(
                str(self.folder),
                what=f"has {match[0]!r}: {why}",
                remedy="choose another output_dir, experiment_name or name",
                code="wrong-kind",
            )

    @property
    def folder(self) -> Path:
        """The folder of this attempt's own files: launch.yaml, status.json, logs/."""
        return Path(self.store) / "attempts" / f"{self.attempt:03d}"

    def worker(self, bundle: str | None = None, store: str | None = None) -> tuple[str, ...]:
        """The command of each rank, without the interpreter.

        Args:
            bundle, store: Their paths on the worker's machine, if they differ from those here.
        """
        bundle, store = bundle or self.bundle, store or self.store
        return ("-m", "distdl.worker", bundle, store, "--attempt", str(self.attempt))
