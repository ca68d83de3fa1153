"""The side effects of a submission: they create what the job needs, then the job."""

from __future__ import annotations

import io
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.job import JobSpec
from distdl.launchers.azureml import datastore
from distdl.launchers.azureml.client import PATIENCE, Connection, azure_errors, brief, quiet
from distdl.launchers.azureml.request import MEMBERS, AzureMLRequest, member_of, to_yaml
from distdl.launchers.common import newest_checkpoint, slug
from distdl.util.errors import Problem, UserError

if TYPE_CHECKING:
    from azure.ai.ml.entities import Compute

# Property of an existing cluster -> the launcher setting that it is compared with.
COMPARED = {
    "tier": "tier",
    "min_instances": "min_nodes",
    "max_instances": "max_nodes",
    "idle_time_before_scale_down": "idle_seconds",
}


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def as_file(document: Mapping[str, Any]) -> io.StringIO:
    return io.StringIO(to_yaml(document))


def ensure_compute(connection: Connection, request: AzureMLRequest) -> None:
    """Creates the cluster if it is absent. An existing cluster is compared, but never changed."""
    wanted = request.compute
    num_nodes = request.specs[0].resources.num_nodes
    assert wanted is not None
    name = wanted["name"]
    with azure_errors("launcher.compute"):
        from azure.ai.ml import load_compute
        from azure.core.exceptions import ResourceNotFoundError

        computes = connection.client.compute
        try:
            return compare(computes.get(name), wanted, num_nodes)
        except ResourceNotFoundError:
            if request.may_create:
                computes.begin_create_or_update(load_compute(as_file(wanted))).result()
                least, most = wanted["min_instances"], wanted["max_instances"]
                return report(f"created the cluster {name}: {least} to {most} x {wanted['size']}")
    if wanted["type"] == "kubernetes":
        raise UserError.at(
            "launcher.compute",
            what=f"no Kubernetes cluster {name} is attached to the workspace",
            remedy="az ml compute attach --type Kubernetes ...",
            code="not-found",
        )
    raise UserError.at(
        "launcher.compute",
        what=f"there is no cluster {name}, and launcher.create_compute=false",
        code="not-found",
    )


def compare(cluster: Compute, wanted: Mapping[str, Any], num_nodes: int) -> None:
    """Prints how a cluster differs from the settings; refuses one on which the job cannot start."""
    name = wanted["name"]
    problems = []
    found = str(cluster.type).lower()
    if found != wanted["type"]:
        kinds = {"amlcompute": "an AmlCompute", "kubernetes": "a Kubernetes"}
        raise UserError.at(
            "launcher.compute",
            what=f"{name} is not {kinds[wanted['type']]} cluster but a {cluster.type}",
            remedy=f"write launcher.compute_type={found}" if found in kinds else "",
            code="wrong-kind",
        )
    if found == "kubernetes":
        return
    most = getattr(cluster, "max_instances", None)
    if most is not None and num_nodes > most:
        problems.append(
            Problem(
                "trainer.num_nodes",
                what=f"cluster {name} has at most {most} nodes, but the job needs {num_nodes}",
                remedy="enlarge the cluster in Studio",
                code="not-enough",
            )
        )
    size = getattr(cluster, "size", None)
    if not same(size, wanted["size"]):
        problems.append(
            Problem(
                "launcher.vm_size",
                what=f"cluster {name} has nodes of size {size}, not {wanted['size']}",
                remedy=f"write launcher.vm_size={size}",
                code="mismatch",
            )
        )
    if problems:
        raise UserError(*problems)
    for key, setting in COMPARED.items():
        value = getattr(cluster, key, None)
        if value is not None and not same(value, wanted[key]):
            shown = int(value) if isinstance(value, float) else value
            report(f"note: cluster {name} stays as it is: launcher.{setting} is {shown} there")


def same(left: object, right: object) -> bool:
    """Equality by which 120.0 equals 120 and LowPriority equals low_priority."""
    if isinstance(left, str) and isinstance(right, str):
        left, right = (text.lower().replace("_", "") for text in (left, right))
    return bool(left == right)


def ensure_environment(connection: Connection, wanted: Mapping[str, Any]) -> None:
    """Registers an environment, unless this version exists already."""
    name, version = wanted["name"], wanted["version"]
    with azure_errors("launcher.environment"):
        from azure.ai.ml import load_environment
        from azure.core.exceptions import ResourceNotFoundError

        try:
            connection.client.environments.get(name, version)
        except ResourceNotFoundError:
            environment = load_environment(as_file(wanted))
            with quiet():
                connection.client.environments.create_or_update(environment)
            report(f"registered the environment {name}:{version}; Azure builds its image once")


def store_secrets(connection: Connection, vault: str, values: Mapping[str, str]) -> None:
    """Writes the forwarded variables' values to a Key Vault; earlier attempts' are replaced."""
    with azure_errors("launcher.forward_env"):
        from azure.keyvault.secrets import SecretClient

        client = SecretClient(vault, connection.credential, **PATIENCE)
        try:
            for name, value in values.items():
                client.set_secret(name, value, content_type="distdl: a forwarded variable of a run")
        except ValueError as error:  # the server at this address is not a Key Vault
            raise UserError.at(
                "launcher.key_vault", what=f"{vault}: {brief(error)}", code="platform-refuses"
            ) from error


def send_checkpoint(connection: Connection, address: str, spec: JobSpec) -> None:
    """Uploads a resumed run's newest local checkpoint: the run may have begun elsewhere."""
    newest = newest_checkpoint(Path(spec.store)) if spec.attempt > 1 else []
    files = {f"checkpoints/{path.name}": path for path in newest}
    if files and datastore.send(connection, address, files):
        report(f"uploaded the checkpoint {newest[0].name}")


def new_name(request: AzureMLRequest) -> str:
    """A readable, unique job name that fits Azure's rules."""
    run = request.job["tags"]["distdl.run"]
    return f"{slug(run)[:80]}-{request.specs[0].attempt:03d}-{secrets.token_hex(3)}"


def create_job(connection: Connection, job: Mapping[str, Any], name: str) -> None:
    with azure_errors():
        from azure.ai.ml import load_job

        loaded = load_job(as_file({**job, "name": name}))
        with quiet():
            connection.client.jobs.create_or_update(loaded)


def with_variable(job: Mapping[str, Any], name: str, value: str) -> dict[str, Any]:
    """A copy of a job with one more environment variable, in a sweep job for its trials."""
    if "trial" in job:
        return {**job, "trial": with_variable(job["trial"], name, value)}
    return {**job, "environment_variables": {**job["environment_variables"], name: value}}


def sweep_snapshot(request: AzureMLRequest, folder: Path) -> Path:
    """Fills the folder of a sweep's snapshot: one copy of the code, each member's frozen files."""
    shutil.copytree(Path(request.specs[0].bundle) / "code", folder / "code")
    for spec in request.specs:
        member = folder / MEMBERS / member_of(spec)
        shutil.copytree(spec.bundle, member, ignore=shutil.ignore_patterns("code"))
        (member / "attempt").write_text(f"{spec.attempt}\n")
    return folder
