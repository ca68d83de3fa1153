"""What the settings of `launcher.*` may be: refused here before anything is submitted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distdl import walltime
from distdl.errors import Problem

MAX_GRACE_SECONDS = 65535  # of sbatch --signal
GPUS = ("gpus-per-node", "gres", "none")
RUNTIMES = ("pyxis", "apptainer")
# Options of sbatch that have a key of their own, or that the launcher itself depends on.
OWNED = {
    "nodes": "trainer.num_nodes",
    "ntasks-per-node": "trainer.devices",
    "ntasks": "trainer.num_nodes and trainer.devices",
    "gpus-per-node": "launcher.gpus and trainer.devices",
    "gres": "launcher.gpus and launcher.gpu_type",
    "cpus-per-task": "launcher.cpus_per_task",
    "mem": "launcher.mem",
    "time": "launcher.walltime",
    "partition": "launcher.partition",
    "account": "launcher.account",
    "qos": "launcher.qos",
    "constraint": "launcher.constraint",
    "requeue": "launcher.requeue",
    "no-requeue": "launcher.requeue",
    "signal": "launcher.grace_seconds",
    "array": "launcher.max_parallel",
    "export": "launcher.forward_env",
    "container-image": "launcher.container",
    "output": "",
    "error": "",
    "open-mode": "",
    "job-name": "",
    "parsable": "",
    "wait": "",
    "clusters": "",
}
SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "p": "partition"}
SHORT |= {"A": "account", "q": "qos", "C": "constraint", "a": "array", "o": "output", "e": "error"}
SHORT |= {"J": "job-name", "W": "wait", "M": "clusters"}


def problems(node: Mapping[str, Any]) -> Iterator[Problem]:
    """Everything that is wrong with a launcher node.

    Args:
        node: The keys of `launcher.*`; keys that are not there have their defaults.
    """
    for key, (right, what) in RULES.items():
        value = node.get(key)
        if value is not None and not right(value):
            yield Problem(key, f"{value!r} is not {what}")
    for key, (right, what) in LISTS.items():
        values = node.get(key) or []
        if not isinstance(values, (list, tuple)):
            yield Problem(key, f"{values!r} is no list", f"launcher.{key}=[{values}]")
            continue
        for value in values:
            if not (one_line(value) and right(value)):
                yield Problem(key, f"{value!r} is not {what}")
        if key in ("sbatch", "srun_args"):
            yield from owned(key, [value for value in values if isinstance(value, str)])
    for name, value in (node.get("inputs") or {}).items():
        path = str(value.get("path", "")) if isinstance(value, Mapping) else str(value)
        if node.get("container") and path.startswith("/") and re.search(r"[,:\s]", path):
            what = f"{path!r} cannot be mounted: lists of folders are split at , and : and blanks"
            yield Problem(f"inputs.{name}", what, "give the folder another name, or a link to it")
    yield from time_problems(node)
    if node.get("requeue_at_time_limit") is True and node.get("requeue") is False:
        what = "requeue=false says that the job never goes back to the queue"
        yield Problem("requeue_at_time_limit", what, "launcher.requeue=true")


def time_problems(node: Mapping[str, Any]) -> Iterator[Problem]:
    value = node.get("walltime")
    if value is None:
        return
    try:
        seconds = walltime.seconds(value)
    except ValueError as error:
        yield Problem("walltime", str(error), walltime.FORMS)
        return
    if isinstance(grace := node.get("grace_seconds"), int) and seconds <= grace:
        what = f"{value} is over before the signal for a checkpoint, {grace} seconds before its end"
        yield Problem("walltime", what, "ask for more, or for a smaller launcher.grace_seconds")


def owned(key: str, options: Sequence[str]) -> Iterator[Problem]:
    """Options that would contradict what the launcher writes itself."""
    for option in options:
        short = re.match(r"-(\w)", option)
        name = option.lstrip("-").partition("=")[0]
        name = SHORT.get(short[1], name) if short else name.split(" ")[0]
        if name in OWNED:
            other = OWNED[name]
            remedy = f"leave it out, and write {other}" if other else "leave it out"
            yield Problem(key, f"{option} is for the launcher to write", remedy)


def one_line(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != "" and value.isprintable()


def word(value: Any) -> bool:
    """What can stand in a #SBATCH line as it is."""
    return one_line(value) and re.search(r"[\s\"'\\#]", value) is None


def whole(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


WORD = (word, "one word without quotes")
SWITCH = (lambda value: isinstance(value, bool), "true or false")
RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("partition", "account", "qos", "constraint"), WORD),
    **dict.fromkeys(("python", "container"), (one_line, "one line of text")),
    **dict.fromkeys(("requeue", "requeue_at_time_limit"), SWITCH),
    **dict.fromkeys(("cpus_per_task", "max_parallel"), (whole, "a whole number from 1")),
    "mem": (matches(r"\d+[KMGT]?"), 'an amount such as "64G", in quotes; "0" is all of a node'),
    "gpus": (GPUS.__contains__, f"one of {', '.join(GPUS)}"),
    "gpu_type": (matches(r"[\w.-]+"), "the name of a GPU type, such as a100"),
    "container_runtime": (RUNTIMES.__contains__, f"one of {', '.join(RUNTIMES)}"),
    "grace_seconds": (
        lambda value: whole(value) and value <= MAX_GRACE_SECONDS,
        f"a whole number of seconds from 1 to {MAX_GRACE_SECONDS}",
    ),
    "poll_seconds": (
        lambda value: isinstance(value, (int, float)) and value > 0,
        "a number of seconds above 0",
    ),
}
LISTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "modules": (word, "the name of a module"),
    "container_mounts": (
        matches(r"/[^\s,:]*(:/[^\s,:]*(:[\w+]+)?)?"),
        "a folder, as /data or /here:/there or /here:/there:ro",
    ),
    "sbatch": (matches(r"--?[A-Za-z].*"), "an option of sbatch, such as --exclusive"),
    "before_srun": (one_line, "one line of shell"),
    "srun_args": (matches(r"--?[A-Za-z].*"), "an option of srun, such as --label"),
}
