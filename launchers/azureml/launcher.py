"""`launcher=azureml`: builds the request of a job and submits it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import PrivateAttr

from distdl.job import VERDICTS, JobSpec, LauncherBase
from distdl.launchers.azureml import datastore, submit, vm_sizes
from distdl.launchers.azureml import request as requests
from distdl.launchers.azureml.azure_job import AzureMLJob
from distdl.launchers.azureml.client import Connection, Workspace, parse
from distdl.launchers.azureml.request import AzureMLRequest
from distdl.launchers.azureml.settings import AzureSettings
from distdl.launchers.common import forwarded
from distdl.util.errors import UserError


def vm_of(node: Mapping[str, Any]) -> vm_sizes.VmSize | None:
    """The VM size of a `launcher` node; None if distdl does not know it, or if a Kubernetes cluster
    has nodes of its own."""
    if node.get("compute_type") == "kubernetes":
        return None
    return vm_sizes.find(str(node.get("vm_size")))


class AzureMLLauncher(AzureSettings, LauncherBase[AzureMLRequest]):
    """Sends runs to Azure ML."""

    instead: ClassVar = {
        "max_attempts": "Azure ML restarts its jobs itself: launcher.tier=spot; "
        "after a failure: distdl jobs resubmit RUN"
    }
    _connections: dict[Workspace, Connection] = PrivateAttr(default_factory=dict)

    @staticmethod
    def devices(node: Mapping[str, Any]) -> tuple[int, str] | None:
        """One node's devices: `(GPUs, "gpu")`, or `(1, "cpu")` without GPUs; None if unknown."""
        vm = vm_of(node)
        if vm is None:
            return None
        return (vm.gpus, "gpu") if vm.gpus else (1, "cpu")

    @staticmethod
    def without_mpi(node: Mapping[str, Any]) -> str:
        return "" if node.get("distribution") == "mpi" else "launcher.distribution=mpi"

    @staticmethod
    def keeps_files_elsewhere(node: Mapping[str, Any]) -> bool:
        return True

    @classmethod
    def hides_trials(cls, node: Mapping[str, Any]) -> str:
        """The ranks have no token of the user's for the datastore."""
        return "launcher.identity=managed" if node.get("identity") == "user" else ""

    @staticmethod
    def network_gbps(node: Mapping[str, Any]) -> int | None:
        """Gbit/s of one node's InfiniBand; None: it has none, or the VM size is unknown."""
        vm = vm_of(node)
        return None if vm is None else vm.infiniband_gbps or None

    @staticmethod
    def notes(node: Mapping[str, Any]) -> Iterator[str]:
        """Notes on values that cannot be checked and are sent as they are."""
        note = vm_sizes.unknown_note(str(node.get("vm_size")))
        if note and node.get("compute_type") != "kubernetes":
            yield note

    def request(self, spec: JobSpec) -> AzureMLRequest:
        return self._request((spec,), requests.command_job(self, spec))

    def request_sweep(self, specs: Sequence[JobSpec]) -> AzureMLRequest | None:
        """One sweep job of Azure ML with `sweep=azureml`; else None, for one job per member."""
        if self.sweep != "azureml":
            return None
        return self._request(tuple(specs), requests.sweep_job(self, tuple(specs)))

    def _request(self, specs: tuple[JobSpec, ...], job: dict[str, Any]) -> AzureMLRequest:
        from distdl.launchers.azureml import cost

        size = specs[0].resources
        at_once = job["limits"]["max_concurrent_trials"] if job["type"] == "sweep" else 1
        return AzureMLRequest(
            specs=specs,
            job=job,
            environment=requests.environment(self),
            compute=requests.compute(self, size.num_nodes * at_once),
            may_create=self.create_compute and not self.on_kubernetes,
            secrets=requests.secret_names(specs[0]),
            advice=cost.table(self, size, jobs=len(specs)),
        )

    def reach(self, request: AzureMLRequest) -> None:
        if self.files:
            raise UserError.at(
                "launcher.files",
                what="is only for a dry run, but this command would send the job",
                remedy="add dry_run=true, or leave it out",
                code="unsupported",
            )
        self.connection().check_access()

    def submit(self, request: AzureMLRequest) -> AzureMLJob | list[AzureMLJob]:
        """Submits the job. For a sweep job it returns a list, one job per member."""
        values = forwarded(request.specs[0])
        connection = self.connection()
        job = request.job
        if request.compute is not None:
            submit.ensure_compute(connection, request)
        if request.environment is not None:
            submit.ensure_environment(connection, request.environment)
        if values:
            vault = connection.vault(self.key_vault)
            secrets = {request.secrets[name]: value for name, value in values.items()}
            submit.store_secrets(connection, vault, secrets)
            job = submit.with_variable(job, "DISTDL_KEY_VAULT", vault)
        for spec in request.specs:
            submit.send_checkpoint(connection, requests.output(self, spec.name)["path"], spec)
        if request.specs[0].judged:
            place = datastore.DatastoreFolder(connection, job["outputs"]["store"]["path"])
            job = submit.with_variable(job, VERDICTS, place.url)
        name = submit.new_name(request)
        if job["type"] == "command":
            submit.create_job(connection, job, name)
            return AzureMLJob(connection, name)
        with tempfile.TemporaryDirectory() as folder:
            code = submit.sweep_snapshot(request, Path(folder))
            job = {**job, "trial": {**job["trial"], "code": str(code)}}
            submit.create_job(connection, job, name)
        return [AzureMLJob(connection, name, requests.member_of(spec)) for spec in request.specs]

    def attach(self, handle: str) -> AzureMLJob:
        workspace, job, member = parse(handle)
        return AzureMLJob(self._connection(workspace), job, member)

    def connection(self) -> Connection:
        """The connection to the workspace of the settings."""
        return self._connection(
            Workspace.find(self.subscription, self.resource_group, self.workspace)
        )

    def _connection(self, workspace: Workspace) -> Connection:
        return self._connections.setdefault(workspace, Connection(workspace, self.cloud))
