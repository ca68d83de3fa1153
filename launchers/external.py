"""Ranks that another tool has started (`torchrun -m distdl ...`), so there is nothing to launch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import NoReturn

from distdl.job import JobSpec, LauncherBase
from distdl.util.errors import UserError


@dataclass(frozen=True)
class ExternalRequest:
    spec: JobSpec

    def render(self) -> str:
        count = self.spec.resources.world_size
        command = shlex.join(["python", *self.spec.worker()])
        return f"# in each of the {count} processes that are running already:\n{command}"


class ExternalLauncher(LauncherBase[ExternalRequest]):
    """Describes a job whose processes already run `distdl.launch.external`."""

    def request(self, spec: JobSpec) -> ExternalRequest:
        return ExternalRequest(spec)

    def submit(self, request: ExternalRequest) -> NoReturn:
        raise RuntimeError("the ranks of an external job were started before distdl was")

    def attach(self, handle: str) -> NoReturn:
        raise UserError.at(
            handle,
            what="an external job is managed by the tool that started it",
            code="unsupported",
        )
