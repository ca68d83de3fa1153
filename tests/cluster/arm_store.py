"""Azure's resource manager as a store of resources, over https on loopback.

Not a copy of Azure, but as strict as it where provisioning could go wrong: a resource needs its
group and its parent, whatever a body points to must exist, tokens and API versions must be there.
And as odd: it answers with defaults of its own, in other capitals, other units, and later.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.azurite import write_certificate
from tests.cluster.https import Answer, serve

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
TENANT = "99999999-2222-3333-4444-555555555555"
IN_GROUP = re.compile(r"/subscriptions/[^/]+/resourcegroups/[^/]+", re.I)
# Made at once by Azure, others take a while.
QUICK = ("containers", "subnets", "roleAssignments", "datastores")


@dataclass
class ArmStore:
    """What it holds and what it was asked."""

    subscriptions: list[str] = field(default_factory=lambda: [SUBSCRIPTION])
    resources: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    failures: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    url: str = ""

    def find(self, end: str) -> dict[str, Any]:
        """The one resource whose id ends so."""
        (found,) = [r for key, r in self.resources.items() if key.endswith(end.lower())]
        return found

    def sent(self) -> list[tuple[str, str, Any]]:
        """Requests other than looks, since the last call."""
        sent = [(m, path, json.loads(body)) for m, path, body in self.requests if m != "GET"]
        self.requests.clear()
        return sent

    def short(self, path: str) -> str:
        return path

    def answer(self, method: str, path: str, body: Any, header: Any, query: str) -> None:
        """Raises the Answer."""
        raise Answer(*self.answered(method, path, body, header, query))

    def answered(
        self, method: str, path: str, body: Any, header: Any, query: str
    ) -> tuple[int, Any]:
        if not str(header.get("Authorization", "")).startswith("Bearer "):
            return error(401, "AuthenticationFailed", "no token")
        if "api-version=" not in query:
            return error(400, "MissingApiVersionParameter", "the api-version is required")
        for end, (status, code, message) in self.failures.items():
            if path.endswith(end) and method != "GET":
                return error(status, code, message)
        if method == "GET":
            return self.get(path)
        if method in ("PUT", "PATCH"):
            return self.put(method, path, body)
        return error(405, "MethodNotAllowed", method)

    def get(self, path: str) -> tuple[int, Any]:
        key = path.lower()
        if key == "/subscriptions":
            return 200, {"value": [{"subscriptionId": s} for s in self.subscriptions]}
        if key.count("/") == 2 and key.rpartition("/")[2] in self.subscriptions:
            return 200, {"id": path, "tenantId": TENANT, "subscriptionId": path.split("/")[2]}
        if key.endswith(("/resources", "/page2")):
            group, _, page = key.rpartition("/")
            inside = [k for k in self.resources if k.startswith(f"{group}/providers/")]
            top = [self.resources[k] for k in inside if k.count("/") == 8]
            listed = [{name: each[name] for name in ("id", "name", "type")} for each in top]
            if page == "page2":
                return 200, {"value": listed[2:]}
            # As if there were many.
            return 200, {"value": listed[:2], "nextLink": f"{self.url}{group}/page2?api-version=1"}
        if key not in self.resources:
            return error(404, "ResourceNotFound", f"{path} was not found")
        found = self.resources[key]
        if found.get("properties", {}).get("provisioningState") == "Creating":
            self.resources[key] = {
                **found,
                "properties": {**found["properties"], "provisioningState": "Succeeded"},
            }
        return 200, found

    def put(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        key = path.lower()
        missing = [need for need in self.needs(path, body) if need.lower() not in self.resources]
        if missing:
            return error(404, "ParentResourceNotFound", f"{missing[0]} does not exist")
        new = key not in self.resources
        if method == "PATCH" and new:
            return error(404, "ResourceNotFound", path)
        before = {} if method == "PUT" else self.resources[key]
        kind = path.split("/")[-2]
        made = combine(before, json.loads(json.dumps(body)))
        properties = made.setdefault("properties", {})
        properties["provisioningState"] = "Succeeded" if kind in QUICK else "Creating"
        as_azure_does(kind, made, properties)
        provider = "/".join(path.split("/")[6:7])
        self.resources[key] = {**made, "id": path, "name": path.rpartition("/")[2]}
        self.resources[key]["type"] = f"{provider}/{kind}"
        return 201 if new else 200, self.resources[key]

    def needs(self, path: str, body: Any) -> Iterator[str]:
        """What must exist before: the group, the parent, and what the body points to."""
        group = IN_GROUP.match(path)
        if group and group.group(0) != path:
            yield group.group(0)
        parent = path.split("/providers/Microsoft.Authorization")[0]
        if parent != path:
            yield parent
        elif path.count("/") > 8:
            end = -4 if "/blobServices/" in path else -2
            yield "/".join(path.split("/")[:end])
        for text in strings(body):
            if IN_GROUP.match(text):
                yield text


def as_azure_does(kind: str, made: dict[str, Any], properties: dict[str, Any]) -> None:
    """Defaults and spellings of the server."""
    made["systemData"] = {"createdAt": "2026-11-21"}
    if kind == "userAssignedIdentities":
        properties["principalId"] = str(uuid.uuid5(uuid.NAMESPACE_DNS, str(made)))
    if kind == "storageAccounts":
        properties["primaryEndpoints"] = {"blob": "https://x"}
        made["sku"]["tier"] = "Premium" if "Premium" in made["sku"]["name"] else "Standard"
    if kind == "computes":
        inner = properties["properties"]
        inner["vmSize"] = inner["vmSize"].upper()
        if inner["scaleSettings"]["nodeIdleTimeBeforeScaleDown"] == "PT300S":
            inner["scaleSettings"]["nodeIdleTimeBeforeScaleDown"] = "PT5M"
        named = made["identity"]["userAssignedIdentities"]
        made["identity"]["userAssignedIdentities"] = {k.lower(): {"clientId": "x"} for k in named}
        made["location"] = "East US"


def combine(before: Any, after: Any) -> Any:
    if isinstance(before, dict) and isinstance(after, dict):
        return {**before, **{k: combine(before.get(k), v) for k, v in after.items()}}
    return after


def strings(value: Any) -> Iterator[str]:
    items = value.items() if isinstance(value, dict) else ()
    for key, item in items:
        yield key
        yield from strings(item)
    for item in value if isinstance(value, list) else ():
        yield from strings(item)
    if isinstance(value, str):
        yield value


def error(status: int, code: str, message: str) -> tuple[int, Any]:
    return status, {"error": {"code": code, "message": message}}


@contextmanager
def serving(folder: Path) -> Iterator[ArmStore]:
    """A store that answers at `store.url`; `folder/cert.pem` is what clients must trust."""
    store, public, private = ArmStore(), folder / "cert.pem", folder / "key.pem"
    write_certificate(public, private)
    server = serve(store, public, private)
    store.url = f"https://127.0.0.1:{server.server_port}"
    yield store
    server.shutdown()
    server.server_close()


class Token:
    """A credential of azure-identity's kind."""

    def get_token(self, *scopes: str, **more: Any) -> Any:
        from azure.core.credentials import AccessToken

        return AccessToken("token", int(time.time()) + 3600)
