"""A stand-in for Azure on loopback: as much of ARM, Azure ML, Key Vault and managed identity as the
real SDKs ask for, over https. Blobs are a real Azurite's, and jobs run for real, in `nodes.py`.

    from tests.cluster.arm import Azure, azure      # `azure`: a fixture, one per module

    azure.popen("launcher=azureml", ..., cwd=tmp_path)      # python -m distdl, sent here
    azure.jobs["name"].status = "Queued"                    # what a job's page would say
    azure.requests                                          # all that was asked: method, path, body

Nothing in distdl knows of it: the SDK finds it by ARM_CLOUD_METADATA_URL, its credential by
MSI_ENDPOINT (which Azure ML sets in jobs), both documented variables of Azure's SDKs.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.azurite import ACCOUNT, CONTAINER, VAULT, Azurite, Places, clean_environment
from tests.cluster.azurite import why_not as why_no_azurite
from tests.cluster.https import Answer, serve
from tests.conftest import environment

WORKSPACE = (
    "/subscriptions/11111111-2222-3333-4444-555555555555/resourceGroups/group"
    "/providers/Microsoft.MachineLearningServices/workspaces/space"
)
TOKEN = "token-of-the-stand-in"
MSI_SECRET = "msi-secret-of-the-stand-in"


@dataclass
class Job:
    """A job as Azure keeps it: its definition, its status, its log files."""

    name: str
    body: dict[str, Any]
    status: str = "Queued"
    logs: dict[str, Path] = field(default_factory=dict)
    children: list[Job] = field(default_factory=list)  # of a sweep: its trials
    tags: dict[str, str] = field(default_factory=dict)
    error: str = ""
    cancelled: bool = False


class Azure:
    """One subscription with one workspace.

    Args:
        folder: For the certificate, logs and the nodes' folders.
        on_job: Called with each new job, in a thread of its own; None leaves jobs queued.
    """

    def __init__(self, folder: Path, on_job: Callable[[Azure, Job], None] | None = None) -> None:
        self.folder, self.on_job = folder, on_job
        self.places = Places(folder)
        self.azurite = Azurite(self.places, folder / "azurite")
        self.requests: list[tuple[str, str, str]] = []
        self.jobs: dict[str, Job] = {}
        self.resources: dict[str, dict[str, Any]] = {}  # computes, environments, codes: by path
        self.vault: dict[str, str] = {}
        self._server = serve(self, self.places.certificate, self.places.key)
        self.url = f"https://127.0.0.1:{self._server.server_port}"

    @property
    def vault_url(self) -> str:
        return f"https://{VAULT}:{self._server.server_port}"

    @property
    def vaults(self) -> str:
        """What a token for any vault is asked for: the domain they share."""
        return f"https://vault.localhost:{self._server.server_port}"

    def identity(self) -> dict[str, str]:
        """What a managed identity is to a process; also what Azure ML sets in a job."""
        return {
            "MSI_ENDPOINT": f"{self.url}/msi/token",
            "MSI_SECRET": MSI_SECRET,
            "REQUESTS_CA_BUNDLE": str(self.places.certificate),
        }

    def environment(self, **more: str) -> dict[str, str]:
        """The variables of somebody who works with this Azure."""
        return {
            **{k: v for k, v in environment().items() if k in clean_environment()},
            **self.identity(),
            "AZURE_TOKEN_CREDENTIALS": "ManagedIdentityCredential",
            "ARM_CLOUD_METADATA_URL": f"{self.url}/metadata/endpoints",
            **more,
        }

    def popen(self, *arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
        """Starts `python -m distdl ...` in this Azure."""
        command = self.places.inside([sys.executable, "-m", "distdl", *arguments])
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=self.environment(**more),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def asked(self, method: str, pattern: str) -> list[str]:
        """Bodies of the requests whose path (without the workspace's) matches."""
        return [b for m, path, b in self.requests if m == method and re.search(pattern, path)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.azurite.close()

    # What follows answers one request each: a regular expression of the path, and the answer.

    def short(self, path: str) -> str:
        """Without the workspace's own, in whatever capitals the SDK writes it."""
        return re.sub(re.escape(WORKSPACE), "", path, flags=re.IGNORECASE)

    def answer(self, method: str, path: str, body: Any, header: Any, query: str) -> None:
        """Raises the Answer."""
        path = re.sub(re.escape(WORKSPACE), WORKSPACE, path, flags=re.IGNORECASE)
        if path == "/metadata/endpoints":
            raise Answer(200, [self.cloud()])
        if path == "/msi/token":
            known = header.get("secret") == MSI_SECRET
            token = {"access_token": TOKEN, "expires_on": "4102444800", "token_type": "Bearer"}
            raise Answer(200, token) if known else Answer(400, {"error": "invalid_request"})
        if path == "/discovery":
            raise Answer(200, {"api": self.url, "history": self.url, "studio": self.url})
        if path.startswith("/logs/"):
            raise self.log(path, header.get("Range", "bytes=0-"))
        if header.get("Authorization") != f"Bearer {TOKEN}":
            challenge = f'Bearer authorization="{self.url}/tenant", resource="{self.vaults}"'
            raise Answer(
                401, error("Unauthorized", "sign in first"), **{"WWW-Authenticate": challenge}
            )
        if header.get("Host", "").startswith(VAULT):
            raise self.secret(method, path, body)
        if path == WORKSPACE:
            raise Answer(200, self.workspace())
        short = self.short(path)
        if match := re.fullmatch(r"/history/v1.0/runs/([^/]+)/(details|children)", short):
            raise self.history(*match.groups())
        if short == "/jobs":
            values = [self.job("GET", name, False, None).body for name in list(self.jobs)]
            raise Answer(200, {"value": values})
        if match := re.fullmatch(r"/jobs/([^/]+)(/cancel)?", short):
            raise self.job(method, match[1], bool(match[2]), body)
        if short.startswith("/datastores"):
            raise self.datastore(short)
        if short.endswith("/startPendingUpload"):
            raise Answer(200, self.upload())
        if match := re.fullmatch(r"/computes/([^/]+)/listNodes", short):
            raise Answer(200, {"nodes": []})
        raise self.resource(method, path)(body)

    def cloud(self) -> dict[str, Any]:
        return {
            "name": "StandIn",
            "portal": "https://portal.standin.localhost",
            "resourceManager": f"{self.url}/",
            "authentication": {"loginEndpoint": self.url},
            "suffixes": {"storage": self.azurite.domain},
        }

    def workspace(self) -> dict[str, Any]:
        properties = {
            "discoveryUrl": f"{self.url}/discovery",
            "workspaceId": "space-id",
            "keyVault": f"/subscriptions/x/providers/Microsoft.KeyVault/vaults/{VAULT}",
            "provisioningState": "Succeeded",
        }
        return {
            "id": WORKSPACE,
            "name": "space",
            "location": "westeurope",
            "properties": properties,
        }

    def secret(self, method: str, path: str, body: Any) -> Answer:
        name = path.split("/")[2]
        if method == "PUT":
            self.vault[name] = body["value"]
        elif name not in self.vault:
            return Answer(404, error("SecretNotFound", f"no secret {name}"))
        address = f"{self.vault_url}/secrets/{name}/1"
        return Answer(200, {"value": self.vault[name], "id": address, "attributes": {}})

    def job(self, method: str, name: str, cancel: bool, body: Any) -> Answer:
        if method == "PUT":
            self.jobs[name] = job = Job(name, body)
            if self.on_job is not None:
                threading.Thread(target=self.on_job, args=(self, job), daemon=True).start()
        if name not in self.jobs:
            return Answer(404, error("NotFound", f"no job {name}"))
        job = self.jobs[name]
        if cancel:
            job.cancelled = True
            if job.status == "Queued":
                job.status = "Canceled"
            return Answer(200, {})
        page = {"endpoint": f"https://ml.azure.com/runs/{name}", "jobServiceType": "Studio"}
        properties = {**job.body["properties"], "status": job.status, "services": {"Studio": page}}
        return Answer(200, {**resource_of(f"{WORKSPACE}/jobs/{name}"), "properties": properties})

    def history(self, name: str, what: str) -> Answer:
        if name not in self.jobs:
            return Answer(404, error("NotFound", f"no run {name}"))
        job = self.jobs[name]
        if what == "children":
            children = [{"runId": c.name, "status": c.status, "tags": c.tags} for c in job.children]
            return Answer(200, {"value": children})
        files = {key: f"{self.url}/logs/{name}/{key}" for key in list(job.logs)}
        details = {"runId": name, "status": job.status, "logFiles": files}
        if job.error:
            details["error"] = {"error": {"message": job.error}}
        return Answer(200, details)

    def log(self, path: str, wanted: str) -> Answer:
        _, _, name, key = path.split("/", 3)
        content, start = self.jobs[name].logs[key].read_bytes(), int(wanted[6:].rstrip("-"))
        if start >= len(content):
            return Answer(416, b"", **{"Content-Range": f"bytes */{len(content)}"})
        return Answer(206, content[start:])

    def datastore(self, short: str) -> Answer:
        if short.endswith("/listSecrets"):
            return Answer(200, {"secretsType": "Sas", "sasToken": self.azurite.sas()})
        properties = {
            "datastoreType": "AzureBlob",
            "accountName": ACCOUNT,
            "containerName": CONTAINER,
            "endpoint": self.azurite.domain,
            "protocol": "https",
            "credentials": {"credentialsType": "Sas"},
            "isDefault": True,
        }
        found = {
            **resource_of(f"{WORKSPACE}/datastores/workspaceblobstore"),
            "properties": properties,
        }
        return Answer(200, {"value": [found]} if short == "/datastores" else found)

    def upload(self) -> dict[str, Any]:
        container = self.azurite.new_container()  # each upload has one of its own
        uri = f"https://{ACCOUNT}.blob.{self.azurite.domain}/{container}"
        credential = {"credentialType": "SAS", "sasUri": f"{uri}?{self.azurite.sas(container)}"}
        reference = {"blobUri": uri, "storageAccountArmId": "x", "credential": credential}
        return {"blobReferenceForConsumption": reference, "pendingUploadId": "1"}

    def resource(self, method: str, path: str) -> Callable[[Any], Answer]:
        def put(body: Any) -> Answer:
            properties = {**body.get("properties", {}), "provisioningState": "Succeeded"}
            self.resources[path] = {**body, **resource_of(path), "properties": properties}
            return Answer(201, self.resources[path])

        def get(body: Any) -> Answer:
            if path in self.resources:
                return Answer(200, self.resources[path])
            if path.endswith("/versions"):
                return Answer(200, {"value": []})
            return Answer(404, error("ResourceNotFound", f"nothing at {path}"))

        return put if method == "PUT" else get


def resource_of(path: str) -> dict[str, str]:
    return {
        "id": path,
        "name": path.rpartition("/")[2],
        "type": "stand-in",
        "location": "westeurope",
    }


def error(code: str, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def why_not() -> str | None:
    """What is missing for these tests, None if nothing is."""
    if any(importlib.util.find_spec(name) is None for name in ("azure", "azure.ai", "azure.ai.ml")):
        return "not installed: pip install 'distdl[azure]'"
    return why_no_azurite()


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azure]:
    from tests.cluster.nodes import run_job

    found = Azure(tmp_path_factory.mktemp("azure"), on_job=run_job)
    yield found
    found.close()
