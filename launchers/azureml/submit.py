"""The side effects of a submission, one function each: what must be there is made, then the job."""

from __future__ import annotations

import io
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distdl.errors import Problem, UserError
from distdl.job import JobSpec
from distdl.launchers.azureml.client import Connection, brief, quiet, told
from distdl.launchers.azureml.needs import to_yaml
from distdl.launchers.azureml.request import MEMBERS, AzureMLRequest, member_of, slug
from distdl.launchers.azureml.store import Store

# What a cluster was made with, and what the launcher would make it with.
COMPARED = {
    "size": "launcher.vm_size",
    "tier": "launcher.tier",
    "min_instances": "launcher.min_nodes",
    "max_instances": "launcher.max_nodes",
    "idle_time_before_scale_down": "launcher.idle_seconds",
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def ensure_compute(connection: Connection, request: AzureMLRequest) -> None:
    """Creates the cluster if it is absent. One that exists is compared, and never changed.

    Raises:
        UserError: It cannot run this job, or may not be created.
    """
    wanted, num_nodes = request.compute, request.specs[0].resources.num_nodes
    assert wanted is not None
    from azure.ai.ml import load_compute
    from azure.core.exceptions import ResourceNotFoundError

    name = wanted["name"]
    with told("launcher.compute"):
        try:
            found = connection.client.compute.get(name)
        except ResourceNotFoundError:
            found = None
        if found is None and request.may_create:
            created = load_compute(io.StringIO(to_yaml(wanted)))
            connection.client.compute.begin_create_or_update(created).result()
            least, most = wanted["min_instances"], wanted["max_instances"]
            say(f"created the cluster {name}: {least} to {most} x {wanted['size']}")
            return
    if found is None:
        what = f"there is no cluster {name}, and launcher.create_compute=false"
        raise UserError(Problem("launcher.compute", what))
    compare(found, wanted, num_nodes)


def compare(found: Any, wanted: Mapping[str, Any], num_nodes: int) -> None:
    """Says how a cluster differs from what was asked for.

    Raises:
        UserError: The job could never start on it.
    """
    name, problems = wanted["name"], []
    if str(found.type).lower() != "amlcompute":
        what = f"{name} is no AmlCompute cluster but a {found.type}"
        raise UserError(Problem("launcher.compute", what))
    most = found.max_instances
    if most is not None and num_nodes > most:
        what = f"cluster {name} has {most} nodes at most, and the job needs {num_nodes}"
        problems.append(Problem("trainer.num_nodes", what, "enlarge the cluster in the studio"))
    if str(found.size).lower() != str(wanted["size"]).lower():
        what = f"cluster {name} is of {found.size}, not of {wanted['size']}"
        problems.append(Problem("launcher.vm_size", what, f"write launcher.vm_size={found.size}"))
    if problems:
        raise UserError(*problems)
    for key, ours in COMPARED.items():
        is_now = getattr(found, key, None)
        if is_now is not None and same(is_now) != same(wanted[key]):
            shown = int(is_now) if isinstance(is_now, float) else is_now
            say(f"note: cluster {name} stays as it is: {ours} is {shown} there")


def same(value: Any) -> Any:
    """120.0 and 120, LowPriority and low_priority."""
    if isinstance(value, str):
        return value.lower().replace("_", "")
    return int(value)


def ensure_environment(connection: Connection, wanted: Mapping[str, Any]) -> None:
    """Registers an environment unless its very version is there: then nothing is built again."""
    from azure.ai.ml import load_environment
    from azure.core.exceptions import ResourceNotFoundError

    name, version = wanted["name"], wanted["version"]
    with told("launcher.environment"):
        try:
            connection.client.environments.get(name, version)
        except ResourceNotFoundError:
            environment = load_environment(io.StringIO(to_yaml(wanted)))
            with quiet():
                connection.client.environments.create_or_update(environment)
            say(f"registered the environment {name}:{version}; Azure builds its image once")


def keep_secrets(connection: Connection, vault: str, values: Mapping[str, str]) -> None:
    """Puts the values of forwarded variables into a Key Vault; those of an earlier attempt go.

    Raises:
        UserError: The vault refuses.
    """
    with told("launcher.forward_env"):
        from azure.keyvault.secrets import SecretClient

        client = SecretClient(vault, connection.credential)
        for name, value in values.items():
            try:
                client.set_secret(name, value, content_type="distdl: a forwarded variable of a run")
            except ValueError as error:  # what answers there is no Key Vault
                raise UserError(
                    Problem("launcher.key_vault", f"{vault}: {brief(error)}")
                ) from error


def send_checkpoint(connection: Connection, address: str, spec: JobSpec) -> None:
    """A run that began elsewhere takes its newest checkpoint along."""
    if spec.attempt == 1:
        return
    from distdl.checkpoint import CheckpointStore, manifest_of

    newest = CheckpointStore(Path(spec.store) / "checkpoints").newest()
    if newest is None:
        return
    files = {f"checkpoints/{path.name}": path for path in (newest, manifest_of(newest))}
    if Store(connection, address).send(files):
        say(f"sent the checkpoint {newest.name}")


def new_name(request: AzureMLRequest) -> str:
    """Of a job: readable, and never used before, as Azure wants it."""
    run = request.job["tags"]["distdl.run"]
    return f"{slug(run)[:80]}-{request.specs[0].attempt:03d}-{secrets.token_hex(3)}"


def create_job(connection: Connection, job: Mapping[str, Any], name: str) -> None:
    """Uploads the snapshot and creates the job.

    Raises:
        UserError: Azure refuses it.
    """
    with told():
        from azure.ai.ml import load_job

        loaded = load_job(io.StringIO(to_yaml({**job, "name": name})))
        with quiet():
            connection.client.jobs.create_or_update(loaded)


def with_variable(job: Mapping[str, Any], name: str, value: str) -> dict[str, Any]:
    """A copy of a job (or of a sweep's trial) with one more environment variable."""
    if "trial" in job:
        return {**job, "trial": with_variable(job["trial"], name, value)}
    return {**job, "environment_variables": {**job["environment_variables"], name: value}}


def sweep_snapshot(request: AzureMLRequest, folder: Path) -> Path:
    """The snapshot of a sweep: the code once, and the frozen files of each member."""
    shutil.copytree(Path(request.specs[0].bundle) / "code", folder / "code")
    for spec in request.specs:
        member = folder / MEMBERS / member_of(spec)
        leave = shutil.ignore_patterns("code")
        shutil.copytree(spec.bundle, member, ignore=leave)
        (member / "attempt").write_text(f"{spec.attempt}\n")
    return folder
