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
RESERVED_SRUN = {
    "kill-on-bad-exit": "",
    "multi-prog": "",
    "jobid": "",
    "het-group": "",
    "version": "it would start nothing",
    "help": "it would start nothing",
    "usage": "it would start nothing",
}


def _refuse_reserved(text: str, found: Iterable[Option], reserved: Mapping[str, str]) -> None:
    for option in found:
        if option.name in reserved:
            raise Refused(
                what=f"{text}: --{option.name} is reserved for the launcher",
                remedy=_instead(option.name),
                code="reserved",
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
        raise Refused(
            what=f"{word!r} has a blank, and srun gets it as one word",
            remedy=f"write {joined}",
            code="wrong-kind",
        )
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
    """The time limit: hours (0.5), or in quotes "1:30:00", "2-12" (days-hours); null: the
    partition's own."""

    partition: Word | None = None
    """The partition; null: that of SBATCH_PARTITION, or the cluster's default."""

    account: Word | None = None
    """The account; null: that of SBATCH_ACCOUNT, or the cluster's default."""

    qos: Word | None = None
    """The quality of service; null: that of SBATCH_QOS, or the cluster's default."""

    constraint: Word | None = None
    """Features that the nodes must have; null: those of SBATCH_CONSTRAINT, or none."""

    mem: Memory | None = None
    """Memory per node, such as "64G"; "0" is all of it."""

    cpus_per_task: Positive | None = None
    """Cores per rank, including those of its data loaders; null: none are requested, and ranks are
    not bound."""

    gpus: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    """The option that requests trainer.devices GPUs: gpus-per-node, gres, or none (for exclusive
    nodes)."""

    gpu_type: Annotated[str, matching(r"[\w.-]+", "a GPU type, such as a100")] | None = None
    """The type of GPU, e.g. a100, if a cluster has several."""

    modules: ListOf[Module] = []
    """Modules for `module load` before the ranks start."""

    python: Line | None = None
    """The Python interpreter on the nodes; null: the path of this one; in a container, its own
    `python`."""

    container: Line | None = None
    """A container image: nvcr.io#nvidia/pytorch:25.01-py3 for pyxis, a .sif file for apptainer."""

    container_runtime: Literal["pyxis", "apptainer"] = "pyxis"
    """What runs the container: pyxis or apptainer."""

    container_mounts: ListOf[Mount] = []
    """More folders to mount in the container: /data, /here:/there. Runs and inputs are always
    mounted."""

    env: Values = {}
    """More environment variables of every rank, e.g. {NCCL_DEBUG: INFO}; never a secret."""

    sbatch: ListOf[SbatchOption] = []
    """More options of sbatch, each a #SBATCH line: ["--exclusive", "--mail-type=END"]."""

    before_srun: ListOf[Line] = []
    """Shell lines before srun: ["ulimit -n 65536"]."""

    srun_args: ListOf[SrunOption] = []
    """More options of srun, each one word: ["--label"]."""

    requeue: bool = True
    """Whether a job that is preempted, or whose node fails, is queued again and then resumes."""

    requeue_at_time_limit: bool = False
    """Whether a job at its time limit is queued again as well, until the training has finished."""

    # The upper limit is that of sbatch --signal.
    grace_seconds: Annotated[int, Field(ge=1, le=65535)] = 120
    """Seconds before the time limit at which the ranks write a checkpoint and end."""

    max_parallel: Positive | None = None
    """How many members of a sweep run at a time; null: as many as the cluster allows."""

    poll_seconds: AboveZero = 5
    """Seconds between two queries to the controller while a job is followed."""

    forward_env: ListOf[str] = []
    """Names of environment variables whose values are sent to every rank, through sbatch's
    environment."""

    def misfits(self, context: Mapping[str, Any]) -> Iterator[Problem]:
        if self.walltime is not None and self.walltime <= self.grace_seconds:
            yield Problem(
                "walltime",
                what=(
                    f"{self.walltime} seconds are too short: the signal for a checkpoint comes "
                    f"{self.grace_seconds} seconds before the end"
                ),
                remedy="write more, or a smaller launcher.grace_seconds",
                code="not-enough",
            )
        if self.requeue_at_time_limit and not self.requeue:
            yield Problem(
                "requeue_at_time_limit",
                what="contradicts launcher.requeue=false, which never requeues the job",
                remedy="launcher.requeue=true",
                code="conflict",
            )
        for name in (*self.env, *self.forward_env):
            if option := of_variable(name):
                at = f"env.{name}" if name in self.env else "forward_env"
                yield Problem(
                    at,
                    what=(
                        f"{name} sets --{option} of sbatch or srun, "
                        "which is reserved for the launcher"
                    ),
                    remedy=_instead(option),
                    code="reserved",
                )
        for name, entry in self.inputs.items() if self.container else ():
            path = str(entry.get("path"))
            if path.startswith("/") and re.search(r"[,:\s]", path):
                yield Problem(
                    f"inputs.{name}",
                    what=(
                        f"{path!r} cannot be mounted: lists of folders are split at , : and blanks"
                    ),
                    remedy="rename the folder, or write a link to it",
                    code="unsupported",
                )
