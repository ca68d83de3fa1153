"""What is sent, as it can be printed: one mpirun and what it starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from distdl.job import JobSpec
from distdl.launchers.mpi import keeper
from distdl.launchers.mpi.flavours import LOCALHOST, Start


@dataclass(frozen=True)
class MpiRequest:
    """One mpirun.

    Args:
        spec: What it is for.
        flavour: One of FLAVOURS.
        start: What mpirun starts, where.
        processes: The command line of each process, in groups that belong together.
        env: Their variables, none of them secret.
        ssh: How the hosts are reached.
        agent: Whether mpirun starts one agent per host, and that the ranks.
        copy_bundle, grace_seconds, python: As the launcher's.
    """

    spec: JobSpec
    flavour: str
    start: Start
    processes: tuple[tuple[str, ...], ...]
    env: Mapping[str, str]
    ssh: str
    agent: bool
    copy_bundle: bool
    grace_seconds: int
    python: str

    @property
    def command(self) -> list[str]:
        groups = [*self.start.command(self.flavour), *self.processes]
        return [word for group in groups for word in group]

    def render(self) -> str:
        spec = self.spec
        lines = [f"# {self.flavour}, in the background; its output: {spec.folder / keeper.LOG}"]
        if self.start.hosts[0].name != LOCALHOST:
            lines.append(f"# hosts are reached by: {self.ssh}")
        if self.copy_bundle:
            lines.append(f"# copied first, to each host that lacks it: {spec.bundle}")
        if spec.forward_env:
            lines.append(f"# with their values of this shell: {', '.join(spec.forward_env)}")
        assigned = [f"{name}={shlex.quote(value)}" for name, value in self.env.items()]
        groups = [*self.start.command(self.flavour), *self.processes]
        return "\n".join([*lines, " \\\n  ".join([*assigned, *map(shlex.join, groups)])])
