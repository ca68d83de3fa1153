"""Ranks that were started from outside (`torchrun -m distdl ...`): nothing is left to launch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import NoReturn

from distdl.job import JobSpec


@dataclass(frozen=True)
class ExternalRequest:
    spec: JobSpec

    def render(self) -> str:
        count = self.spec.resources.world_size
        command = shlex.join(["python", *self.spec.worker()])
        return f"# the {count} processes that are running already, each:\n{command}"


class ExternalLauncher:
    """Describes a job whose processes already run; `distdl.launch.external` runs their work."""

    def request(self, spec: JobSpec) -> ExternalRequest:
        return ExternalRequest(spec)

    def submit(self, request: ExternalRequest) -> NoReturn:
        raise RuntimeError("the ranks of an external job were started before distdl was")

    def attach(self, handle: str) -> NoReturn:
        raise ValueError(f"{handle}: whoever started an external job can look after it")
