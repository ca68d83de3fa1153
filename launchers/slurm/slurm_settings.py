"""The settings under `launcher.*` with launcher=slurm."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from distdl.launchers.common import (
    AboveZero,
    LauncherSettings,
    ListOf,
    Positive,
    Refused,
    Values,
    Walltime,
    matching,
)
from distdl.util.errors import Problem

# sbatch options that the launcher writes itself -> the key that sets them, if there is one.
RESERVED = {
    **{name: f"launcher.{name}" for name in ("mem", "partition", "account", "qos", "constraint")},
    "cpus-per-task": "launcher.cpus_per_task",
    "time": "launcher.walltime",
    "nodes": "trainer.num_nodes",
    "ntasks-per-node": "trainer.devices",
    "ntasks": "trainer.num_nodes and trainer.devices",
    "gpus-per-node": "launcher.gpus and trainer.devices",
    "gres": "launcher.gpus and launcher.gpu_type",
    **dict.fromkeys(("requeue", "no-requeue"), "launcher.requeue"),
    "signal": "launcher.grace_seconds",
    "array": "launcher.max_parallel",
    "export": "launcher.forward_env",
    "container-image": "launcher.container",
    **dict.fromkeys(("output", "error", "open-mode", "job-name", "parsable", "wait"), ""),
    "clusters": "",
}
SHORT = {"N": "nodes", "n": "ntasks", "c": "cpus-per-task", "t": "time", "p": "partition"}
SHORT |= {"A": "account", "q": "qos", "C": "constraint", "a": "array", "o": "output", "e": "error"}
SHORT |= {"J": "job-name", "W": "wait", "M": "clusters"}


def _not_reserved(option: str) -> str:
    """Rejects an option of RESERVED."""
    short = re.match(r"-(\w)", option)
    name = re.split("[= ]", option.lstrip("-"))[0]
    name = SHORT.get(short[1], name) if short else name
    if name in RESERVED:
        remedy = f"leave it out, and set {RESERVED[name]}" if RESERVED[name] else "leave it out"
        raise Refused(f"{option} is written by the launcher itself", remedy)
    return option


_OPTION = r"--?[A-Za-z].*"
_WORD = r"""[^\s"'\\#]+"""  # a word that needs no quotes in a #SBATCH line
_MOUNT = r"/[^\s,:]*(:/[^\s,:]*(:[\w+]+)?)?"
_SBATCH = matching(_OPTION, "an option of sbatch, such as --exclusive")
_SRUN = matching(_OPTION, "an option of srun, such as --label")
_MEMORY = matching(r"\d+[KMGT]?", 'an amount such as "64G", in quotes ("0": all of a node)')
SbatchOption = Annotated[str, _SBATCH, AfterValidator(_not_reserved)]
SrunOption = Annotated[str, _SRUN, AfterValidator(_not_reserved)]
Word = Annotated[str, matching(_WORD, "one word without quotes")]
Line = Annotated[str, matching(r".*\S.*", "one line of text")]
Module = Annotated[str, matching(_WORD, "the name of a module")]
Memory = Annotated[str, _MEMORY]
Mount = Annotated[str, matching(_MOUNT, "a folder, as /data or /here:/there or /here:/there:ro")]


class SlurmSettings(LauncherSettings):
    walltime: Walltime | None = None
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    mem: Memory | None = None
    cpus_per_task: Positive | None = None
    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gpu_type: Annotated[str, matching(r"[\w.-]+", "a GPU type, such as a100")] | None = None
    modules: ListOf[Module] = []
    python: Line | None = None
    container: Line | None = None
    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    container_mounts: ListOf[Mount] = []
    env: Values = {}
    sbatch: ListOf[SbatchOption] = []
    before_srun: ListOf[Line] = []
    srun_args: ListOf[SrunOption] = []
    requeue: bool = True
    requeue_at_time_limit: bool = False
    # The upper limit is that of sbatch --signal.
    grace_seconds: Annotated[int, Field(ge=1, le=65535)] = 120
    max_parallel: Positive | None = None
    poll_seconds: AboveZero = 5

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        if self.walltime is not None and self.walltime <= self.grace_seconds:
            what = f"{self.walltime} seconds are too short: the signal for a checkpoint comes "
            what += f"{self.grace_seconds} seconds before the end"
            yield Problem("walltime", what, "write more, or a smaller launcher.grace_seconds")
        if self.requeue_at_time_limit and not self.requeue:
            what = "contradicts launcher.requeue=false, which never requeues the job"
            yield Problem("requeue_at_time_limit", what, "launcher.requeue=true")
        for name, entry in self.inputs.items() if self.container else ():
            path = str(entry.get("path"))
            if path.startswith("/") and re.search(r"[,:\s]", path):
                what = f"{path!r} cannot be mounted: lists of folders are split at , : and blanks"
                yield Problem(f"inputs.{name}", what, "rename the folder, or write a link to it")
