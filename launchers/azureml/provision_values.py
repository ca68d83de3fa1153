"""What a workspace is made of, as values: ids, resources, and references to what Azure answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distdl.launchers.azureml.provision_settings import Settings

# For a printed plan where no account was asked.
UNKNOWN_SUBSCRIPTION = "00000000-0000-0000-0000-000000000000"
NETWORK, ML = "Microsoft.Network", "Microsoft.MachineLearningServices"


@dataclass(frozen=True)
class Ref:
    """A value that only Azure knows: `path` in what it answers about the resource `id`."""

    id: str
    path: str

    def __str__(self) -> str:
        return f"<{self.path.rpartition('.')[2]} of {self.id.rpartition('/')[2]}>"


@dataclass(frozen=True)
class Resource:
    """One resource as it should be.

    Args:
        kind: What it is, for people.
        id: Its ARM path.
        api: The version of Azure's API that `body` is written for.
        body: What distdl decides about it.
        fixed: Dotted paths of the body that Azure sets once, at creation.
        named_by: The setting that gives it another name.
        patch: Whether Azure changes it by PATCH, else by PUT of all of it.
        label: A name for people, where that of the id says nothing.
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
        """What tells it from others of its kind."""
        if self.label:
            return self.label
        parts = self.id.split("/")
        of_parent = {"subnets": -3, "virtualNetworkLinks": -3, "privateDnsZoneGroups": -3}
        parent = {**of_parent, "containers": -5}.get(parts[-2])
        return f"{parts[parent]}/{parts[-1]}" if parent else parts[-1]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Ids:
    """The ARM paths of everything, from names that were given or made."""

    def __init__(self, settings: Settings) -> None:
        s = settings
        self.subscription = f"/subscriptions/{s.subscription or UNKNOWN_SUBSCRIPTION}"
        self.group = f"{self.subscription}/resourceGroups/{s.resource_group}"

        def unique(given: str | None, suffix: str, limit: int) -> str:
            return s.name(given, suffix, limit, unique=True)

        storage = "Microsoft.Storage/storageAccounts"
        self.data = self.of(storage, unique(s.storage.data, "data", 24))
        self.results = self.of(storage, unique(s.storage.results, "res", 24))
        self.vault = self.of("Microsoft.KeyVault/vaults", unique(s.key_vault, "kv", 24))
        kind = "Microsoft.ContainerRegistry/registries"
        wanted = s.registry
        self.registry = self.of(kind, unique(wanted.name, "cr", 50))
        identities = "Microsoft.ManagedIdentity/userAssignedIdentities"
        self.identity = self.of(identities, s.name(s.identity, "jobs", 128))
        self.network = self.of(f"{NETWORK}/virtualNetworks", s.name(s.network.name, "vnet"))
        self.workspace = self.of(f"{ML}/workspaces", s.workspace)

    def of(self, kind: str, name: str) -> str:
        """The path of a resource in the group."""
        return f"{self.group}/providers/{kind}/{name}"
