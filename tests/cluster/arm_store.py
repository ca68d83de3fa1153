"""Azure's resource manager as a store of resources, over https on loopback.

Not a copy of Azure, but as strict as it where provisioning could go wrong: a resource needs its
group and its parent, whatever a body points to must exist, tokens and API versions must be there.
And as odd: it answers with defaults of its own, in other capitals, other units, and later.
"""

import json
import re
import uuid

from tests.cluster.https import Answer, error

SUBSCRIPTION = "11111111-2222-3333-4444-555555555555"
TENANT = "99999999-2222-3333-4444-555555555555"
IN_GROUP = re.compile(r"/subscriptions/[^/]+/resourcegroups/[^/]+", re.I)
# Made at once by Azure, others take a while.
QUICK = ("containers", "subnets", "roleAssignments", "datastores")


class ArmStore:
    """What it holds, what it was asked, and what it refuses: end of a path -> error."""

    def __init__(self):
        self.subscriptions = [SUBSCRIPTION]
        self.url = ""
        self.resources = {}
        self.requests = []
        self.failures = {}

    def find(self, end):
        """The one resource whose id ends so."""
        (resource,) = [r for key, r in self.resources.items() if key.endswith(end.lower())]
        return resource

    def sent(self):
        """Method, path and body of the requests other than GET, since the last call."""
        sent = [(m, path, json.loads(body)) for m, path, body in self.requests if m != "GET"]
        self.requests.clear()
        return sent

    def answer(self, method, path, body, header, query):
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
        self.put(method, path, body)

    def get(self, path):
        key = path.lower()
        if key == "/subscriptions":
            return {"value": [{"subscriptionId": s} for s in self.subscriptions]}
        if key.rpartition("/")[2] in self.subscriptions:
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

    def put(self, method, path, body):
        key = path.lower()
        kind = path.split("/")[-2]
        if missing := [need for need in needs(path, body) if need.lower() not in self.resources]:
            raise error(404, "ParentResourceNotFound", f"{missing[0]} does not exist")
        before = self.resources.get(key)
        made = combine(before if method == "PATCH" else {}, body)
        properties = made.setdefault("properties", {})
        properties["provisioningState"] = "Succeeded" if kind in QUICK else "Creating"
        as_azure_does(kind, made, properties)
        provider = "/".join(path.split("/")[6:7])
        made |= {"id": path, "name": path.rpartition("/")[2], "type": f"{provider}/{kind}"}
        self.resources[key] = made
        raise Answer(200 if before else 201, made)


def needs(path, body):
    """What must exist before: the group, the parent, and what the body points to."""
    group = IN_GROUP.match(path)
    if group and group.group(0) != path:
        yield group.group(0)
    parent = path.split("/providers/Microsoft.Authorization")[0]
    if parent != path:
        yield parent
    elif path.count("/") > 8:
        yield "/".join(path.split("/")[: -4 if "/blobServices/" in path else -2])
    yield from filter(IN_GROUP.match, re.findall('"([^"]*)"', json.dumps(body)))


def as_azure_does(kind, made, properties):
    """Defaults and spellings of the server."""
    made["systemData"] = {"createdAt": "2026-11-21"}
    if kind == "userAssignedIdentities":
        properties["principalId"] = str(uuid.uuid5(uuid.NAMESPACE_DNS, str(made)))
    if kind == "storageAccounts":
        properties["primaryEndpoints"] = {"blob": "https://x"}
        made["sku"]["tier"] = made["sku"]["name"].partition("_")[0]
    if kind == "computes":
        inner = properties["properties"]
        scale = properties["properties"]["scaleSettings"]
        inner["vmSize"] = inner["vmSize"].upper()
        if scale["nodeIdleTimeBeforeScaleDown"] == "PT300S":
            scale["nodeIdleTimeBeforeScaleDown"] = "PT5M"
        named = made["identity"]["userAssignedIdentities"]
        made["identity"]["userAssignedIdentities"] = {k.lower(): {"clientId": "x"} for k in named}
        made["location"] = "East US"


def combine(before, after):
    if isinstance(before, dict) and isinstance(after, dict):
        return {**before, **{k: combine(before.get(k), v) for k, v in after.items()}}
    return after
