"""The launcher: it renders a script from its settings and submits it with sbatch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from distdl.job import JobSpec, LauncherBase, Resources
from distdl.launchers.common import refuse
from distdl.launchers.slurm import commands, script
from distdl.launchers.slurm.options import SBATCH, SRUN, words
from distdl.launchers.slurm.slurm_job import SlurmJob
from distdl.launchers.slurm.slurm_settings import SlurmSettings
from distdl.util.errors import UserError


@dataclass(frozen=True)
class SlurmRequest:
    """The script for sbatch: of one run, or of a sweep, whose members are the tasks of an array."""

    specs: Sequence[JobSpec]
    text: str
    array: bool = False

    @property
    def path(self) -> Path:
        """The script's path, in the attempt's folder (for an array, the first attempt's)."""
        return self.specs[0].folder / "job.sh"

    def render(self) -> str:
        return f"# sbatch {self.path}\n{self.text}"


class SlurmLauncher(SlurmSettings, LauncherBase[SlurmRequest]):
    """Submits a run as a batch job, and a sweep as a job array."""

    instead: ClassVar = {
        "max_attempts": "Slurm restarts its jobs itself: launcher.requeue=true; "
        "after a failure: distdl jobs resubmit RUN"
    }

    @staticmethod
    def without_mpi(node: Mapping[str, Any]) -> str:
        return ""  # srun starts MPI's ranks, with --mpi of the cluster or of launcher.srun_args

    @staticmethod
    def notes(node: Mapping[str, Any]) -> Iterator[str]:
        if "${" in str([node.get("sbatch"), node.get("srun_args")]):
            return  # what an interpolation gives is checked, but not noted
        of_sbatch = [word for line in node.get("sbatch") or () for word in words(line)]
        of_srun = node.get("srun_args") or ()
        rest = "from a plugin, as it is no option of Slurm 22.05 to 26.05"
        for name in SBATCH.unknown(of_sbatch):
            yield f"launcher.sbatch: sbatch must know {name} {rest}"
        for name in SRUN.unknown(of_srun):
            yield f"launcher.srun_args: srun must know {name} {rest}"

    def without(self, hosts: Sequence[str], resources: Resources) -> Iterator[dict[str, Any]]:
        """Settings that keep a job off some nodes, on as many others as there are; none if the user
        excludes nodes already, or if Slurm knows these by other names."""
        others = resources.num_nodes
        with suppress(commands.Unreachable):
            nodes = commands.nodes(self.partition or os.environ.get("SBATCH_PARTITION"))
            others = min(others, sum(nodes[name] for name in nodes.keys() - {*hosts}))
            hosts = [name for name in hosts if name in nodes]
        typed = (option.name for line in self.sbatch for option in SBATCH.read(words(line)))
        if not hosts or "exclude" in typed:
            return
        exclude = {"launcher.sbatch": [*self.sbatch, f"--exclude={','.join(hosts)}"]}
        for count in range(others, 0, -1):
            yield {**exclude, "trainer.num_nodes": count}

    def request(self, spec: JobSpec) -> SlurmRequest:
        return self._request([spec], array=False)

    def request_sweep(self, specs: Sequence[JobSpec]) -> SlurmRequest | None:
        """One array for all members, if they have the same size and forwarded variables."""
        if len({(spec.resources, tuple(spec.forward_env)) for spec in specs}) != 1:
            return None
        return self._request(specs, array=True)

    def _request(self, specs: Sequence[JobSpec], array: bool) -> SlurmRequest:
        refuse(self.misfits({}))
        for spec in specs:
            spec.refuse(r"\"\\", "sbatch reads it as a quotation mark or an escape")
            spec.refuse(":", "PYTHONPATH is split there")
            if self.container:
                spec.refuse(",", "the list of folders to mount is split there")
        return SlurmRequest(specs, script.render(self, specs, array), array)

    def reach(self, request: SlurmRequest) -> None:
        commands.reach()

    def submit(self, request: SlurmRequest) -> SlurmJob | list[SlurmJob]:
        """Writes the script into the attempt and submits it; an array has a job for each spec."""
        logs = [spec.folder / "logs" for spec in request.specs]
        for folder in logs:
            folder.mkdir(parents=True, exist_ok=True)
        if request.array:
            script.link_logs(request.specs)
        request.path.write_text(request.text, encoding="utf-8")
        number = commands.submit(request.path, request.specs[0].forward_env, self)
        numbers = [f"{number}_{i}" for i in range(len(logs))] if request.array else [number]
        jobs = [
            SlurmJob(each, self.poll_seconds, folder / f"slurm-{each}.log")
            for each, folder in zip(numbers, logs, strict=True)
        ]
        return jobs if request.array else jobs[0]

    def attach(self, handle: str) -> SlurmJob:
        match = re.fullmatch(r"slurm://(\d+(?:_\d+)?)", handle)
        if match:
            return SlurmJob(match[1], self.poll_seconds)
        raise UserError.at(
            handle,
            what="is not a Slurm job",
            remedy="write it as slurm://123 or slurm://123_0",
            code="wrong-kind",
        )
