"""Types for the parts of a workspace: ids, resources, and references to Azure's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distdl.launchers.azureml.provision.settings import ProvisionSettings

# Used in an offline plan if the user gives no subscription.
UNKNOWN_SUBSCRIPTION = "00000000-0000-0000-0000-000000000000"
NETWORK, ML = "Microsoft.Network", "Microsoft.MachineLearningServices"
IDENTITIES = "Microsoft.ManagedIdentity/userAssignedIdentities"
REGISTRIES = "Microsoft.ContainerRegistry/registries"
# Kinds whose name needs that of a parent -> the index of the parent's name in the id.
PARENT = {"subnets": -1, "virtualNetworkLinks": -1, "privateDnsZoneGroups": -1, "containers": -3}


@dataclass(frozen=True)
class Ref:
    """A value that only Azure knows, at `path` in its answer about the resource `id`."""

    id: str
    path: str

    def __str__(self) -> str:
        return f"<{self.path.rpartition('.')[2]} of {self.id.rpartition('/')[2]}>"


@dataclass(frozen=True)
class Resource:
    """One wanted resource."""

    kind: str  # for people
    id: str  # its ARM path
    api: str  # the version of Azure's API that `body` is written for
    body: dict[str, Any]  # the settings that distdl decides
    fixed: tuple[str, ...] = ("location",)  # dotted paths of values that Azure sets at creation
    named_by: str = ""  # the setting that renames it
    patch: bool = False  # whether Azure changes it by PATCH; else by a PUT of the complete body
    label: str = ""  # a readable name, if the name in the id is not readable

    @property
    def name(self) -> str:
        """A name that distinguishes this resource from others of its kind."""
        *parents, kind, name = self.id.split("/")
        return self.label or (f"{parents[PARENT[kind]]}/{name}" if kind in PARENT else name)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Ids:
    """The ARM paths of all resources, from given or generated names."""

    def __init__(self, settings: ProvisionSettings) -> None:
        self.subscription = f"/subscriptions/{settings.subscription or UNKNOWN_SUBSCRIPTION}"
        self.group = f"{self.subscription}/resourceGroups/{settings.resource_group}"
        account = "Microsoft.Storage/storageAccounts"
        self.data = self.of(account, settings.unique_name(settings.storage.data, "data", 24))
        self.results = self.of(account, settings.unique_name(settings.storage.results, "res", 24))
        self.vault = self.of(
            "Microsoft.KeyVault/vaults", settings.unique_name(settings.key_vault, "kv", 24)
        )
        self.registry = self.of(REGISTRIES, settings.unique_name(settings.registry.name, "cr", 50))
        insights = settings.insights.name or f"{settings.workspace}-insights"
        self.insights = self.of("Microsoft.Insights/components", insights)
        logs = settings.insights.logs or f"{settings.workspace}-logs"
        self.logs = self.of("Microsoft.OperationalInsights/workspaces", logs)
        self.identity = self.of(IDENTITIES, settings.identity or f"{settings.workspace}-jobs")
        networks = f"{NETWORK}/virtualNetworks"
        self.network = self.of(networks, settings.network.name or f"{settings.workspace}-vnet")
        self.workspace = self.of(f"{ML}/workspaces", settings.workspace)

    def of(self, kind: str, name: str) -> str:
        return f"{self.group}/providers/{kind}/{name}"
