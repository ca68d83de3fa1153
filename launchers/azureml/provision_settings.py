"""The settings of `python -m distdl provision azureml`: provision.yaml and what the user gave."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distdl.errors import Problem, UserError

Strict: dict[str, Any] = {"extra": "forbid", "strict": True}
Sku = Literal["Premium_LRS", "Premium_ZRS", "Standard_LRS", "Standard_ZRS", "Standard_GRS"]
# learn.microsoft.com/azure/virtual-machines/setup-infiniband: the RDMA network's own addresses.
RDMA_NETWORK = ipaddress.ip_network("172.16.0.0/16")
# learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules
NAMES = {
    "resource_group": (r"[\w.()-]{0,89}[\w()-]", "1 to 90 letters, digits, or _ - . ( )"),
    "workspace": (r"[A-Za-z0-9][\w-]{2,32}", "3 to 33 letters, digits, _ or -"),
    "registry.name": (r"[A-Za-z0-9]{5,50}", "5 to 50 letters and digits"),
    "storage.data": (r"[a-z0-9]{3,24}", "3 to 24 small letters and digits"),
    "storage.results": (r"[a-z0-9]{3,24}", "3 to 24 small letters and digits"),
    "key_vault": (r"[A-Za-z][A-Za-z0-9-]{1,22}[A-Za-z0-9]", "3 to 24 letters, digits or -"),
    "compute.name": (r"[A-Za-z][A-Za-z0-9-]{1,31}", "2 to 32 letters, digits or -"),
    "build_compute.name": (r"[A-Za-z][A-Za-z0-9-]{1,31}", "2 to 32 letters, digits or -"),
    "network.name": (r"[A-Za-z0-9][\w.-]{0,62}\w", "2 to 64 letters, digits, _ . or -"),
    "identity": (r"[A-Za-z0-9][\w-]{2,127}", "3 to 128 letters, digits, _ or -"),
    "subscription": (r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", "an id (a GUID)"),
}


@dataclass(frozen=True)
class Network:
    __pydantic_config__ = Strict
    name: str | None
    address_space: str
    compute_subnet: str
    endpoint_subnet: str
    nat_gateway: bool


@dataclass(frozen=True)
class Registry:
    __pydantic_config__ = Strict
    name: str | None
    sku: Literal["Basic", "Standard", "Premium"]


@dataclass(frozen=True)
class Storage:
    __pydantic_config__ = Strict
    data: str | None
    data_sku: Sku
    results: str | None
    results_sku: Sku


@dataclass(frozen=True)
class Compute:
    __pydantic_config__ = Strict
    name: str
    vm_size: str
    tier: Literal["dedicated", "spot", "low_priority"] = "dedicated"
    min_nodes: int = 0
    max_nodes: int = 1
    idle_seconds: int = 300


@dataclass(frozen=True)
class BuildCompute:
    __pydantic_config__ = Strict
    name: str
    vm_size: str


@dataclass(frozen=True)
class Settings:
    """All keys of provision.yaml, where they are explained."""

    __pydantic_config__ = Strict
    resource_group: str
    workspace: str
    location: str
    subscription: str | None
    high_business_impact: bool
    private: bool
    network: Network
    registry: Registry
    storage: Storage
    key_vault: str | None
    compute: Compute
    build_compute: BuildCompute
    identity: str | None
    confirm: bool
    dry_run: bool
    resource_manager: str
    users: list[str] = field(default_factory=list)

    def name(self, given: str | None, suffix: str, limit: int = 64, unique: bool = False) -> str:
        """A name that was given, or one made from the workspace's.

        Args:
            suffix: What it is for.
            limit: Azure's longest name.
            unique: Whether the name must be the only one in all of Azure, in small letters and
                digits; six of a hash of whose it is make it so.
        """
        if given:
            return given
        if not unique:
            return f"{self.workspace}-{suffix}"[:limit]
        whose = f"{self.subscription}/{self.resource_group}/{self.workspace}".lower()
        digest = hashlib.sha256(whose.encode()).hexdigest()[:6]
        base = re.sub(r"[^a-z0-9]", "", self.workspace.lower())
        return f"{base[: limit - len(suffix) - len(digest)]}{suffix}{digest}"


def text() -> str:
    """provision.yaml, which `--help` shows."""
    from importlib.resources import files

    return files(__package__).joinpath("provision.yaml").read_text(encoding="utf-8")


def read(overrides: Mapping[str, Any]) -> Settings:
    """The settings of a command.

    Args:
        overrides: Dotted key -> value, as the user gave them.

    Raises:
        UserError: All that is wrong with them.
    """
    import yaml
    from pydantic import TypeAdapter, ValidationError

    from distdl.suggest import did_you_mean

    values: dict[str, Any] = yaml.safe_load(text())
    known = list(flat(values))
    problems: list[Problem] = []
    for key, value in overrides.items():
        if any(name.startswith(f"{key}.") for name in known):
            inside = ", ".join(name for name in known if name.startswith(f"{key}."))
            problems.append(Problem(key, "is a section", f"it has {inside}"))
            continue
        if key not in known:
            problems.append(Problem(key, "no such key", did_you_mean(key, known)))
            continue
        *parents, last = key.split(".")
        inner = values
        for parent in parents:
            inner = inner[parent]
        inner[last] = value
    for key in ("resource_group", "workspace"):
        if values[key] is None:
            problems.append(Problem(key, "missing", f"write {key}=NAME"))
            values[key] = "missing"
    try:
        # As JSON: strict validation of Python objects wants instances for the inner classes.
        settings = TypeAdapter(Settings).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        for found in error.errors(include_url=False, include_context=False):
            where = ".".join(str(part) for part in found["loc"] if str(part) in ".".join(known))
            expected = found["msg"].removeprefix("Input should be ")
            problems.append(Problem(where, f"must be {expected}, not {found['input']!r}"))
        raise UserError(*problems, *_names(values)) from error
    problems += _names(values)
    problems += _network(settings.network)
    problems += _compute(settings)
    if settings.private and settings.registry.sku != "Premium":
        what = f"private endpoints need a premium registry, not {settings.registry.sku}"
        problems.append(
            Problem("registry.sku", what, "write registry.sku=Premium, or private=false")
        )
    if not settings.resource_manager.startswith("https://"):
        what = f"{settings.resource_manager} is no https address, and a token would go there"
        problems.append(Problem("resource_manager", what))
    if problems:
        raise UserError(*problems)
    return settings


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys that hold a value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _names(values: Mapping[str, Any]) -> Iterator[Problem]:
    for key, (pattern, rule) in NAMES.items():
        value: Any = values
        for part in key.split("."):
            value = value[part]
        if isinstance(value, str) and not re.fullmatch(pattern, value):
            yield Problem(key, f"{value!r} is no such name in Azure", f"it takes {rule}")


def _network(network: Network) -> Iterator[Problem]:
    parsed = {}
    for key in ("address_space", "compute_subnet", "endpoint_subnet"):
        try:
            parsed[key] = ipaddress.IPv4Network(getattr(network, key))
        except ValueError as error:
            yield Problem(f"network.{key}", str(error), "write it as 10.66.0.0/16")
    if len(parsed) < 3:
        return
    whole, *parts = parsed.values()
    for key, part in zip(("compute_subnet", "endpoint_subnet"), parts, strict=True):
        if not part.subnet_of(whole):
            yield Problem(f"network.{key}", f"{part} is not inside {whole}")
    if parts[0].overlaps(parts[1]):
        yield Problem("network.endpoint_subnet", f"{parts[1]} overlaps {parts[0]}")
    if whole.overlaps(RDMA_NETWORK):
        what = f"{whole} overlaps {RDMA_NETWORK}, which InfiniBand uses on Azure"
        yield Problem("network.address_space", what, "write e.g. 10.66.0.0/16")


def _compute(settings: Settings) -> Iterator[Problem]:
    from distdl.launchers.azureml import vm_sizes

    for key in ("compute", "build_compute"):
        name = getattr(settings, key).vm_size
        size = vm_sizes.find(name)
        if size is None:
            if not vm_sizes.unknown(name):
                what = f"{name!r} is no name of a VM size"
                yield Problem(f"{key}.vm_size", what, vm_sizes.suggest(name))
        elif size.retired:
            what = f"Azure retired {size.name} on {size.retired}"
            yield Problem(f"{key}.vm_size", what, "docs/azure_vm_sizes.md lists those of today")
    compute = settings.compute
    if not 0 <= compute.min_nodes <= compute.max_nodes or compute.max_nodes < 1:
        what = f"{compute.max_nodes} nodes at most, {compute.min_nodes} at least"
        yield Problem("compute.max_nodes", what, "write compute.min_nodes=0 compute.max_nodes=4")
    if compute.idle_seconds < 0:
        yield Problem("compute.idle_seconds", f"{compute.idle_seconds} is no time")
    if settings.private and compute.name == settings.build_compute.name:
        yield Problem("build_compute.name", f"{compute.name} is the other cluster's name")
