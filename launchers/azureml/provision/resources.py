"""The resources of a workspace, in the order in which they must be created. Works offline.

Bodies contain only the settings that distdl decides; others stay as they are in Azure.
Sources: learn.microsoft.com/azure/templates for bodies. Below learn.microsoft.com/azure, for access
without keys: machine-learning/how-to-identity-based-service-authentication; for the network:
machine-learning/how-to-secure-training-vnet (no public address, outbound),
machine-learning/how-to-configure-private-link and private-link/private-endpoint-dns.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from distdl.launchers.azureml.provision.settings import Compute, ProvisionSettings
from distdl.launchers.azureml.provision.values import NETWORK, Ids, Ref, Resource
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
    """All resources; each comes after those that it needs."""
    ids = Ids(settings)
    found = [Resource("resource group", ids.group, "2024-03-01", {"location": settings.location})]
    if settings.private:
        found += network(ids, settings)
    found += accounts(ids, settings)
    if settings.insights.create:
        found += insights(ids, settings)
    found += storage(ids, settings)
    if settings.private:
        found += dependencies(ids, settings)
    found.append(workspace(ids, settings))
    if settings.private:
        found += endpoint(ids, settings, ids.workspace, "amlworkspace", *ML_ZONES)
    found += datastores(ids)
    found += roles(ids, settings)
    found += clusters(ids, settings)
    return found


def internet(settings: ProvisionSettings) -> str:
    """Azure's word for whether access from the internet is allowed."""
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


def insights(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    """Application Insights, which shows what endpoints log and how long they take, and the Log
    Analytics workspace that keeps its data."""
    kept = settings.insights.days
    properties: dict[str, Any] = {"sku": {"name": "PerGB2018"}, "retentionInDays": kept}
    body = {"location": settings.location, "properties": properties}
    name, key = "log workspace", "insights.logs"
    yield Resource(name, ids.logs, "2023-09-01", body, named_by=key, patch=True)
    properties = {"Application_Type": "web", "WorkspaceResourceId": ids.logs}
    # The nodes of endpoints and the Studio reach it by its public address, also if `private`.
    body = {"location": settings.location, "kind": "web", "properties": properties}
    fixed = ("location", "properties.Application_Type")
    name, key = "Application Insights", "insights.name"
    yield Resource(name, ids.insights, "2020-02-02", body, fixed, key)


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
        kind = f"storage account for {key}"
        fixed = ("location", "kind", *["sku.name"] * premium)
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
    if settings.insights.create:
        properties["applicationInsights"] = ids.insights
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
        for scope in (ids.data, ids.results):
            yield _role(ids, scope, "Storage Blob Data Contributor", user, user, "User")
        yield _role(ids, ids.vault, "Key Vault Secrets Officer", user, user, "User")
        yield _role(ids, ids.workspace, "AzureML Data Scientist", user, user, "User")


def _role(ids: Ids, scope: str, role: str, who: str, principal: Ref | str, kind: str) -> Resource:
    # Azure requires a GUID as the name. It is derived, so that a grant always has the same GUID.
    name = uuid.uuid5(uuid.NAMESPACE_URL, f"{scope}|{role}|{who}".lower())
    authorization = "providers/Microsoft.Authorization"
    definition = f"{ids.subscription}/{authorization}/roleDefinitions/{ROLES[role]}"
    fixed = {"roleDefinitionId": definition, "principalId": principal}
    return Resource(
        "role",
        f"{scope}/{authorization}/roleAssignments/{name}",
        "2022-04-01",
        {"properties": {**fixed, "principalType": kind}},
        tuple(f"properties.{key}" for key in fixed),
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


# The virtual network, its NAT gateway, and private endpoints with their DNS zones

BLOB = "privatelink.blob.core.windows.net"
ML_ZONES = ("privatelink.api.azureml.ms", "privatelink.notebooks.azure.net")


def network(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    """A network with one subnet for nodes and one for endpoints."""
    wanted = settings.network
    location = {"location": settings.location}
    outbound: dict[str, Any] = {}
    if wanted.nat_gateway:
        address = ids.of(f"{NETWORK}/publicIPAddresses", f"{settings.workspace}-nat-ip")
        gateway = ids.of(f"{NETWORK}/natGateways", f"{settings.workspace}-nat")
        standard = {**location, "sku": {"name": "Standard"}}
        static = {"properties": {"publicIPAllocationMethod": "Static"}}
        yield Resource("public address", address, "2024-05-01", {**standard, **static})
        addresses = {"properties": {"publicIpAddresses": [{"id": address}]}}
        yield Resource("NAT gateway", gateway, "2024-05-01", {**standard, **addresses})
        outbound = {"natGateway": {"id": gateway}}
    space = {"addressSpace": {"addressPrefixes": [wanted.address_space]}}
    body = {**location, "properties": space}
    yield Resource("virtual network", ids.network, "2024-05-01", body, named_by="network.name")
    # Subnets are separate resources: the network's own body does not list them, so it cannot remove
    # any.
    subnets = {"compute": {"addressPrefix": wanted.compute_subnet, **outbound}}
    subnets["endpoints"] = {"addressPrefix": wanted.endpoint_subnet}
    for name, properties in subnets.items():
        body = {"properties": properties}
        yield Resource("subnet", f"{ids.network}/subnets/{name}", "2024-05-01", body, ())


def dependencies(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    """Private endpoints of the resources that must exist before the workspace."""
    yield from endpoint(ids, settings, ids.data, "blob", BLOB)
    # The zone of blobs is created by the endpoint before.
    yield from endpoint(ids, settings, ids.results, "blob", BLOB, new=False)
    yield from endpoint(ids, settings, ids.results, "file", "privatelink.file.core.windows.net")
    yield from endpoint(ids, settings, ids.vault, "vault", "privatelink.vaultcore.azure.net")
    yield from endpoint(ids, settings, ids.registry, "registry", "privatelink.azurecr.io")


def endpoint(
    ids: Ids, settings: ProvisionSettings, target: str, group: str, *zones: str, new: bool = True
) -> Iterator[Resource]:
    """A private endpoint, and (if `new`) the DNS zones that resolve the target's name to it."""
    zone_ids = [ids.of(f"{NETWORK}/privateDnsZones", zone) for zone in zones]
    for zone in zone_ids if new else ():
        yield Resource("private DNS zone", zone, "2020-06-01", {"location": "global"})
        link = {"virtualNetwork": {"id": ids.network}, "registrationEnabled": False}
        yield Resource(
            "DNS zone link",
            f"{zone}/virtualNetworkLinks/{ids.network.rpartition('/')[2]}",
            "2020-06-01",
            {"location": "global", "properties": link},
            ("location", "properties.virtualNetwork.id"),
        )
    name = f"{target.rpartition('/')[2]}-{group}"
    link = {"name": name, "properties": {"privateLinkServiceId": target, "groupIds": [group]}}
    subnet = {"id": f"{ids.network}/subnets/endpoints"}
    properties = {"subnet": subnet, "privateLinkServiceConnections": [link]}
    made = ids.of(f"{NETWORK}/privateEndpoints", name)
    body = {"location": settings.location, "properties": properties}
    fixed = ("location", "properties.subnet.id")
    yield Resource("private endpoint", made, "2024-05-01", body, fixed)
    configs = [
        {"name": zone.replace(".", "-"), "properties": {"privateDnsZoneId": zone_id}}
        for zone, zone_id in zip(zones, zone_ids, strict=True)
    ]
    body = {"properties": {"privateDnsZoneConfigs": configs}}
    yield Resource("DNS zone group", f"{made}/privateDnsZoneGroups/default", "2024-05-01", body, ())
