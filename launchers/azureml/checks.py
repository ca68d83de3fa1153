"""What is wrong with the settings of `launcher=azureml`, found without an account.

The SDK's own validation lets an undefined input, a negative number of nodes and most wrong words
pass: they would come back from Azure, some of them after an hour in the queue.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distdl import walltime
from distdl.errors import Problem
from distdl.launchers.azureml.needs import SPOT

CHOICES = {
    "tier": ("dedicated", *SPOT),
    "distribution": ("pytorch", "mpi"),
    "identity": (None, "managed", "user"),
    "sweep": ("jobs", "azureml"),
    "storage_sku": (None, "standard", "premium"),
    "registry_sku": (None, "basic", "standard", "premium"),
}
# https://learn.microsoft.com/azure/machine-learning/how-to-read-write-data-v2#modes
MODES = ("ro_mount", "download", "direct", "eval_mount", "eval_download")
TYPES = ("uri_folder", "uri_file", "mltable")
SERVICES = ("ssh", "tensor_board", "jupyter_lab", "vs_code")
# https://learn.microsoft.com/azure/machine-learning/how-to-read-write-data-v2#available-mount-settings
MOUNT = (
    "attribute_cache_ttl",
    "block_based_cache_enabled",
    "block_file_cache_enabled",
    "block_file_cache_max_queue_size",
    "block_file_cache_write_threads",
    "cache_size",
    "file_cache_prune_target",
    "file_cache_prune_threshold",
    "memory_cache_size",
    "read_block_size",
    "read_buffer_block_count",
    "read_threads",
    "reserved_free_disk_space",
    "unmount_timeout_seconds",
)
# https://learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules
COMPUTE_NAME = re.compile(r"[A-Za-z](?=.{2,31}$)[A-Za-z0-9-]*[A-Za-z0-9]")
REMOTE = re.compile(r"(azureml|wasbs?|abfss?|adl|https?)://|azureml:[^/]")
REFERENCE = re.compile(r"\$\{\{\s*(inputs|outputs)\.(\w+)\s*\}\}")

Node = Mapping[str, Any]


def check(node: Node, context: Mapping[str, Any]) -> Iterator[Problem]:
    """Every problem at once.

    Args:
        node: The settings under `launcher`.
        context: The size of the run: `num_nodes`, `devices` (per node), `accelerator`.
    """
    for key, allowed in CHOICES.items():
        yield from choice(key, node.get(key), allowed)
    yield from size(node, context)
    yield from cluster(node, context)
    yield from environment(node)
    yield from inputs(node)
    yield from references(node)
    yield from services(node)
    yield from files(node)
    yield from words(node)


def choice(key: str, value: Any, allowed: tuple[str | None, ...]) -> Iterator[Problem]:
    if value not in allowed:
        names = ", ".join("null" if name is None else name for name in allowed)
        near = nearest(value, [name for name in allowed if name])
        yield Problem(key, f"{value!r} is not one of {names}", near)


def nearest(word: Any, choices: list[str]) -> str:
    from distdl.suggest import closest

    near = closest(str(word), choices)
    return f"did you mean {near}?" if near else ""


def size(node: Node, context: Mapping[str, Any]) -> Iterator[Problem]:
    """The VM size: known, with as many GPUs as there are processes, and of a kind that works."""
    from distdl.launchers.azureml import vm_sizes

    name = node.get("vm_size")
    vm = vm_sizes.find(str(name)) if name else None
    if vm is None:  # Azure may have it all the same, see AzureMLLauncher.notes
        if not vm_sizes.unknown(str(name)):
            what = f"{name!r} is no name of a VM size" if name else "missing"
            yield Problem("vm_size", what, vm_sizes.suggest(str(name or "")))
        return
    devices = context.get("devices", 1)
    if context.get("accelerator") != "gpu":
        return
    if vm.gpus == 0:
        remedy = "choose a size with GPUs, or write trainer.accelerator=cpu"
        yield Problem("vm_size", f"{vm.name} has no GPU", remedy)
    elif devices > vm.gpus:
        what = f"{devices} processes per node (trainer.devices), and {vm.name} has {vm.gpus} GPU"
        what += "s" if vm.gpus > 1 else ""
        yield Problem("vm_size", what, f"write trainer.devices={vm.gpus}, or choose a larger size")
    ours = not any(node.get(key) for key in ("environment", "image", "build_context"))
    if vm.gpu in vm_sizes.TOO_OLD and ours:
        yield Problem(
            "vm_size",
            f"the torch of distdl's image has no kernels for a {vm.gpu} (CUDA 13 dropped it)",
            "choose a T4, A100 or newer, or a launcher.image or launcher.build_context whose "
            "torch is built for CUDA 12",
        )


def cluster(node: Node, context: Mapping[str, Any]) -> Iterator[Problem]:
    name = node.get("compute")
    if name is not None and not COMPUTE_NAME.fullmatch(str(name)):
        rule = "3 to 32 letters, digits and hyphens, a letter first, no hyphen last"
        yield Problem("compute", f"{name!r} cannot be the name of a cluster", rule)
    for key, least in (("min_nodes", 0), ("max_nodes", 1), ("idle_seconds", 0)):
        value = node.get(key)
        if value is not None and (not isinstance(value, int) or value < least):
            yield Problem(key, f"{value!r} is not a whole number from {least} on")
            return
    nodes = context.get("num_nodes", 1)
    most = node.get("max_nodes")
    if most is not None and nodes > most:
        what = f"trainer.num_nodes={nodes}, and the cluster may have {most}: the job would never"
        yield Problem("max_nodes", f"{what} start", f"write launcher.max_nodes={nodes}")
    if (node.get("min_nodes") or 0) > (most or nodes):
        yield Problem("min_nodes", f"{node['min_nodes']} is more than max_nodes ({most or nodes})")
    subnet = node.get("subnet")
    if node.get("vnet") and not subnet:
        yield Problem("subnet", "missing: launcher.vnet is given", "name a subnet of it")
    if subnet and not node.get("vnet") and not str(subnet).startswith("/subscriptions/"):
        what = "without launcher.vnet it must be the subnet's full ARM id"
        yield Problem("subnet", what, "write launcher.vnet=<name of the network> as well")
    if node.get("public_ip") is False and not subnet:
        what = "nodes without public IP need a subnet"
        yield Problem("public_ip", what, "write launcher.vnet=... launcher.subnet=...")
    who = node.get("compute_identity")
    ids = isinstance(who, list) and who and all(str(w).startswith("/subscriptions/") for w in who)
    if who not in ("system", "none") and not ids:
        what = f"{who!r} is neither system nor none nor a list of ARM ids"
        yield Problem("compute_identity", what, "[/subscriptions/.../userAssignedIdentities/NAME]")


def environment(node: Node) -> Iterator[Problem]:
    given = [key for key in ("environment", "image", "build_context") if node.get(key)]
    if len(given) > 1:
        names = " and ".join(f"launcher.{key}" for key in given)
        yield Problem(given[0], f"{names} both say what the job runs in", "keep one of them")
    name = node.get("environment")
    if name and not re.match(r"azureml:(//registries/[^/]+/environments/.+|[^/:@]+[:@].+)$", name):
        yield Problem(
            "environment",
            f"{name!r} names no environment",
            "azureml:NAME@latest, azureml:NAME:VERSION or azureml://registries/.../environments/...",
        )
    folder = node.get("build_context")
    if folder and not (Path(folder).expanduser() / "Dockerfile").is_file():
        yield Problem("build_context", f"there is no Dockerfile in {folder}")


def inputs(node: Node) -> Iterator[Problem]:
    for name, given in (node.get("inputs") or {}).items():
        path = f"inputs.{name}"
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
            yield Problem(path, "a name has letters, digits and _ only")
        if not isinstance(given, Mapping):
            given = {"path": given}
        for key in given:
            if key not in ("path", "mode", "type"):
                near = nearest(key, ["path", "mode", "type"])
                yield Problem(f"{path}.{key}", "an input has a path, a mode and a type", near)
        mode, kind, where = given.get("mode", "ro_mount"), given.get("type", "uri_folder"), path
        yield from choice(f"{path}.mode", mode, MODES)
        yield from choice(f"{path}.type", kind, TYPES)
        if str(mode).startswith("eval_") and kind != "mltable":
            yield Problem(f"{path}.mode", f"{mode} is for type=mltable", "ro_mount or download")
        where = given.get("path")
        if not where:
            yield Problem(f"{path}.path", "missing", "azureml://datastores/NAME/paths/FOLDER")
        elif "'" in str(where):
            yield Problem(path, "a ' in an address ends a quotation in the job's command", "%27")
        elif not REMOTE.match(str(where)):
            what = f"{where} is no address that Azure can read"
            remedy = "upload it, and write azureml://datastores/NAME/paths/FOLDER, azureml:DATA:1"
            yield Problem(path, what, f"{remedy} or https://...")


def references(node: Node) -> Iterator[Problem]:
    """`${{inputs.NAME}}` of settings that Azure fills in: NAME must be one of launcher.inputs."""
    known = {"inputs": list(node.get("inputs") or {}), "outputs": ["store"]}

    def strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from strings(item, f"{path}.{key}" if path else str(key))
        elif isinstance(value, str):
            yield path, value

    for path, text in strings(node, ""):
        for kind, name in REFERENCE.findall(text):
            if name not in known[kind]:
                near = nearest(name, known[kind])
                remedy = near or f"launcher.{kind} has {', '.join(known[kind]) or 'none'}"
                yield Problem(path, f"refers to ${{{{{kind}.{name}}}}}, which is undefined", remedy)


def services(node: Node) -> Iterator[Problem]:
    for name, given in (node.get("services") or {}).items():
        kind = given.get("type") if isinstance(given, Mapping) else None
        yield from choice(f"services.{name}.type", kind, SERVICES)
        if kind == "ssh" and not given.get("ssh_public_keys"):
            what = "missing: nobody could log in"
            yield Problem(f"services.{name}.ssh_public_keys", what, "the text of your *.pub file")


def files(node: Node) -> Iterator[Problem]:
    """What cannot be a file: what is made at submission."""
    if node.get("files") and node.get("forward_env"):
        what = "the values of launcher.forward_env go to the Key Vault when distdl submits"
        yield Problem("files", what, "launcher.forward_env=[], and pass them to the job yourself")
    if node.get("files") and node.get("sweep") == "azureml":
        what = "the code of one sweep job is put together at submission"
        yield Problem("files", what, "launcher.sweep=jobs: a folder for each member")


def words(node: Node) -> Iterator[Problem]:
    from distdl.launchers.azureml.request import limit

    for key in node.get("mount") or {}:
        if key not in MOUNT:
            remedy = nearest(key, list(MOUNT)) or f"one of {', '.join(MOUNT)}"
            yield Problem(f"mount.{key}", "Azure's data mounts have no such setting", remedy)
    try:
        limit(node.get("walltime"))
    except ValueError as error:
        yield Problem("walltime", str(error), walltime.FORMS)
    shm = node.get("shm_size")
    if shm and not re.fullmatch(r"[1-9]\d*[bkmgBKMG]", str(shm)):
        yield Problem("shm_size", f"{shm!r} is no size", "a number and b, k, m or g: 16g")
    store = str(node.get("datastore"))
    if not re.fullmatch(r"[A-Za-z0-9_]+", store):
        what = f"{store!r} is no name of a datastore"
        yield Problem("datastore", what, "letters, digits and _; the path is distdl's own")
    vault = node.get("key_vault")
    if vault and not re.fullmatch(r"[A-Za-z][\w-]{1,22}|https://[^/]+/?", str(vault)):
        what = f"{vault!r} is neither a Key Vault's name nor its https address"
        yield Problem("key_vault", what, "https://NAME.vault.azure.net")
    settings = node.get("sweep_job") or {}
    yield from choice("sweep_job.goal", settings.get("goal"), ("maximize", "minimize"))
    most = settings.get("max_concurrent")
    if not isinstance(most, int) or most < 1:
        yield Problem("sweep_job.max_concurrent", f"{most!r} is not a whole number from 1 on")
