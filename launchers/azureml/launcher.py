"""`launcher=azureml`: what is asked for, and how it is sent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError
from distdl.job import JobSpec
from distdl.launchers.azureml import checks, needs, submit
from distdl.launchers.azureml import request as requests
from distdl.launchers.azureml.client import Connection, Workspace, parse
from distdl.launchers.azureml.job import AzureMLJob
from distdl.launchers.azureml.request import AzureMLRequest


class AzureMLLauncher:
    """Sends runs to Azure ML. Each setting is explained where it has its default:
    conf/launcher/azureml.yaml.
    """

    def __init__(
        self,
        *,
        subscription: str | None = None,
        resource_group: str | None = None,
        workspace: str | None = None,
        cloud: str | None = None,
        vm_size: str = "",
        tier: str = "dedicated",
        compute: str | None = None,
        create_compute: bool = True,
        min_nodes: int = 0,
        max_nodes: int | None = None,
        idle_seconds: int = 300,
        vnet: str | None = None,
        subnet: str | None = None,
        public_ip: bool = True,
        compute_identity: str | list[str] = "system",
        walltime: str | float | None = None,
        environment: str | None = None,
        image: str | None = None,
        build_context: str | None = None,
        distribution: str = "pytorch",
        shm_size: str | None = "16g",
        docker_args: str | None = None,
        inputs: Mapping[str, Any] | None = None,
        mount: Mapping[str, Any] | None = None,
        datastore: str = "workspaceblobstore",
        forward_env: Sequence[str] = (),
        key_vault: str | None = None,
        identity: str | None = None,
        env: Mapping[str, Any] | None = None,
        linger_seconds: int = 120,
        sweep: str = "jobs",
        sweep_job: Mapping[str, Any] | None = None,
        files: str | None = None,
        storage_sku: str | None = None,
        registry_sku: str | None = None,
        experiment_name: str | None = None,
        display_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        services: Mapping[str, Any] | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k != "self"}
        for key in ("inputs", "mount", "env", "sweep_job", "tags", "services"):
            given[key] = given[key] or {}
        self.node: dict[str, Any] = given
        self._connections: dict[Workspace, Connection] = {}

    check = staticmethod(checks.check)

    @staticmethod
    def devices(node: Mapping[str, Any]) -> tuple[int, str] | None:
        """What one node of the VM size has: `(GPUs, "gpu")`, or `(1, "cpu")` for one without."""
        from distdl.launchers.azureml import vm_sizes

        vm = vm_sizes.find(str(node.get("vm_size") or ""))
        if vm is None:
            return None
        return (vm.gpus, "gpu") if vm.gpus else (1, "cpu")

    @staticmethod
    def notes(node: Mapping[str, Any]) -> Iterator[str]:
        """What is sent as the user says, and could not be checked."""
        from distdl.launchers.azureml import vm_sizes

        if said := vm_sizes.unknown(str(node.get("vm_size"))):
            yield said

    def request(self, spec: JobSpec) -> AzureMLRequest:
        return self._request((spec,), requests.command_job(self.node, spec))

    def request_sweep(self, specs: Sequence[JobSpec]) -> AzureMLRequest | None:
        """One Azure ML sweep job with `sweep=azureml`; None to send one job each."""
        if self.node["sweep"] != "azureml":
            return None
        members = tuple(specs)
        return self._request(members, requests.sweep_job(self.node, members))

    def _request(self, specs: tuple[JobSpec, ...], job: dict[str, Any]) -> AzureMLRequest:
        from distdl.launchers.azureml import advice

        size = specs[0].resources
        limit = requests.limit(self.node["walltime"])
        node = {**self.node, "sweep": len(specs) > 1}
        at_once = job["limits"]["max_concurrent_trials"] if job["type"] == "sweep" else 1
        return AzureMLRequest(
            specs=specs,
            job=job,
            environment=needs.environment(self.node),
            compute=needs.compute(self.node, size.num_nodes * at_once),
            may_create=bool(self.node["create_compute"]),
            secrets=requests.secret_names(specs[0]),
            advice=advice.table(node, size, limit / 3600 if limit else None, jobs=len(specs)),
        )

    def reach(self, request: AzureMLRequest) -> None:
        if self.node["files"]:
            what = "is for a dry run, and this would send the job"
            raise UserError(Problem("launcher.files", what, "add dry_run=true, or leave it out"))
        self._here().look()

    def submit(self, request: AzureMLRequest) -> Any:
        """Sends it: an `AzureMLJob`, or for a sweep job one per member."""
        values = {secret: os.environ[name] for name, secret in request.secrets.items()}
        connection = self._here()
        if request.compute is not None:
            submit.ensure_compute(connection, request)
        if request.environment is not None:
            submit.ensure_environment(connection, request.environment)
        job = request.job
        if values:
            vault = connection.vault(self.node["key_vault"])
            submit.keep_secrets(connection, vault, values)
            job = submit.with_variable(job, "DISTDL_KEY_VAULT", vault)
        for spec in request.specs:
            address = requests.output(self.node, spec.name)["path"]
            submit.send_checkpoint(connection, address, spec)
        name = submit.new_name(request)
        if job["type"] == "command":
            submit.create_job(connection, job, name)
            return AzureMLJob(connection, name)
        with tempfile.TemporaryDirectory() as folder:
            code = submit.sweep_snapshot(request, Path(folder))
            job = {**job, "trial": {**job["trial"], "code": str(code)}}
            submit.create_job(connection, job, name)
        names = map(requests.member_of, request.specs)
        return [AzureMLJob(connection, name, member) for member in names]

    def attach(self, handle: str) -> AzureMLJob:
        workspace, job, member = parse(handle)
        return AzureMLJob(self._connection(workspace), job, member)

    def _here(self) -> Connection:
        """The workspace that jobs go to."""
        place = (self.node[key] for key in ("subscription", "resource_group", "workspace"))
        return self._connection(Workspace.find(*place))

    def _connection(self, workspace: Workspace) -> Connection:
        made = Connection(workspace, self.node["cloud"])
        return self._connections.setdefault(workspace, made)
