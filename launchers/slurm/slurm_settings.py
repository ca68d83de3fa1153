"""The settings under `launcher.*` with launcher=slurm."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from distdl.launchers.common import (
    AboveZero,
    LauncherSettings,
    ListOf,
    Positive,
    Values,
    Walltime,
    matching,
)
from distdl.launchers.slurm.options import SBATCH, SRUN, Option, of_variable, words
from distdl.util.errors import Problem, Refused

# Options that are the launcher's to write, or that contradict one -> what to write instead.
RESERVED = {
    **{n: f"set launcher.{n}" for n in ("mem", "partition", "account", "qos", "constraint")},
    "cpus-per-task": "set launcher.cpus_per_task",
    "time": "set launcher.walltime",
    "nodes": "set trainer.num_nodes",
    "ntasks-per-node": "set trainer.devices",
    "ntasks": "set trainer.num_nodes and trainer.devices",
    "gpus-per-node": "set launcher.gpus and trainer.devices",
    "gres": "set launcher.gpus and launcher.gpu_type",
    **dict.fromkeys(("requeue", "no-requeue"), "set launcher.requeue"),
    "signal": "set launcher.grace_seconds",
    "array": "set launcher.max_parallel",
    **dict.fromkeys(("export", "export-file"), "set launcher.forward_env or launcher.env"),
    "container-image": "set launcher.container",
    "container-mounts": "set launcher.container_mounts",
    "container-env": "set launcher.forward_env or launcher.env",
    "test-only": "it would start nothing; dry_run=true shows the script",
    **dict.fromkeys(("output", "error", "open-mode", "job-name", "parsable", "wait"), ""),
    "clusters": "",
}
# Those of srun, besides: the launcher writes the first, and with the others no rank starts.
RESERVED_SRUN = {"kill-on-bad-exit": "", "multi-prog": "", "jobid": "", "het-group": ""}
RESERVED_SRUN |= dict.fromkeys(("version", "help", "usage"), "it would start nothing")


def _refuse_reserved(text: str, found: Iterable[Option], reserved: Mapping[str, str]) -> None:
    for option in found:
        if option.name in reserved:
            raise Refused(
                f"{text}: --{option.name} is reserved for the launcher", _instead(option.name)
            )


def _instead(option: str) -> str:
    """What to write instead of a reserved option."""
    return ", and ".join(filter(None, ("leave it out", (RESERVED | RESERVED_SRUN)[option])))


def _of_sbatch(line: str) -> str:
    """Rejects a line of #SBATCH that sets an option of RESERVED, or that sbatch cannot read."""
    _refuse_reserved(line, SBATCH.read(words(line)), RESERVED)
    return line


def _of_srun(word: str) -> str:
    """Rejects the same for srun, which gets each element as one word."""
    if re.match(r"[^=]*\s", word):
        split = word.split(maxsplit=1)
        joined = "=".join(split) if word.startswith("--") else "".join(split)
        raise Refused(f"{word!r} has a blank, and srun gets it as one word", f"write {joined}")
    _refuse_reserved(word, SRUN.read([word]), RESERVED | RESERVED_SRUN)
    return word


_OPTION = r"--?[A-Za-z].*"
_WORD = r"""[^\s"'\\#]+"""  # a word that needs no quotes in a #SBATCH line
_MOUNT = r"/[^\s,:]*(:/[^\s,:]*(:[\w+]+)?)?"
_SBATCH = matching(_OPTION, "an option of sbatch, such as --exclusive")
_SRUN = matching(_OPTION, "an option of srun, such as --label")
_MEMORY = matching(r"\d+[KMGT]?", 'an amount such as "64G", in quotes ("0": all of a node)')
SbatchOption = Annotated[str, _SBATCH, AfterValidator(_of_sbatch)]
SrunOption = Annotated[str, _SRUN, AfterValidator(_of_srun)]
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
        for name in (*self.env, *self.forward_env):
            if option := of_variable(name):
                at = f"env.{name}" if name in self.env else "forward_env"
                what = (
                    f"{name} sets --{option} of sbatch or srun, which is reserved for the launcher"
                )
                yield Problem(at, what, _instead(option))
        for name, entry in self.inputs.items() if self.container else ():
            path = str(entry.get("path"))
            if path.startswith("/") and re.search(r"[,:\s]", path):
                what = f"{path!r} cannot be mounted: lists of folders are split at , : and blanks"
                yield Problem(f"inputs.{name}", what, "rename the folder, or write a link to it")
