"""The documents for Azure ML, as YAML that `az ml` and `azure.ai.ml.load_*` read.

A submission gives the SDK the same text that a dry run prints.
Schemas: https://learn.microsoft.com/azure/machine-learning/reference-yaml-job-command
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distdl.job import JobSpec, unprintable
from distdl.job import variables as as_variables
from distdl.launchers.azureml.settings import BASE_IMAGE, AzureSettings
from distdl.launchers.common import digest, slug
from distdl.util.names import kept_apart

SCHEMAS = "https://azuremlschemas.azureedge.net/latest"
IMAGE = Path(__file__).parent / "image"
ENTRY = "python -m distdl.launchers.azureml.entry"
# Mount settings whose variable is not named DATASET_MOUNT_<KEY>.
OTHER_MOUNT_VARIABLES = {
    "reserved_free_disk_space": "DATASET_RESERVED_FREE_DISK_SPACE",
    "unmount_timeout_seconds": "DATASET_UNMOUNT_TIMEOUT_SECONDS",
}
MEMBERS = "members"  # a folder in a sweep's snapshot, with the frozen files of each member


@dataclass(frozen=True)
class AzureMLRequest:
    """One job, and the resources that must exist before it."""

    specs: tuple[JobSpec, ...]  # one attempt, or the members of a sweep job
    # As in az ml's YAML. Its `code` is the bundle, or for a sweep a folder that `submit` fills.
    job: dict[str, Any]
    environment: dict[str, Any] | None  # to register; None if the job names one, or an image
    compute: dict[str, Any] | None  # the cluster to create if it is absent; None for serverless
    may_create: bool  # whether the cluster may be created
    secrets: dict[str, str]  # variable -> the name of its secret in the Key Vault
    advice: str  # quota, prices and advice, as text

    def render(self) -> str:
        """YAML documents with comments: `az ml ... create --file` accepts each of them."""
        added = "Its name is added at submission"
        if self.job["type"] == "sweep":
            added += f", and its code: one copy, with each run's frozen files in {MEMBERS}/"
        parts = [f"# The job. {added}.\n{to_yaml(self.job)}"]
        if self.environment is not None:
            text = "if this version does not exist, it is registered, and Azure builds it"
            parts.append(f"# The environment: {text}.\n{to_yaml(self.environment)}")
        if self.compute is not None and self.compute["type"] == "kubernetes":
            name = self.compute["name"]
            parts.append(f"# The Kubernetes cluster {name} must be attached to the workspace.\n")
        elif self.compute is not None:
            text = "created if it does not exist; an existing one is used unchanged"
            if not self.may_create:
                text = "must exist (launcher.create_compute=false)"
            parts.append(f"# The cluster: {text}.\n{to_yaml(self.compute)}")
        if self.secrets:
            lines = [f"#   {name}  as secret {secret}" for name, secret in self.secrets.items()]
            text = "go to the Key Vault at submission, and from there to the job"
            parts.append("\n".join([f"# Values of these variables {text}:", *lines]) + "\n")
        parts.append("".join(f"# {line}".rstrip() + "\n" for line in self.advice.splitlines()))
        return "---\n".join(part for part in parts if part)

    def files(self) -> dict[str, str]:
        """Name -> YAML for `az ml environment|compute|job create --file`, in this order."""
        compute = self.compute if self.may_create else None
        documents = {"environment": self.environment, "compute": compute, "job": self.job}
        return {f"{name}.yml": to_yaml(node) for name, node in documents.items() if node}


def command_job(settings: AzureSettings, spec: JobSpec) -> dict[str, Any]:
    arguments = [".", "${{outputs.store}}", "--attempt", str(spec.attempt)]
    return tidy(
        {
            "$schema": f"{SCHEMAS}/commandJob.schema.json",
            "type": "command",
            **titles(settings, spec.name),
            **process(settings, spec, arguments, spec.bundle),
            **data_and_compute(settings, spec.name),
            "services": {k: v.model_dump(exclude_none=True) for k, v in settings.services.items()},
            "limits": tidy({"timeout": settings.walltime}),
        }
    )


def sweep_job(settings: AzureSettings, specs: tuple[JobSpec, ...]) -> dict[str, Any]:
    """One sweep job whose trials are the runs. Its only parameter is the member's name, because
    each member has a frozen config. Azure's page lists the members by name, with their metrics."""
    first = specs[0]
    sweep = settings.sweep_job
    common = first.name.rpartition("/")[0]
    member = "${{search_space.member}}"
    arguments = [f"{MEMBERS}/{member}", f"${{{{outputs.store}}}}/{member}"]
    names = [member_of(spec) for spec in specs]
    limits = {
        "max_total_trials": len(specs),
        "max_concurrent_trials": min(len(specs), sweep.max_concurrent),
        "trial_timeout": settings.walltime,
    }
    return tidy(
        {
            "$schema": f"{SCHEMAS}/sweepJob.schema.json",
            "type": "sweep",
            **titles(settings, common),
            "trial": process(settings, first, arguments, MEMBERS),
            **data_and_compute(settings, common),
            "sampling_algorithm": "grid",
            "search_space": {"member": {"type": "choice", "values": names}},
            "objective": {"goal": sweep.goal, "primary_metric": sweep.metric},
            "limits": tidy(limits),
        }
    )


def process(
    settings: AzureSettings, spec: JobSpec, arguments: list[str], code: str
) -> dict[str, Any]:
    """Command, code, environment, variables and nodes of a job or of a sweep's trials."""
    resources = {
        "instance_count": spec.resources.num_nodes,
        "instance_type": settings.instance_type if settings.compute else settings.vm_size,
        "shm_size": settings.shm_size,
        "docker_args": settings.docker_args,
    }
    devices = spec.resources.devices
    new = environment(settings)
    name = f"azureml:{new['name']}:{new['version']}" if new else settings.environment
    return {
        "command": f"{ENTRY} {shlex.join([*arguments, *entry_arguments(settings, spec)])}",
        "code": code,
        "environment": name or {"image": settings.image},
        "environment_variables": variables(settings, spec),
        "distribution": {"type": settings.distribution, "process_count_per_instance": devices},
        "resources": tidy(resources),
    }


def data_and_compute(settings: AzureSettings, run: str) -> dict[str, Any]:
    """Data, store, cluster and identity."""
    identities = {"managed": "managed", "user": "user_identity"}
    tier = "spot" if settings.spot else "standard"
    queue = {
        "job_tier": None if settings.compute else tier,  # only for serverless
        "priority": settings.priority,
    }
    outputs = {name: named_output(settings, run, name) for name in settings.outputs}
    return {
        "inputs": {name: data.model_dump() for name, data in settings.inputs.items()},
        "outputs": {"store": output(settings, run), **outputs},
        "compute": settings.compute and f"azureml:{settings.compute}",
        "queue_settings": tidy(queue),
        "identity": settings.identity and {"type": identities[settings.identity]},
    }


def member_of(spec: JobSpec) -> str:
    return spec.name.rpartition("/")[2]


def titles(settings: AzureSettings, run: str) -> dict[str, Any]:
    """Names and tags for people. An experiment's name may have letters, digits, - and _."""
    experiment = settings.experiment_name or run.partition("/")[0]
    return {
        "display_name": settings.display_name or run,
        "description": settings.description,
        "experiment_name": kept_apart(experiment, re.sub(r"[^A-Za-z0-9_-]+", "-", experiment)),
        "tags": {"distdl.run": run, **{key: str(value) for key, value in settings.tags.items()}},
    }


def entry_arguments(settings: AzureSettings, spec: JobSpec) -> list[str]:
    """Arguments of the entry point: the paths of inputs and outputs, and the names of secrets.

    Azure replaces `${{...}}` with an address before a shell reads the command. The address is in
    quotes, so the settings reject an address that contains a quote.
    """
    words = [f"--input={name}=${{{{inputs.{name}}}}}" for name in settings.inputs]
    words += [f"--output={name}=${{{{outputs.{name}}}}}" for name in settings.outputs]
    words += [f"--secret={name}={secret}" for name, secret in secret_names(spec).items()]
    return [*words, "--identity=user"] if settings.identity == "user" else words


def secret_names(spec: JobSpec) -> dict[str, str]:
    """Variable -> the name of its secret: at most 127 letters, digits and hyphens.

    All members of a sweep use the first member's names.
    Source: https://learn.microsoft.com/azure/key-vault/general/about-keys-secrets-certificates
    """
    run = f"{slug(spec.name)[:60]}-{digest(spec.name, 8)}"
    return {name: f"distdl-{run}-{_secret_part(name)}" for name in spec.forward_env}


def _secret_part(variable: str) -> str:
    """At most 45 letters, digits and hyphens, which differ for different variables: a Key Vault
    takes `http-proxy` and `HTTP-PROXY` for one, and `A_B` and `A__B` would both be `A-B`."""
    return slug(kept_apart(variable, slug(variable).replace("-", "_").upper(), 45))


def variables(settings: AzureSettings, spec: JobSpec) -> dict[str, str]:
    """The variables of every rank; none of them is secret."""
    values = {"DISTDL_LAUNCHER": "azureml", "PYTHONPATH": "code", "PYTHONUNBUFFERED": "1"}
    if spec.resources.devices > 1:
        values["OMP_NUM_THREADS"] = "1"  # as with launcher=local, because the ranks share the cores
    if settings.spot:
        values["DISTDL_LINGER_SECONDS"] = str(settings.linger_seconds)
    for key, value in tidy(settings.mount).items():
        name = OTHER_MOUNT_VARIABLES.get(key, f"DATASET_MOUNT_{key.upper()}")
        values[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return as_variables(values, spec.env, settings.env)


def output(settings: AzureSettings, run: str) -> dict[str, Any]:
    """The store, at a path that belongs to the run. Azure's default path changes with each job, so
    no later job could resume from it."""
    path = f"azureml://datastores/{settings.datastore}/paths/distdl/{run}"
    return {"type": "uri_folder", "path": path, "mode": "rw_mount"}


def named_output(settings: AzureSettings, run: str, name: str) -> dict[str, Any]:
    """An output that Azure registers at the end of the job, if it has a name."""
    wanted = settings.outputs[name]
    path = wanted.path or f"{output(settings, run)['path']}/{wanted.folder}"
    return tidy({**wanted.model_dump(exclude={"folder"}), "path": path})


def environment(settings: AzureSettings) -> dict[str, Any] | None:
    """The environment to register; its version is a hash of its build context, or of its conda
    file and image."""
    if settings.conda_file:
        packages = {"image": settings.image or BASE_IMAGE, "conda_file": settings.conda()}
        return {
            "$schema": f"{SCHEMAS}/environment.schema.json",
            "name": "distdl-conda",
            "version": digest(json.dumps(packages), 12),
            **packages,
        }
    if settings.environment or settings.image:
        return None
    folder = Path(settings.build_context or IMAGE).expanduser()
    return {
        "$schema": f"{SCHEMAS}/environment.schema.json",
        "name": "distdl",
        "version": version_of(folder),
        "build": {"path": str(folder), "dockerfile_path": "Dockerfile"},
    }


def version_of(folder: Path) -> str:
    """A hash of the names and contents of all files of a build context."""
    digests = [
        (path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return digest(json.dumps(digests), 12)


def compute(settings: AzureSettings, num_nodes: int) -> dict[str, Any] | None:
    """The cluster as the launcher would create it; None for serverless compute."""
    if settings.compute is None:
        return None
    if settings.on_kubernetes:
        return {"name": settings.compute, "type": "kubernetes"}
    identity: dict[str, Any] = {}
    if isinstance(settings.compute_identity, list):
        ids = [{"resource_id": each} for each in settings.compute_identity]
        identity = {"type": "user_assigned", "user_assigned_identities": ids}
    elif settings.compute_identity == "system":
        identity = {"type": "system_assigned"}
    return tidy(
        {
            "$schema": f"{SCHEMAS}/amlCompute.schema.json",
            "name": settings.compute,
            "type": "amlcompute",
            "size": settings.vm_size,
            "tier": "low_priority" if settings.spot else "dedicated",
            "min_instances": settings.min_nodes,
            "max_instances": settings.max_nodes or num_nodes,
            "idle_time_before_scale_down": settings.idle_seconds,
            "network_settings": tidy({"vnet_name": settings.vnet, "subnet": settings.subnet}),
            "enable_node_public_ip": settings.public_ip,
            "ssh_public_access_enabled": False,
            "identity": identity,
        }
    )


def to_yaml(value: Mapping[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Escapes unprintable characters: PyYAML would write U+0085 so that it reads as a blank."""

    def text(dumper: Dumper, value: str) -> yaml.ScalarNode:
        style = '"' if unprintable(value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)


def tidy(node: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping without keys whose value is None or {}."""
    return {k: v for k, v in node.items() if v is not None and v != {}}
