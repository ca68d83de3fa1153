"""The virtual network, its NAT gateway, and private endpoints with their DNS zones.

Sources: learn.microsoft.com/azure/machine-learning/how-to-secure-training-vnet (no public address,
outbound), .../how-to-configure-private-link and learn.microsoft.com/azure/private-link/
private-endpoint-dns (groups and zones).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distdl.launchers.azureml.provision.settings import ProvisionSettings
from distdl.launchers.azureml.provision.values import NETWORK, Ids, Resource

BLOB = "privatelink.blob.core.windows.net"


def network(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    """A network with one subnet for nodes and one for endpoints."""
    wanted, location = settings.network, {"location": settings.location}
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
    # Subnets are separate resources here: the network's own body lists no subnets, and so cannot
    # remove any.
    for name, prefix, more in (
        ("compute", wanted.compute_subnet, outbound),
        ("endpoints", wanted.endpoint_subnet, {}),
    ):
        body = {"properties": {"addressPrefix": prefix, **more}}
        yield Resource("subnet", f"{ids.network}/subnets/{name}", "2024-05-01", body, ())


def dependencies(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    """Endpoints of the resources that the workspace needs; they are created before it."""
    yield from endpoint(ids, settings, ids.data, "blob", BLOB)
    # The zone of blobs has just been created.
    yield from endpoint(ids, settings, ids.results, "blob", BLOB, make_zones=False)
    yield from endpoint(ids, settings, ids.results, "file", "privatelink.file.core.windows.net")
    yield from endpoint(ids, settings, ids.vault, "vault", "privatelink.vaultcore.azure.net")
    yield from endpoint(ids, settings, ids.registry, "registry", "privatelink.azurecr.io")


def of_workspace(ids: Ids, settings: ProvisionSettings) -> Iterator[Resource]:
    """The endpoint through which people and nodes reach the workspace."""
    zones = ("privatelink.api.azureml.ms", "privatelink.notebooks.azure.net")
    yield from endpoint(ids, settings, ids.workspace, "amlworkspace", *zones)


def endpoint(
    ids: Ids,
    settings: ProvisionSettings,
    target: str,
    group: str,
    *zones: str,
    make_zones: bool = True,
) -> Iterator[Resource]:
    """A private endpoint, and private DNS zones that resolve the target's name to it."""
    zone_ids = [ids.of(f"{NETWORK}/privateDnsZones", zone) for zone in zones]
    for zone in zone_ids if make_zones else ():
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
    target_of = {"privateLinkServiceId": target, "groupIds": [group]}
    properties = {
        "subnet": {"id": f"{ids.network}/subnets/endpoints"},
        "privateLinkServiceConnections": [{"name": name, "properties": target_of}],
    }
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
