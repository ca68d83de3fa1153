"""The settings of `python -m distdl provision azureml`: provision.yaml with overrides."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
)
from pydantic import field_validator as checks

from distdl.launchers.azureml import vm_sizes
from distdl.launchers.azureml.values import VmSizeName
from distdl.launchers.common import Count, Positive, matching
from distdl.util.errors import Problem, Refused, UserError
from distdl.util.typed import problems

# The RDMA network's addresses: learn.microsoft.com/azure/virtual-machines/setup-infiniband
RDMA_NETWORK = ipaddress.ip_network("172.16.0.0/16")


def _name(pattern: str, rule: str) -> BeforeValidator:
    return matching(pattern, "allowed by Azure", f"use {rule}")


def _address_range(text: str) -> str:
    try:
        ipaddress.IPv4Network(text)
    except ValueError as error:
        raise Refused(
            what=str(error), remedy="write a range such as 10.66.0.0/16", code="wrong-kind"
        ) from None
    return text


def _not_retired(name: str) -> str:
    size = vm_sizes.find(name)
    if size is not None and size.retired:
        raise Refused(
            what=f"Azure retired {size.name} on {size.retired}",
            remedy="docs/azure_vm_sizes.md lists the current sizes",
            code="unsupported",
        )
    return name


# learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules
Group = Annotated[str, _name(r"[\w.()-]{0,89}[\w()-]", "1 to 90 letters, digits, or _ - . ( )")]
WorkspaceName = Annotated[str, _name(r"(?i)[a-z0-9][\w-]{2,32}", "3 to 33 letters, digits, _ or -")]
RegistryName = Annotated[str, _name(r"[A-Za-z0-9]{5,50}", "5 to 50 letters and digits")]
AccountName = Annotated[str, _name(r"[a-z0-9]{3,24}", "3 to 24 lower-case letters and digits")]
Vault = Annotated[str, _name(r"(?i)[a-z][a-z0-9-]{1,22}[a-z0-9]", "3 to 24 letters, digits or -")]
Cluster = Annotated[str, _name(r"(?i)[a-z][a-z0-9-]{1,31}", "2 to 32 letters, digits or -")]
Vnet = Annotated[str, _name(r"(?i)[a-z0-9][\w.-]{0,62}\w", "2 to 64 letters, digits, _ . or -")]
Identity = Annotated[str, _name(r"(?i)[a-z0-9][\w-]{2,127}", "3 to 128 letters, digits, _ or -")]
Component = Annotated[str, _name(r"[\w.()-]{0,254}[\w()-]", "1 to 255 letters, digits, _ - . ( )")]
LogWorkspace = Annotated[
    str, _name(r"(?i)[a-z0-9][a-z0-9-]{2,61}[a-z0-9]", "4 to 63 letters, digits or -")
]
Guid = Annotated[str, _name(r"(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "an id (a GUID)")]
AddressRange = Annotated[str, AfterValidator(_address_range)]
UsableVmSize = Annotated[VmSizeName, AfterValidator(_not_retired)]
Sku = Literal["Premium_LRS", "Premium_ZRS", "Standard_LRS", "Standard_ZRS", "Standard_GRS"]


class Section(BaseModel, extra="forbid", strict=True):
    """A mapping that accepts only its fields, and does not convert types."""


class Network(Section):
    name: Vnet | None
    address_space: AddressRange
    compute_subnet: AddressRange
    endpoint_subnet: AddressRange
    nat_gateway: bool

    @checks("address_space")
    @classmethod
    def _outside_rdma_network(cls, text: str) -> str:
        if ipaddress.ip_network(text).overlaps(RDMA_NETWORK):
            raise Refused(
                what=f"{text} overlaps {RDMA_NETWORK}, which InfiniBand uses on Azure",
                remedy="write a range such as 10.66.0.0/16",
                code="conflict",
            )
        return text

    @checks("compute_subnet", "endpoint_subnet")
    @classmethod
    def _inside(cls, text: str, info: ValidationInfo) -> str:
        subnet = ipaddress.IPv4Network(text)
        earlier = info.data
        space = earlier.get("address_space")
        if space and not subnet.subnet_of(ipaddress.IPv4Network(space)):
            raise Refused(what=f"{text} is not inside {space}", code="mismatch")
        other = earlier.get("compute_subnet")
        if other and subnet.overlaps(ipaddress.ip_network(other)):
            raise Refused(what=f"{text} overlaps {other}", code="conflict")
        return text


class Registry(Section):
    name: RegistryName | None
    sku: Literal["Basic", "Standard", "Premium"]


class Insights(Section):
    create: bool
    name: Component | None
    logs: LogWorkspace | None
    days: Annotated[int, Field(ge=30, le=730)]


class Storage(Section):
    data: AccountName | None
    data_sku: Sku
    results: AccountName | None
    results_sku: Sku


class Compute(Section):
    name: Cluster
    vm_size: UsableVmSize
    tier: Literal["dedicated", "spot", "low_priority"] = "dedicated"
    min_nodes: Count = 0
    max_nodes: Positive = 1
    idle_seconds: Count = 300

    @checks("max_nodes")
    @classmethod
    def _at_least_min_nodes(cls, most: int, info: ValidationInfo) -> int:
        least = info.data.get("min_nodes", 0)
        if least > most:
            raise Refused(
                what=f"{most} is less than min_nodes ({least})",
                remedy="write compute.min_nodes=0 compute.max_nodes=4",
                code="out-of-range",
            )
        return most


class ProvisionSettings(Section):
    """The keys of provision.yaml, which explains them."""

    resource_group: Group
    workspace: WorkspaceName
    location: str
    subscription: Guid | None
    high_business_impact: bool
    private: bool
    network: Network
    registry: Registry
    insights: Insights
    storage: Storage
    key_vault: Vault | None
    compute: Compute
    build_compute: Compute
    identity: Identity | None
    users: list[str]
    confirm: bool
    dry_run: bool
    resource_manager: str

    @checks("resource_manager")
    @classmethod
    def _encrypted(cls, address: str) -> str:
        if not address.startswith("https://"):
            raise Refused(
                what=f"{address} is not an https address, but a token would be sent to it",
                code="wrong-kind",
            )
        return address

    def unique_name(self, name: str | None, suffix: str, limit: int) -> str:
        """The given name; else one that should be unique in all of Azure, of at most `limit`
        lower-case letters and digits: the workspace's name, the suffix (the resource's purpose),
        and six digits of a hash of the workspace's path."""
        if name:
            return name
        path = f"{self.subscription}/{self.resource_group}/{self.workspace}".lower()
        end = suffix + hashlib.sha256(path.encode()).hexdigest()[:6]
        return re.sub(r"[^a-z0-9]", "", self.workspace.lower())[: limit - len(end)] + end


def text() -> str:
    """The text of provision.yaml, which `--help` prints."""
    from importlib.resources import files

    return files(__package__).joinpath("provision.yaml").read_text(encoding="utf-8")


def read(overrides: Mapping[str, Any]) -> ProvisionSettings:
    """Reads the settings of a command, with the user's dotted keys.

    Raises:
        UserError: With all problems of the settings.
    """
    import yaml

    from distdl.util.suggest import did_you_mean

    values: dict[str, Any] = yaml.safe_load(text())
    known = list(_keys(values))
    wrong = []
    for key, value in overrides.items():
        if inside := [name for name in known if name.startswith(f"{key}.")]:
            wrong.append(
                Problem(
                    key,
                    what="is a section",
                    remedy=f"write one of {', '.join(inside)}",
                    code="wrong-kind",
                )
            )
        elif key not in known:
            wrong.append(
                Problem(
                    key, what="no such key", remedy=did_you_mean(key, known), code="unknown-key"
                )
            )
        else:
            section, _, last = key.rpartition(".")
            (values[section] if section else values)[last] = value
    absent = [key for key in ("resource_group", "workspace") if values[key] is None]
    wrong += [
        Problem(key, what="missing", remedy=f"write {key}=NAME", code="missing-key")
        for key in absent
    ]
    wrong += _contradictions(values)
    try:
        settings = ProvisionSettings.model_validate(values)
    except ValidationError as error:
        wrong += [p for p in problems(error, values, known) if p.path not in absent]
    if wrong:
        raise UserError(*wrong)
    return settings


def _contradictions(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of settings that contradict each other."""
    if values["private"] is not True:
        return
    sku, cluster = values["registry"]["sku"], values["build_compute"]["name"]
    if sku in ("Basic", "Standard"):
        yield Problem(
            "registry.sku",
            what=f"private endpoints need a Premium registry, not {sku}",
            remedy="write registry.sku=Premium or private=false",
            code="conflict",
        )
    if cluster == values["compute"]["name"]:
        yield Problem(
            "build_compute.name",
            what=f"{cluster} is the name of the other cluster",
            code="conflict",
        )


def _keys(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys that are not sections."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
