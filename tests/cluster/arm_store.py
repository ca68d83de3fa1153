"""Azure's resource manager as a store of resources, over https on loopback.

Not a copy of Azure, but as strict as it where provisioning could go wrong: a resource needs its
group and its parent, whatever a body points to must exist, tokens and API versions must be there.
And as odd: it answers with defaults of its own, in other capitals, other units, and later.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

from tests.cluster.https import Answer, error

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
TENANT = "99999999-2222-3333-4444-555555555555"
IN_GROUP = re.compile(r"/subscriptions/[^/]+/resourcegroups/[^/]+", re.I)
# Made at once by Azure, others take a while.
QUICK = ("containers", "subnets", "roleAssignments", "datastores")


class ArmStore:
    """What it holds, what it was asked, and what it refuses: end of a path -> error."""

    def __init__(self) -> None:
        self.subscriptions, self.url = [SUBSCRIPTION], ""
        self.resources: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str, str]] = []
        self.failures: dict[str, tuple[int, str, str]] = {}

    def find(self, end: str) -> dict[str, Any]:
        """The one resource whose id ends so."""
        (resource,) = [r for key, r in self.resources.items() if key.endswith(end.lower())]
        return resource

    def sent(self) -> list[tuple[str, str, Any]]:
        """Requests other than GET, since the last call."""
        sent = [(m, path, json.loads(body)) for m, path, body in self.requests if m != "GET"]
        self.requests.clear()
        return sent

    def short(self, path: str) -> str:
        return path

    def answer(self, method: str, path: str, body: Any, header: Any, query: str) -> None:
        """Raises the Answer."""
        if not str(header.get("Authorization", "")).startswith("Bearer "):
            raise error(401, "AuthenticationFailed", "no token")
        if "api-version=" not in query:
            raise error(400, "MissingApiVersionParameter", "the api-version is required")
        if method == "GET":
            raise Answer(200, self.get(path))
        for end, failure in self.failures.items():
            if path.endswith(end):
                raise error(*failure)
        if method in ("PUT", "PATCH"):
            self.put(method, path, body)
        raise error(405, "MethodNotAllowed", method)

    def get(self, path: str) -> Any:
        key = path.lower()
        if key == "/subscriptions":
            return {"value": [{"subscriptionId": s} for s in self.subscriptions]}
        if key.count("/") == 2 and key.rpartition("/")[2] in self.subscriptions:
            return {"id": path, "tenantId": TENANT, "subscriptionId": path.split("/")[2]}
        if key.endswith(("/resources", "/page2")):  # as if there were many
            group, _, page = key.rpartition("/")
            inside = [k for k in self.resources if k.startswith(f"{group}/providers/")]
            top = [self.resources[k] for k in inside if k.count("/") == 8]
            listed = [{name: each[name] for name in ("id", "name", "type")} for each in top]
            first = {"nextLink": f"{self.url}{group}/page2?api-version=1", "value": listed[:2]}
            return {"value": listed[2:]} if page == "page2" else first
        if key not in self.resources:
            raise error(404, "ResourceNotFound", f"{path} was not found")
        answer = json.loads(json.dumps(self.resources[key]))
        self.resources[key]["properties"]["provisioningState"] = "Succeeded"
        return answer

    def put(self, method: str, path: str, body: dict[str, Any]) -> None:
        key, kind = path.lower(), path.split("/")[-2]
        missing = [need for need in needs(path, body) if need.lower() not in self.resources]
        if missing:
            raise error(404, "ParentResourceNotFound", f"{missing[0]} does not exist")
        new = key not in self.resources
        if method == "PATCH" and new:
            raise error(404, "ResourceNotFound", path)
        made = combine({} if method == "PUT" else self.resources[key], body)
        properties = made.setdefault("properties", {})
        properties["provisioningState"] = "Succeeded" if kind in QUICK else "Creating"
        as_azure_does(kind, made, properties)
        names = {
            "name": path.rpartition("/")[2],
            "type": f"{'/'.join(path.split('/')[6:7])}/{kind}",
        }
        self.resources[key] = {**made, "id": path, **names}
        raise Answer(201 if new else 200, self.resources[key])


def needs(path: str, body: Any) -> Iterator[str]:
    """What must exist before: the group, the parent, and what the body points to."""
    group = IN_GROUP.match(path)
    if group and group.group(0) != path:
        yield group.group(0)
    parent = path.split("/providers/Microsoft.Authorization")[0]
    if parent != path:
        yield parent
    elif path.count("/") > 8:
        yield "/".join(path.split("/")[: -4 if "/blobServices/" in path else -2])
    yield from filter(IN_GROUP.match, strings(body))


def as_azure_does(kind: str, made: dict[str, Any], properties: dict[str, Any]) -> None:
    """Defaults and spellings of the server."""
    made["systemData"] = {"createdAt": "2026-11-21"}
    if kind == "userAssignedIdentities":
        properties["principalId"] = str(uuid.uuid5(uuid.NAMESPACE_DNS, str(made)))
    if kind == "storageAccounts":
        properties["primaryEndpoints"] = {"blob": "https://x"}
        made["sku"]["tier"] = made["sku"]["name"].partition("_")[0]
    if kind == "computes":
        inner, scale = properties["properties"], properties["properties"]["scaleSettings"]
        inner["vmSize"] = inner["vmSize"].upper()
        if scale["nodeIdleTimeBeforeScaleDown"] == "PT300S":
            scale["nodeIdleTimeBeforeScaleDown"] = "PT5M"
        named = made["identity"]["userAssignedIdentities"]
        made["identity"]["userAssignedIdentities"] = {k.lower(): {"clientId": "x"} for k in named}
        made["location"] = "East US"


def combine(before: Any, after: Any) -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        return {**before, **{k: combine(before.get(k), v) for k, v in after.items()}}
    return after


def strings(value: Any) -> Iterator[str]:
    """Every string in it, and every key."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        for item in items:
            yield from strings(item)
