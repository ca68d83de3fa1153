"""A stand-in for Azure on loopback: as much of ARM, Azure ML, Key Vault and managed identity as the
real SDKs ask for, over https. Blobs are a real Azurite's, jobs run for real (`nodes.py`), and an
endpoint answers as a model does.

Nothing in distdl knows of it: the SDK finds it by ARM_CLOUD_METADATA_URL, its credential by
MSI_ENDPOINT (which Azure ML sets in jobs), both documented variables of Azure's SDKs.
"""

import base64
import json
import re
import threading
from types import SimpleNamespace

from tests.cluster.arm_store import SUBSCRIPTION
from tests.cluster.azurite import ACCOUNT, CONTAINER, Azurite
from tests.cluster.https import Answer, error, serve
from tests.cluster.nodes import run_job

NAMES = {"subscription_id": SUBSCRIPTION, "resource_group": "group", "workspace_name": "space"}
WORKSPACE = (
    f"/subscriptions/{SUBSCRIPTION}/resourceGroups/group"
    "/providers/Microsoft.MachineLearningServices/workspaces/space"
)
TOKEN, KEY = "token-of-the-stand-in", "key-of-the-endpoint"


class Azure:
    """One subscription with one workspace; the folder has the blobs and nodes."""

    scorer = None  # the model that answers
    # "upload": no models are taken; "creation": deployments do not start; "answers": are wrong
    broken = ""

    def __init__(self, folder):
        self.folder = folder
        self.azurite = Azurite(folder / "azurite")
        self.requests = []
        self.printed = {}
        self.jobs = {}
        self.vault = {}
        self.resources = {}  # computes, environments, codes, ...: by path
        self.url, self.end = serve(self, self.azurite.certificate, self.azurite.key)

    def close(self):
        self.end()
        self.azurite.close()

    def identity(self):
        """What a managed identity is to a process; also what Azure ML sets in a job."""
        certificate = {"REQUESTS_CA_BUNDLE": str(self.azurite.certificate)}
        return {"MSI_ENDPOINT": f"{self.url}/msi/token", "MSI_SECRET": "secret", **certificate}

    def asked(self, method, pattern):
        """Bodies of the requests whose path (without the workspace's) matches."""
        sent = [(path, body) for m, path, body in self.requests if m == method]
        return [body for path, body in sent if re.search(pattern, self.short(path))]

    def find(self, path):
        """The properties of a resource."""
        return self.resources[self.short(path)]["properties"]

    def named(self, kind):
        """Name -> body of the resources of a kind: onlineEndpoints, deployments, models, ..."""
        paths = [path.split("/") for path in self.resources]
        return {path[-1]: self.resources["/".join(path)] for path in paths if path[-2] == kind}

    def short(self, path):
        """Without the workspace's own, in whatever capitals the SDK writes it."""
        return re.sub(re.escape(WORKSPACE), "", path, flags=re.IGNORECASE)

    # What follows answers one request each.

    def answer(self, method, path, body, header, query):
        """Raises the Answer."""
        token = header.get("Authorization", "").removeprefix("Bearer ")
        if path == "/metadata/endpoints":
            facts = {
                "name": "StandIn",
                "resourceManager": f"{self.url}/",
                "portal": self.url,
                "authentication": {"loginEndpoint": self.url},
            }
            raise Answer(200, [facts | {"suffixes": {"storage": self.azurite.domain}}])
        if path == "/msi/token":
            if header.get("secret") != "secret":
                raise Answer(400, {"error": "invalid_request"})
            facts = {"access_token": TOKEN, "expires_on": "4102444800", "token_type": "Bearer"}
            raise Answer(200, facts)
        if path == "/discovery":
            raise Answer(200, {"api": self.url})
        if path.startswith("/logs/"):
            raise self.log(path, header["Range"])
        if path.startswith("/score/") and token == KEY:
            raise self.score(body)
        if token != TOKEN:
            # The host of a vault must end with that of its tokens.
            resource = self.url.replace("127.0.0.1", "0.0.1")
            challenge = f'Bearer authorization="{self.url}/tenant", resource="{resource}"'
            raise error(401, "Unauthorized", "sign in first", **{"WWW-Authenticate": challenge})
        for pattern, handler in ROUTES.items():
            if match := re.fullmatch(pattern, f"{method} {self.short(path)}"):
                answer = handler(self, body, *match.groups())
                raise answer if isinstance(answer, Answer) else Answer(200, answer)
        raise error(404, "ResourceNotFound", f"nothing at {path}")

    def log(self, path, wanted):
        _, _, name, key = path.split("/", 3)
        content = self.jobs[name].logs[key].read_bytes()
        start = int(wanted[6:].rstrip("-"))
        if start < len(content):
            return Answer(206, content[start:])
        return Answer(416, b"", **{"Content-Range": f"bytes */{len(content)}"})

    def score(self, body):
        images = [base64.b64decode(each) for each in body["images"]]
        answers = self.scorer.score(images, body["top_k"])
        if self.broken == "answers":
            answers = [{**each, "probability": each["probability"] - 0.01} for each in answers]
        return Answer(200, {"predictions": answers})

    def workspace(self, _):
        vault = "/subscriptions/x/providers/Microsoft.KeyVault/vaults/x"
        return resource("", discoveryUrl=f"{self.url}/discovery", keyVault=vault)

    def secret(self, body, method, name):
        if method == "PUT":
            self.vault[name] = body["value"]
        address = f"{self.url}/secrets/{name}/1"
        return {"value": self.vault[name], "id": address, "attributes": {}}

    def job(self, body, method, name, cancel):
        if method == "PUT":
            self.jobs[name] = job = new_job(name, body)
            threading.Thread(target=run_job, args=(self, job), daemon=True).start()
        if name not in self.jobs:
            return error(404, "NotFound", f"no job {name}")
        if cancel:
            self.jobs[name].status = "Canceled"
        return self.described(name)

    def described(self, name):
        job = self.jobs[name]
        page = {"endpoint": f"https://ml.azure.com/runs/{name}", "jobServiceType": "Studio"}
        state = {"status": job.status, "services": {"Studio": page}}
        return resource(f"/jobs/{name}", **job.body["properties"], **state)

    def details(self, _, name):
        job = self.jobs[name]
        files = {key: f"{self.url}/logs/{name}/{key}" for key in list(job.logs)}
        failure = {"error": {"error": {"message": job.error}}} if job.error else {}
        return {"status": job.status, "logFiles": files, **failure}

    def children(self, _, name):
        tags = {run: json.dumps({"member": m}) for run, m in self.jobs[name].trials.items()}
        return {"value": [{"runId": r, "tags": {"hyperparameters": t}} for r, t in tags.items()]}

    def datastore(self, _, name):
        facts = {
            "datastoreType": "AzureBlob",
            "accountName": ACCOUNT,
            "containerName": CONTAINER,
            "endpoint": self.azurite.domain,
            "protocol": "https",
            "isDefault": True,
        }
        facts["credentials"] = {"credentialsType": "Sas"}
        store = resource("/datastores/workspaceblobstore", **facts)
        return store if name else {"value": [store]}

    def signature(self, _):
        return {"secretsType": "Sas", "sasToken": self.azurite.sas()}

    def upload(self, _):
        container = self.azurite.new_container()  # each upload has one of its own
        uri = f"https://{ACCOUNT}.blob.{self.azurite.domain}/{container}"
        credential = {"credentialType": "SAS", "sasUri": f"{uri}?{self.azurite.sas(container)}"}
        reference = {"blobUri": uri, "storageAccountArmId": "x", "credential": credential}
        return {"blobReferenceForConsumption": reference, "pendingUploadId": "1"}

    def put(self, body, path, kind, name):
        properties = body["properties"]
        if kind == "onlineEndpoints":
            properties["scoringUri"] = f"{self.url}/score/{name}"
        if kind == "deployments":
            properties.setdefault("scaleSettings", {"scaleType": "Default"})
        if path.startswith("/models/"):
            properties["flavors"] = {}
            if self.broken == "upload":
                return error(403, "AuthorizationFailed", "no right to write models")
        fails = kind == "deployments" and self.broken == "creation"
        properties["provisioningState"] = "Failed" if fails else "Succeeded"
        self.resources[path] = {**body, **resource(path, **properties)}
        if fails:
            return error(400, "UserScriptException", "the container has crashed")
        return Answer(201, self.resources[path])

    def get(self, _, path):
        if path in self.resources:
            return self.resources[path]
        if not path.endswith(("/deployments", "/versions", "/listNodes")):
            return error(404, "ResourceNotFound", f"nothing at {path}")
        inside = [body for key, body in self.resources.items() if key.startswith(f"{path}/")]
        return {"value": inside, "nodes": []}

    def delete(self, _, path):
        if path not in self.resources:
            return error(404, "ResourceNotFound", path)
        for key in [k for k in self.resources if f"{k}/".startswith(f"{path}/")]:
            del self.resources[key]


def new_job(name, body, status="Queued"):
    """A job as Azure keeps it; `trials` of a sweep: name -> member."""
    return SimpleNamespace(name=name, body=body, status=status, logs={}, trials={}, error="")


def resource(path, **properties):
    """A resource of the workspace, or the workspace."""
    names = {"id": f"{WORKSPACE}{path}", "name": path.rpartition("/")[2], "type": "stand-in"}
    return {**names, "location": "westeurope", "properties": properties}


# Method and path (without the workspace's) -> what answers, with the body and the groups.
ROUTES = {
    r"GET ": Azure.workspace,
    r"(GET|PUT) /secrets/([^/]+)/?": Azure.secret,
    r"GET /history/v1.0/runs/([^/]+)/details": Azure.details,
    r"GET /history/v1.0/runs/([^/]+)/children": Azure.children,
    r"GET /jobs": lambda azure, _: {"value": [azure.described(name) for name in [*azure.jobs]]},
    r"(GET|PUT|POST) /jobs/([^/]+)(/cancel)?": Azure.job,
    r"POST /datastores/.*": Azure.signature,
    r"GET /datastores(/.*)?": Azure.datastore,
    r"POST .*/startPendingUpload": Azure.upload,
    r"POST .*/listKeys": lambda *_: {"primaryKey": KEY, "secondaryKey": KEY},
    r"PUT (/.*?([^/]+)/([^/]+))": Azure.put,
    r"(?:GET|POST) (/.+)": Azure.get,
    r"DELETE (/.+)": Azure.delete,
}
