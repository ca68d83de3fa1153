"""What is sent to Azure ML, as YAML that `az ml` and `azure.ai.ml.load_*` read.

A job is written down here and read back by the SDK at submission: what `dry_run` prints is what is
sent. Schemas: https://learn.microsoft.com/azure/machine-learning/reference-yaml-job-command
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distdl import walltime
from distdl.job import JobSpec
from distdl.job import variables as as_variables
from distdl.launchers.azureml.needs import SCHEMAS, SPOT, environment_name, tidy, to_yaml

ENTRY = "python -m distdl.launchers.azureml.entry"
# Variables that are no DATASET_MOUNT_<KEY>.
OTHER_MOUNT_VARIABLES = {
    "reserved_free_disk_space": "DATASET_RESERVED_FREE_DISK_SPACE",
    "unmount_timeout_seconds": "DATASET_UNMOUNT_TIMEOUT_SECONDS",
}
MEMBERS = "members"  # of a sweep: the folder of the snapshot that holds each one's frozen files

Node = Mapping[str, Any]


@dataclass(frozen=True)
class AzureMLRequest:
    """One job, and what must be there before it.

    Args:
        specs: The attempt; several are the members of one sweep job.
        job: The job, as in az ml's YAML. Its `code` is the bundle, or for a sweep a place that
            `submit` fills.
        environment: The environment to register, None where the job names one that exists.
        compute: The cluster to create if it is absent, None for serverless.
        may_create: Whether it may be created.
        secrets: Variable -> the name of its secret in the Key Vault.
        advice: Quota, prices and advice, as text.
    """

    specs: tuple[JobSpec, ...]
    job: dict[str, Any]
    environment: dict[str, Any] | None
    compute: dict[str, Any] | None
    may_create: bool
    secrets: dict[str, str]
    advice: str

    def render(self) -> str:
        """YAML documents with comments: each could be given to `az ml ... create --file`."""
        made = "Its name is given at submission"
        if self.job["type"] == "sweep":
            made += f", and its code: the code once, and in {MEMBERS}/ each run's frozen files"
        parts = [f"# The job. {made}.\n{to_yaml(self.job)}"]
        if self.environment is not None:
            text = "registered under this version, and built by Azure, if it is not there yet"
            parts.append(f"# The environment: {text}.\n{to_yaml(self.environment)}")
        if self.compute is not None:
            text = "created if it is not there yet; one that is there is used as it is"
            if not self.may_create:
                text = "must be there (launcher.create_compute=false)"
            parts.append(f"# The cluster: {text}.\n{to_yaml(self.compute)}")
        if self.secrets:
            lines = [f"#   {name}  as secret {secret}" for name, secret in self.secrets.items()]
            where = "go to the Key Vault at submission, and from there to the job"
            parts.append("\n".join([f"# Values of these variables {where}:", *lines]) + "\n")
        parts.append("".join(f"# {line}".rstrip() + "\n" for line in self.advice.splitlines()))
        return "---\n".join(part for part in parts if part)

    def files(self) -> dict[str, str]:
        """Name -> what `az ml environment|compute|job create --file` takes, in this order."""
        documents = {
            "environment": self.environment,
            "compute": self.compute if self.may_create else None,
            "job": self.job,
        }
        return {f"{name}.yml": to_yaml(node) for name, node in documents.items() if node}


def command_job(node: Node, spec: JobSpec) -> dict[str, Any]:
    """The job of one attempt.

    Args:
        node: The launcher's settings.
        spec: The attempt.
    """
    arguments = [".", "${{outputs.store}}", "--attempt", str(spec.attempt), *sources(node, spec)]
    return tidy(
        {
            "$schema": f"{SCHEMAS}/commandJob.schema.json",
            "type": "command",
            **titles(node, spec.name, node["display_name"] or spec.name),
            "command": f"{ENTRY} {shlex.join(arguments)}",
            "code": spec.bundle,
            "environment": environment_name(node),
            "environment_variables": variables(node, spec),
            "inputs": inputs(node),
            "outputs": {"store": output(node, spec.name)},
            **placement(node, spec),
            "services": node["services"],
            "limits": tidy({"timeout": limit(node["walltime"])}),
            "identity": identity(node),
        }
    )


def sweep_job(node: Node, specs: tuple[JobSpec, ...]) -> dict[str, Any]:
    """One sweep job whose only parameter is the name of the member: its trials are the runs.

    The members keep their frozen configs: Azure's page lists them by name with their metrics, and
    what each one is stands in its own run.
    """
    first, settings = specs[0], node["sweep_job"]
    common, member = first.name.rpartition("/")[0], "${{search_space.member}}"
    arguments = [f"{MEMBERS}/{member}", f"${{{{outputs.store}}}}/{member}", *sources(node, first)]
    names = [member_of(spec) for spec in specs]
    trial = {
        "command": f"{ENTRY} {shlex.join(arguments)}",
        "code": MEMBERS,
        "environment": environment_name(node),
        "environment_variables": variables(node, first),
    }
    where = placement(node, first)
    for key in ("distribution", "resources"):
        trial[key] = where.pop(key, None)
    return tidy(
        {
            "$schema": f"{SCHEMAS}/sweepJob.schema.json",
            "type": "sweep",
            **titles(node, common, node["display_name"] or common),
            "trial": tidy(trial),
            "inputs": inputs(node),
            "outputs": {"store": output(node, common)},
            **where,
            "sampling_algorithm": "grid",
            "search_space": {"member": {"type": "choice", "values": names}},
            "objective": {"goal": settings["goal"], "primary_metric": settings["metric"]},
            "limits": tidy(
                {
                    "max_total_trials": len(specs),
                    "max_concurrent_trials": min(len(specs), settings["max_concurrent"]),
                    "trial_timeout": limit(node["walltime"]),
                }
            ),
            "identity": identity(node),
        }
    )


def member_of(spec: JobSpec) -> str:
    """The name of a sweep's member within the sweep."""
    return spec.name.rpartition("/")[2]


def titles(node: Node, run: str, shown: str) -> dict[str, Any]:
    """How people find it. Of an experiment's name Azure takes letters, digits, - and _ only."""
    experiment = node["experiment_name"] or run.partition("/")[0]
    return {
        "display_name": shown,
        "experiment_name": re.sub(r"[^A-Za-z0-9_-]+", "-", experiment),
        "tags": {"distdl.run": run, **{key: str(value) for key, value in node["tags"].items()}},
    }


def sources(node: Node, spec: JobSpec) -> list[str]:
    """Arguments of the entry: where inputs are mounted, and under which names the secrets lie.

    Azure writes an address over `${{...}}` before a shell reads the command: it is quoted by then,
    and `checks` refuses an address with a quote.
    """
    found = [f"--input={name}=${{{{inputs.{name}}}}}" for name in node["inputs"]]
    found += [f"--secret={name}={secret}" for name, secret in secret_names(spec).items()]
    return [*found, "--identity=user"] if node["identity"] == "user" else found


def secret_names(spec: JobSpec) -> dict[str, str]:
    """Variable -> the name of its secret: letters, digits and hyphens, at most 127 of them.

    Of all members of a sweep the names are those of the first.
    Source: https://learn.microsoft.com/azure/key-vault/general/about-keys-secrets-certificates
    """
    run = f"{slug(spec.name)[:60]}-{hashlib.sha256(spec.name.encode()).hexdigest()[:8]}"
    return {name: f"distdl-{run}-{slug(name)[:45]}" for name in spec.forward_env}


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")


def variables(node: Node, spec: JobSpec) -> dict[str, str]:
    """What every rank finds set. None of it is secret."""
    found = {"DISTDL_LAUNCHER": "azureml", "PYTHONPATH": "code", "PYTHONUNBUFFERED": "1"}
    if spec.resources.devices > 1:
        found["OMP_NUM_THREADS"] = "1"  # as under launcher=local: the ranks share the cores
    if node["tier"] in SPOT:
        found["DISTDL_LINGER_SECONDS"] = str(node["linger_seconds"])
    for key, value in tidy(node["mount"]).items():
        name = OTHER_MOUNT_VARIABLES.get(key, f"DATASET_MOUNT_{key.upper()}")
        found[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return as_variables(found, spec.env, node["env"])


def inputs(node: Node) -> dict[str, Any]:
    def one(given: str | Node) -> dict[str, Any]:
        given = {"path": given} if isinstance(given, str) else given
        return {"type": "uri_folder", "mode": "ro_mount", **given}

    return {name: one(given) for name, given in node["inputs"].items()}


def output(node: Node, name: str) -> dict[str, Any]:
    """A path of the run's own: Azure's default one changes with each job, so none could resume."""
    path = f"azureml://datastores/{node['datastore']}/paths/distdl/{name}"
    return {"type": "uri_folder", "path": path, "mode": "rw_mount"}


def placement(node: Node, spec: JobSpec) -> dict[str, Any]:
    size = spec.resources
    serverless = node["compute"] is None
    resources = {
        "instance_count": size.num_nodes,
        "instance_type": node["vm_size"] if serverless else None,
        "shm_size": node["shm_size"],
        "docker_args": node["docker_args"],
    }
    tier = "spot" if node["tier"] in SPOT else "standard"
    return {
        "compute": None if serverless else f"azureml:{node['compute']}",
        "distribution": {"type": node["distribution"], "process_count_per_instance": size.devices},
        "resources": tidy(resources),
        "queue_settings": {"job_tier": tier} if serverless else None,
    }


def identity(node: Node) -> dict[str, str] | None:
    types = {"managed": "managed", "user": "user_identity"}
    return {"type": types[node["identity"]]} if node["identity"] else None


def limit(given: str | float | None) -> int | None:
    """A walltime in seconds; None: no end."""
    return None if given is None else walltime.seconds(given)
