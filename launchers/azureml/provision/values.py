"""A workspace's parts as values: ids, resources, and references to values in Azure's answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distdl.launchers.azureml.provision.settings import ProvisionSettings

# For an offline plan without a given subscription.
UNKNOWN_SUBSCRIPTION = "00000000-0000-0000-0000-000000000000"
NETWORK, ML = "Microsoft.Network", "Microsoft.MachineLearningServices"
# Kinds whose own name says little -> the index of their parent's name in the id before the kind.
PARENT = {"subnets": -1, "virtualNetworkLinks": -1, "privateDnsZoneGroups": -1, "containers": -3}


@dataclass(frozen=True)
class Ref:
    """A value that only Azure knows: at `path` in its answer about the resource `id`."""

    id: str
    path: str

    def __str__(self) -> str:
        return f"<{self.path.rpartition('.')[2]} of {self.id.rpartition('/')[2]}>"


@dataclass(frozen=True)
class Resource:
    """One wanted resource.

    Args:
        kind: Its kind, for people.
        id: Its ARM path.
        api: The version of Azure's API that `body` is written for.
        body: What distdl decides about it.
        fixed: Dotted paths of the body that Azure sets only at creation.
        named_by: The setting that gives it another name.
        patch: Whether Azure changes it by PATCH, else by a PUT of the complete body.
        label: A name for people, if the name in the id says nothing.
    """

    kind: str
    id: str
    api: str
    body: dict[str, Any]
    fixed: tuple[str, ...] = ("location",)
    named_by: str = ""
    patch: bool = False
    label: str = ""

    @property
    def name(self) -> str:
        """The name that distinguishes it from others of its kind."""
        *parents, kind, name = self.id.split("/")
        return self.label or (f"{parents[PARENT[kind]]}/{name}" if kind in PARENT else name)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Ids:
    """The ARM paths of all resources, from given or generated names."""

    def __init__(self, settings: ProvisionSettings) -> None:
        s = settings
        self.subscription = f"/subscriptions/{s.subscription or UNKNOWN_SUBSCRIPTION}"
        self.group = f"{self.subscription}/resourceGroups/{s.resource_group}"
        account, registry = "Microsoft.Storage/storageAccounts", "Microsoft.ContainerRegistry"
        self.data = self.of(account, s.unique_name(s.storage.data, "data", 24))
        self.results = self.of(account, s.unique_name(s.storage.results, "res", 24))
        self.vault = self.of("Microsoft.KeyVault/vaults", s.unique_name(s.key_vault, "kv", 24))
        self.registry = self.of(f"{registry}/registries", s.unique_name(s.registry.name, "cr", 50))
        identities = "Microsoft.ManagedIdentity/userAssignedIdentities"
        self.identity = self.of(identities, s.identity or f"{s.workspace}-jobs")
        self.network = self.of(
            f"{NETWORK}/virtualNetworks", s.network.name or f"{s.workspace}-vnet"
        )
        self.workspace = self.of(f"{ML}/workspaces", s.workspace)

    def of(self, kind: str, name: str) -> str:
        """The path of a resource in the group."""
        return f"{self.group}/providers/{kind}/{name}"
