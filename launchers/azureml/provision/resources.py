"""The resources of a workspace, in the order in which they must be created. Pure and offline.

Bodies contain only what distdl decides; all other settings stay as they are in Azure.
Sources: learn.microsoft.com/azure/templates (bodies), and for access without keys
learn.microsoft.com/azure/machine-learning/how-to-identity-based-service-authentication.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from distdl.launchers.azureml.provision import network
from distdl.launchers.azureml.provision.settings import Compute, ProvisionSettings
from distdl.launchers.azureml.provision.values import Ids, Ref, Resource
from distdl.launchers.azureml.vm_sizes import SPOT

# learn.microsoft.com/azure/role-based-access-control/built-in-roles
ROLES = {
    "AcrPull": "7f951dda-4ed3-4680-a7ca-43fe172d538d",
    "AcrPush": "8311e382-0749-4cb8-b61a-304f252e45ec",
    "AzureML Data Scientist": "f6c7c914-8db3-469d-8ca1-694a8f32e121",
    "Key Vault Secrets Officer": "b86a8fe4-44ce-4948-aee5-eccb2c155cd7",
    "Key Vault Secrets User": "4633458b-17de-408a-b874-0445c86b69e6",
    "Storage Blob Data Contributor": "ba92f5b4-2d11-453d-a403-e96b0029c9fe",
    "Storage Blob Data Reader": "2a2b9908-6ea1-4ae2-8e65-a410df84e7d1",
}


def resources(settings: ProvisionSettings) -> list[Resource]:
    """All resources, each after those that it needs."""
    s, ids = settings, Ids(settings)
    group = Resource("resource group", ids.group, "2024-03-01", {"location": s.location})
    return [
        group,
        *(network.network(ids, s) if s.private else ()),
        *accounts(ids, s),
        *storage(ids, s),
        *(network.dependencies(ids, s) if s.private else ()),
        workspace(ids, s),
        *(network.of_workspace(ids, s) if s.private else ()),
        *datastores(ids),
        *roles(ids, s),
        *clusters(ids, s),
    ]


def internet(settings: ProvisionSettings) -> str:
    """Azure's value for whether access from the internet is allowed."""
    return "Disabled" if settings.private else "Enabled"


def public_access(settings: ProvisionSettings) -> dict[str, Any]:
    rule = "Deny" if settings.private else "Allow"
    rules = {"bypass": "AzureServices", "defaultAction": rule}
    return {"publicNetworkAccess": internet(settings), "networkAcls": rules}


def accounts(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    location = {"location": settings.location}
    yield Resource("managed identity", ids.identity, "2023-01-31", location, named_by="identity")
    properties: dict[str, Any] = {
        "tenantId": Ref(ids.subscription, "tenantId"),
        "sku": {"family": "A", "name": "standard"},
        "enableRbacAuthorization": True,
        "accessPolicies": [],  # required, but empty: access is by roles
        **public_access(settings),
    }
    body = {**location, "properties": properties}
    fixed = ("location", "properties.tenantId")
    yield Resource("key vault", ids.vault, "2023-07-01", body, fixed, "key_vault", patch=True)
    properties = {"adminUserEnabled": False}
    if settings.registry.sku == "Premium":
        properties["publicNetworkAccess"] = internet(settings)
        properties["networkRuleBypassOptions"] = "AzureServices"
    body = {**location, "sku": {"name": settings.registry.sku}, "properties": properties}
    name, api, key = "container registry", "2023-07-01", "registry.name"
    yield Resource(name, ids.registry, api, body, named_by=key, patch=True)


def storage(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    """One account for data and one for results, each with a container named `data` or `results`."""
    for key, account, sku in (
        ("data", ids.data, settings.storage.data_sku),
        ("results", ids.results, settings.storage.results_sku),
    ):
        premium = sku.startswith("Premium")
        body = {
            "location": settings.location,
            "sku": {"name": sku},
            "kind": "BlockBlobStorage" if premium else "StorageV2",
            "properties": {
                "allowSharedKeyAccess": False,  # access by identity only
                "allowBlobPublicAccess": False,
                "minimumTlsVersion": "TLS1_2",
                "supportsHttpsTrafficOnly": True,
                **public_access(settings),
            },
        }
        kind, fixed = f"storage account for {key}", ("location", "kind", *["sku.name"] * premium)
        yield Resource(kind, account, "2023-05-01", body, fixed, f"storage.{key}", patch=True)
        container = f"{account}/blobServices/default/containers/{key}"
        body = {"properties": {"publicAccess": "None"}}
        yield Resource("blob container", container, "2023-05-01", body, ())


def workspace(ids: Ids, settings: ProvisionSettings) -> Resource:
    properties: dict[str, Any] = {
        "friendlyName": settings.workspace,
        "storageAccount": ids.results,
        "keyVault": ids.vault,
        "containerRegistry": ids.registry,
        "hbiWorkspace": settings.high_business_impact,
        "publicNetworkAccess": internet(settings),
        "systemDatastoresAuthMode": "identity",
    }
    if settings.private:
        properties["imageBuildCompute"] = settings.build_compute.name
    body = {
        "location": settings.location,
        "identity": {"type": "SystemAssigned"},
        "properties": properties,
    }
    set_once = ("hbiWorkspace", "storageAccount", "keyVault")
    fixed = ("location", *(f"properties.{key}" for key in set_once))
    return Resource("workspace", ids.workspace, "2024-10-01", body, fixed, "workspace", patch=True)


def datastores(ids: Ids) -> Iterator[Resource]:
    for name, account in (("data", ids.data), ("results", ids.results)):
        properties = {
            "datastoreType": "AzureBlob",
            "accountName": account.rpartition("/")[2],
            "containerName": name,
            "endpoint": "core.windows.net",
            "protocol": "https",
            "credentials": {"credentialsType": "None"},  # by identity
        }
        store = f"{ids.workspace}/datastores/distdl_{name}"
        yield Resource("datastore", store, "2024-10-01", {"properties": properties}, ())


def roles(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    """The roles of jobs, and of the users who submit them."""
    jobs = Ref(ids.identity, "properties.principalId")
    for scope, role in (
        (ids.data, "Storage Blob Data Reader"),
        (ids.results, "Storage Blob Data Contributor"),
        (ids.registry, "AcrPush" if settings.private else "AcrPull"),
        (ids.vault, "Key Vault Secrets User"),
        (ids.workspace, "AzureML Data Scientist"),
    ):
        yield _role(ids, scope, role, ids.identity, jobs, "ServicePrincipal")
    for user in settings.users:
        for scope, role in (
            (ids.data, "Storage Blob Data Contributor"),
            (ids.results, "Storage Blob Data Contributor"),
            (ids.vault, "Key Vault Secrets Officer"),
            (ids.workspace, "AzureML Data Scientist"),
        ):
            yield _role(ids, scope, role, user, user, "User")


def _role(ids: Ids, scope: str, role: str, who: str, principal: Ref | str, kind: str) -> Resource:
    # Azure requires a GUID as the name; here the same grant always gets the same GUID.
    name = uuid.uuid5(uuid.NAMESPACE_URL, f"{scope}|{role}|{who}".lower())
    definitions = f"{ids.subscription}/providers/Microsoft.Authorization/roleDefinitions"
    properties = {
        "roleDefinitionId": f"{definitions}/{ROLES[role]}",
        "principalId": principal,
        "principalType": kind,
    }
    return Resource(
        "role",
        f"{scope}/providers/Microsoft.Authorization/roleAssignments/{name}",
        "2022-04-01",
        {"properties": properties},
        ("properties.roleDefinitionId", "properties.principalId"),
        label=f"{role}: {who.rpartition('/')[2]} on {scope.rpartition('/')[2]}",
    )


def clusters(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    yield _cluster(ids, settings, settings.compute, "compute.name")
    if settings.private:
        yield _cluster(ids, settings, settings.build_compute, "build_compute.name")


def _cluster(ids: Ids, settings: ProvisionSettings, compute: Compute, named_by: str) -> Resource:
    properties: dict[str, Any] = {
        "vmSize": compute.vm_size,
        "vmPriority": "LowPriority" if compute.tier in SPOT else "Dedicated",
        "scaleSettings": {
            "minNodeCount": compute.min_nodes,
            "maxNodeCount": compute.max_nodes,
            "nodeIdleTimeBeforeScaleDown": f"PT{compute.idle_seconds}S",
        },
        "remoteLoginPortPublicAccess": "Disabled",
    }
    if settings.private:
        properties["subnet"] = {"id": f"{ids.network}/subnets/compute"}
        properties["enableNodePublicIp"] = False
    body = {
        "location": settings.location,
        "identity": {"type": "UserAssigned", "userAssignedIdentities": {ids.identity: {}}},
        "properties": {"computeType": "AmlCompute", "properties": properties},
    }
    set_once = ("vmSize", "vmPriority", "subnet.id", "enableNodePublicIp")
    fixed = ("location", *(f"properties.properties.{key}" for key in set_once))
    made = f"{ids.workspace}/computes/{compute.name}"
    return Resource("cluster", made, "2024-10-01", body, fixed, named_by)
