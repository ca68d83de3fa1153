"""The launcher: a script rendered from its settings, submitted by sbatch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError
from distdl.job import JobSpec
from distdl.launchers.slurm import controller, script, settings
from distdl.launchers.slurm.job import SlurmJob

SCHEME = "slurm://"


@dataclass(frozen=True)
class SlurmRequest:
    """What sbatch gets.

    Args:
        specs: The run; or the members of a sweep, each a task of one array.
        text: The script.
        poll_seconds: Between two looks at the job.
        array: Whether the specs are the tasks of an array.
    """

    specs: Sequence[JobSpec]
    text: str
    poll_seconds: float
    array: bool = False

    @property
    def path(self) -> Path:
        """Where the script is kept: in the attempt, the first one's for an array."""
        return self.specs[0].folder / "job.sh"

    def render(self) -> str:
        return f"# sbatch {self.path}\n{self.text}"


@dataclass(frozen=True)
class SlurmLauncher:
    """Submits a run as a batch job, and a sweep as a job array.

    Args:
        walltime: Time limit, as `distdl.walltime` says what it means; None is the
            partition's own.
        partition, account, qos, constraint: As sbatch takes them; None leaves them to the cluster.
        mem: Memory per node, `64G`; "0" is all of it.
        cpus_per_task: Cores per rank; None asks for none, and does not bind the ranks to cores.
        gpus: How GPUs are asked for: `gpus-per-node`, `gres`, or `none` where nodes come whole.
        gpu_type: `a100`, for clusters that have several.
        modules: What `module load` loads.
        python: The interpreter on the nodes; None is the one that submits, or a container's python.
        container: An image that the ranks run in.
        container_runtime: `pyxis` (srun --container-image) or `apptainer`.
        container_mounts: Further folders to be seen in it, `/data` or `/here:/there`. The runs'
            own folder and absolute paths of `inputs` always are.
        env: Further variables of the ranks, none of them secret.
        sbatch: Further options of sbatch, each a `#SBATCH` line: `--exclusive`.
        before_srun: Shell lines before srun.
        srun_args: Further options of srun.
        requeue: Whether a preempted job, or one whose node failed, goes back to the queue.
        requeue_at_time_limit: Whether one that runs out of time does, too.
        grace_seconds: So long before the time limit the ranks are told to write a checkpoint.
        max_parallel: How many members of a sweep may run at a time; None is no limit of ours.
        poll_seconds: Between two questions to the controller while a job is watched.
        forward_env: Names of variables whose values the ranks get.
        inputs: Where data sets lie that a recipe names as `${input:NAME}`.
    """

    walltime: str | float | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mem: str | None = None
    cpus_per_task: int | None = None
    gpus: str = "gpus-per-node"
    gpu_type: str | None = None
    modules: list[str] = field(default_factory=list)
    python: str | None = None
    container: str | None = None
    container_runtime: str = "pyxis"
    container_mounts: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    sbatch: list[str] = field(default_factory=list)
    before_srun: list[str] = field(default_factory=list)
    srun_args: list[str] = field(default_factory=list)
    requeue: bool = True
    requeue_at_time_limit: bool = False
    grace_seconds: int = 120
    max_parallel: int | None = None
    poll_seconds: float = 5
    forward_env: list[str] = field(default_factory=list)
    inputs: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def check(node: Mapping[str, Any], context: Mapping[str, Any]) -> Iterator[Problem]:
        """What is wrong with the settings, with paths relative to `launcher`."""
        return settings.problems(node)

    def request(self, spec: JobSpec) -> SlurmRequest:
        return self._request([spec], array=False)

    def request_sweep(self, specs: Sequence[JobSpec]) -> SlurmRequest | None:
        """One array for all members, if they are of one size and get the same variables."""
        if len({(spec.resources, tuple(spec.forward_env)) for spec in specs}) != 1:
            return None
        return self._request(specs, array=True)

    def _request(self, specs: Sequence[JobSpec], array: bool) -> SlurmRequest:
        wrong = settings.problems(asdict(self))
        told = [Problem(f"launcher.{p.path}", p.what, p.remedy) for p in wrong]
        if told:
            raise UserError(*told)
        for spec in specs:
            spec.refuse(r"\"\\", "sbatch takes it for a quotation or an escape")
            spec.refuse(":", "PYTHONPATH is split there")
            if self.container:
                spec.refuse(",", "the list of a container's folders is split there")
        return SlurmRequest(specs, script.render(self, specs, array), self.poll_seconds, array)

    def reach(self, request: SlurmRequest) -> None:
        controller.reach()

    def submit(self, request: SlurmRequest) -> SlurmJob | list[SlurmJob]:
        """Writes the script into the attempt and submits it.

        Returns:
            The job, or those of an array's tasks, one for each spec.

        Raises:
            UserError: There is no Slurm here, or it refuses the job.
        """
        logs = [spec.folder / "logs" for spec in request.specs]
        for folder in logs:
            folder.mkdir(parents=True, exist_ok=True)
        if request.array:
            script.link_logs(request.specs)
        request.path.write_text(request.text, encoding="utf-8")
        number = controller.submit(request.path, request.specs[0].forward_env, vars(self))
        if not request.array:
            log = logs[0] / f"slurm-{number}.log"
            return SlurmJob(number, request.poll_seconds, log)
        return [
            SlurmJob(f"{number}_{i}", request.poll_seconds, folder / f"slurm-{number}_{i}.log")
            for i, folder in enumerate(logs)
        ]

    def attach(self, handle: str) -> SlurmJob:
        number = handle.removeprefix(SCHEME)
        if not handle.startswith(SCHEME) or not re.fullmatch(r"\d+(_\d+)?", number):
            raise UserError(
                Problem(handle, "is no job of Slurm's", "such as slurm://123 or slurm://123_0")
            )
        return SlurmJob(number, self.poll_seconds)
