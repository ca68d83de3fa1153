"""What a job needs to find in the workspace: its environment, and perhaps a cluster, as YAML."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distdl.job import unprintable

SCHEMAS = "https://azuremlschemas.azureedge.net/latest"
IMAGE = Path(__file__).parent / "image"
# Azure retired low-priority VMs on 2026-03-31, and gives spot VMs to those who ask for them: by the
# second name, which its API keeps. https://github.com/MicrosoftDocs/azure-ai-docs/pull/806
SPOT = ("spot", "low_priority")

Node = Mapping[str, Any]


def environment_name(node: Node) -> str | dict[str, Any]:
    if node["environment"]:
        return str(node["environment"])
    if node["image"]:
        return {"image": node["image"]}
    return f"azureml:distdl:{version_of(build_context(node))}"


def environment(node: Node) -> dict[str, Any] | None:
    """The environment to register: its version is a hash of what it is built from."""
    if node["environment"] or node["image"]:
        return None
    folder = build_context(node)
    return {
        "$schema": f"{SCHEMAS}/environment.schema.json",
        "name": "distdl",
        "version": version_of(folder),
        "build": {"path": str(folder), "dockerfile_path": "Dockerfile"},
    }


def build_context(node: Node) -> Path:
    return Path(node["build_context"]).expanduser() if node["build_context"] else IMAGE


def version_of(folder: Path) -> str:
    """Changes with any file of a build context, and with nothing else."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = [
        (path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in files
        if "__pycache__" not in path.parts
    ]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:12]


def compute(node: Node, num_nodes: int) -> dict[str, Any] | None:
    """The cluster as it would be created; None for serverless."""
    if node["compute"] is None:
        return None
    network = tidy({"vnet_name": node["vnet"], "subnet": node["subnet"]})
    given = node["compute_identity"]
    if isinstance(given, list):
        who: dict[str, Any] | None = {
            "type": "user_assigned",
            "user_assigned_identities": [{"resource_id": each} for each in given],
        }
    else:
        who = {"type": "system_assigned"} if given == "system" else None
    return tidy(
        {
            "$schema": f"{SCHEMAS}/amlCompute.schema.json",
            "name": node["compute"],
            "type": "amlcompute",
            "size": node["vm_size"],
            "tier": "low_priority" if node["tier"] in SPOT else node["tier"],
            "min_instances": node["min_nodes"],
            "max_instances": node["max_nodes"] or num_nodes,
            "idle_time_before_scale_down": node["idle_seconds"],
            "network_settings": network,
            "enable_node_public_ip": node["public_ip"],
            "ssh_public_access_enabled": False,
            "identity": who,
        }
    )


def plain(value: Any) -> Any:
    """Mappings as dicts: what YAML can write."""
    return {k: plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def to_yaml(value: Node) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """What a line cannot show is escaped: PyYAML writes U+0085 so that it reads a blank."""

    def text(dumper: Dumper, given: str) -> yaml.ScalarNode:
        style = '"' if unprintable(given) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", given, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump(plain(value), Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)


def tidy(node: Node) -> dict[str, Any]:
    """Without what says nothing."""
    return {k: v for k, v in node.items() if v is not None and v != {}}
