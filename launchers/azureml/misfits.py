"""Settings of `launcher=azureml` that are valid alone, but not together, or not for this run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distdl.launchers.azureml import docker_options, vm_sizes
from distdl.util.errors import Problem
from distdl.util.suggest import did_you_mean_word

if TYPE_CHECKING:
    from distdl.launchers.azureml.settings import AzureSettings

REFERENCE = re.compile(r"\$\{\{\s*(inputs|outputs)\.(\w+)\s*\}\}")
# The key that one type of service has alone. The SDK drops those of another type in silence.
SERVICE_KEYS = {"ssh_public_keys": "ssh", "log_dir": "tensor_board"}


def misfits(settings: AzureSettings, context: Mapping[str, Any]) -> Iterator[Problem]:
    """All such problems; the context has the size of the run (see `LauncherBase.check`)."""
    yield from _gpus(settings, context)
    yield from _nodes(settings, context)
    yield from _kubernetes(settings)
    yield from _network(settings)
    yield from _image(settings)
    yield from _services(settings)
    yield from _outputs(settings)
    yield from _references(settings)
    yield from _files(settings)


def _gpus(settings: AzureSettings, context: Mapping[str, Any]) -> Iterator[Problem]:
    vm = vm_sizes.find(settings.vm_size)
    devices = context.get("devices", 1)
    if vm is None or settings.on_kubernetes or context.get("accelerator") != "gpu":
        return
    if vm.gpus == 0:
        yield Problem(
            "vm_size",
            what=f"{vm.name} has no GPU",
            remedy="choose a size with GPUs, or write trainer.accelerator=cpu",
            code="not-enough",
        )
    elif devices > vm.gpus:
        have = f"{vm.gpus} GPU{'s' if vm.gpus > 1 else ''}"
        yield Problem(
            "vm_size",
            what=f"{devices} processes per node (trainer.devices), but {vm.name} has {have}",
            remedy=f"write trainer.devices={vm.gpus}, or choose a larger size",
            code="mismatch",
        )
    if vm.gpu in vm_sizes.OTHER_IMAGE and not _images(settings):
        what = f"distdl's image is for NVIDIA and x86-64, but {vm.name} has an {vm.gpu}: "
        yield Problem(
            "vm_size",
            what=what + vm_sizes.OTHER_IMAGE[vm.gpu],
            remedy="write launcher.image=... with a torch for it, or launcher.build_context=...",
            code="unsupported",
        )
    if vm.gpu in vm_sizes.TOO_OLD and not _images(settings):
        remedy = "choose a T4, A100 or newer, or a launcher.image or launcher.build_context "
        yield Problem(
            "vm_size",
            what=f"the torch of distdl's image has no kernels for a {vm.gpu} (CUDA 13 dropped it)",
            remedy=f"{remedy}whose torch is built for CUDA 12",
            code="unsupported",
        )


def _nodes(settings: AzureSettings, context: Mapping[str, Any]) -> Iterator[Problem]:
    nodes = context.get("num_nodes", 1)
    if settings.on_kubernetes:  # which has its own limits
        return
    most = settings.max_nodes or nodes
    if nodes > most:
        what = f"trainer.num_nodes={nodes}, but the cluster has at most {most}: the job would "
        yield Problem(
            "max_nodes",
            what=f"{what}never start",
            remedy=f"write launcher.max_nodes={nodes}",
            code="not-enough",
        )
    if settings.min_nodes > most:
        yield Problem(
            "min_nodes",
            what=f"{settings.min_nodes} is more than max_nodes ({most})",
            code="out-of-range",
        )


def _network(settings: AzureSettings) -> Iterator[Problem]:
    if settings.vnet and not settings.subnet:
        yield Problem(
            "subnet",
            what="missing, but launcher.vnet is set",
            remedy="name a subnet of it",
            code="missing-key",
        )
    if settings.subnet and not settings.vnet and not settings.subnet.startswith("/subscriptions/"):
        yield Problem(
            "subnet",
            what="without launcher.vnet it must be the subnet's full ARM id",
            remedy="write launcher.vnet=NETWORK as well",
            code="incomplete",
        )
    if not settings.public_ip and not settings.subnet:
        yield Problem(
            "public_ip",
            what="nodes without a public IP address need a subnet",
            remedy="write launcher.vnet=... launcher.subnet=...",
            code="missing-key",
        )


def _images(settings: AzureSettings) -> list[str]:
    """The settings that replace distdl's own image and are set."""
    keys = ("environment", "image", "build_context", "conda_file")
    return [key for key in keys if getattr(settings, key)]


def _image(settings: AzureSettings) -> Iterator[Problem]:
    if settings.conda_file:
        try:
            settings.conda()
        except ValueError as error:
            yield Problem(
                "conda_file",
                what=str(error),
                remedy="dependencies: [python=3.11, pip, {pip: [...]}]",
                code="damaged-file",
            )
    keys = _images(settings)
    if keys != ["image", "conda_file"] and len(keys) > 1:  # a conda file is put onto an image
        names = " and ".join(f"launcher.{key}" for key in keys)
        yield Problem(
            keys[0],
            what=f"{names} each choose the job's image",
            remedy="set only one of them",
            code="ambiguous",
        )
    yield from docker_options.problems(settings.docker_args or "")
    folder = settings.build_context
    if folder and not (Path(folder).expanduser() / "Dockerfile").is_file():
        yield Problem("build_context", what=f"{folder} has no Dockerfile", code="incomplete")


def _services(settings: AzureSettings) -> Iterator[Problem]:
    if settings.services and settings.sweep == "azureml":
        yield Problem(
            "services",
            what="the trials of a sweep job have none",
            remedy="write launcher.sweep=jobs",
            code="unsupported",
        )
    for name, service in settings.services.items():
        for key, kind in SERVICE_KEYS.items():
            if kind != service.type and getattr(service, key) is not None:
                yield Problem(
                    f"services.{name}.{key}",
                    what=f"is a key of type {kind}, not of {service.type}",
                    remedy="leave it out",
                    code="wrong-kind",
                )
        if service.type == "ssh" and not service.ssh_public_keys:
            path = f"services.{name}.ssh_public_keys"
            yield Problem(
                path,
                what="missing: nobody could log in",
                remedy="write the text of your *.pub file",
                code="missing-key",
            )


def _outputs(settings: AzureSettings) -> Iterator[Problem]:
    if settings.outputs and settings.sweep == "azureml":
        yield Problem(
            "outputs",
            what="all trials of a sweep job would write to the same place",
            remedy="write launcher.sweep=jobs",
            code="conflict",
        )
    for name, output in settings.outputs.items():
        if bool(output.folder) == bool(output.path):
            yield Problem(
                f"outputs.{name}",
                what="needs either a folder of the run or a path",
                remedy=f"write {{folder: {name}}}",
                code="missing-key",
            )
        if output.version and not output.name:
            yield Problem(
                f"outputs.{name}.version",
                what="without a name nothing is registered",
                remedy="write the name as well",
                code="conflict",
            )


def _kubernetes(settings: AzureSettings) -> Iterator[Problem]:
    if settings.instance_type and not settings.on_kubernetes:
        yield Problem(
            "instance_type",
            what="only a Kubernetes compute has instance types",
            remedy=f"write launcher.vm_size={settings.instance_type}, or compute_type=kubernetes",
            code="unsupported",
        )
    if not settings.on_kubernetes:
        return
    if not settings.compute:
        yield Problem(
            "compute",
            what="missing: which Kubernetes compute",
            remedy="write launcher.compute=NAME, as in the workspace",
            code="missing-key",
        )
    if settings.spot:
        yield Problem(
            "tier",
            what=f"{settings.tier}, but a Kubernetes cluster has no tiers",
            remedy="write launcher.tier=dedicated, and an instance_type",
            code="unsupported",
        )


def _references(settings: AzureSettings) -> Iterator[Problem]:
    """Undefined `${{inputs.NAME}}` or `${{outputs.NAME}}` in settings, which Azure fills in."""
    known = {"inputs": list(settings.inputs), "outputs": ["store", *settings.outputs]}
    for path, text in _strings(settings.model_dump(), ""):
        for kind, name in REFERENCE.findall(text):
            if name not in known[kind]:
                has = f"launcher.{kind} has {', '.join(known[kind]) or 'none'}"
                yield Problem(
                    path,
                    what=f"refers to ${{{{{kind}.{name}}}}}, which is undefined",
                    remedy=did_you_mean_word(name, known[kind]) or has,
                    code="unknown-key",
                )


def _files(settings: AzureSettings) -> Iterator[Problem]:
    """Settings that need an action at submission, which `launcher.files` cannot include."""
    if settings.files and settings.forward_env:
        yield Problem(
            "files",
            what="the values of launcher.forward_env are stored only when distdl submits the job",
            remedy="write launcher.forward_env=[], and pass them to the job yourself",
            code="unsupported",
        )
    if settings.files and settings.sweep == "azureml":
        yield Problem(
            "files",
            what="the code of a sweep job is collected only when distdl submits it",
            remedy="write launcher.sweep=jobs, for a folder per member",
            code="unsupported",
        )


def _strings(value: object, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, str):
        yield path, value
