"""A stand-in for Azure on loopback: as much of ARM, Azure ML, Key Vault and managed identity as the
real SDKs ask for, over https. Blobs are a real Azurite's, and jobs run for real, in `nodes.py`.

    from tests.cluster.arm import Azure, azure      # `azure`: a fixture, one per module

    azure.popen("launcher=azureml", ..., cwd=tmp_path)  # python -m distdl, sent here
    azure.requests                                      # method, path and body of all requests

Nothing in distdl knows of it: the SDK finds it by ARM_CLOUD_METADATA_URL, its credential by
MSI_ENDPOINT (which Azure ML sets in jobs), both documented variables of Azure's SDKs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.azurite import ACCOUNT, CONTAINER, VAULT, Azurite, Places, clean_environment
from tests.cluster.azurite import why_not as why_no_azurite
from tests.cluster.https import Answer, error, serve
from tests.cluster.nodes import run_job
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
    """One subscription with one workspace; the folder has the certificate, logs and nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places = Places(folder)
        self.azurite = Azurite(self.places, folder / "azurite")
        self.requests: list[tuple[str, str, str]] = []
        self.jobs: dict[str, Job] = {}
        self.resources: dict[str, dict[str, Any]] = {}  # computes, environments, codes: by path
        self.vault: dict[str, str] = {}
        self._server = serve(self, self.places.certificate, self.places.key)
        self.url = f"https://127.0.0.1:{self._server.server_port}"
        self.vault_url = f"https://{VAULT}:{self._server.server_port}"

    def identity(self) -> dict[str, str]:
        """What a managed identity is to a process; also what Azure ML sets in a job."""
        certificate = {"REQUESTS_CA_BUNDLE": str(self.places.certificate)}
        return {"MSI_ENDPOINT": f"{self.url}/msi/token", "MSI_SECRET": MSI_SECRET, **certificate}

    def environment(self, **more: str) -> dict[str, str]:
        """The variables of somebody who works with this Azure."""
        usual = {k: v for k, v in environment().items() if k in clean_environment()}
        credential = {"AZURE_TOKEN_CREDENTIALS": "ManagedIdentityCredential", **self.identity()}
        clouds = {"ARM_CLOUD_METADATA_URL": f"{self.url}/metadata/endpoints"}
        return {**usual, **credential, **clouds, **more}

    def popen(self, *arguments: str, cwd: Path, **more: str) -> subprocess.Popen[str]:
        """Starts `python -m distdl ...` in this Azure."""
        command = self.places.inside([sys.executable, "-m", "distdl", *arguments])
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        pipes["stdin"] = subprocess.DEVNULL
        return subprocess.Popen(command, cwd=cwd, env=self.environment(**more), text=True, **pipes)

    def asked(self, method: str, pattern: str) -> list[str]:
        """Bodies of the requests whose path (without the workspace's) matches."""
        return [b for m, path, b in self.requests if m == method and re.search(pattern, path)]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.azurite.close()

    # What follows answers one request each.

    def short(self, path: str) -> str:
        """Without the workspace's own, in whatever capitals the SDK writes it."""
        return re.sub(re.escape(WORKSPACE), "", path, flags=re.IGNORECASE)

    def answer(self, method: str, path: str, body: Any, header: Any, query: str) -> None:
        """Raises the Answer."""
        short = self.short(path)
        if path == "/metadata/endpoints":
            facts: dict[str, Any] = {"name": "StandIn", "resourceManager": f"{self.url}/"}
            facts |= {"portal": self.url, "authentication": {"loginEndpoint": self.url}}
            raise Answer(200, [{**facts, "suffixes": {"storage": self.azurite.domain}}])
        if path == "/msi/token":
            known = header.get("secret") == MSI_SECRET
            token = {"access_token": TOKEN, "expires_on": "4102444800", "token_type": "Bearer"}
            raise Answer(200, token) if known else Answer(400, {"error": "invalid_request"})
        if path == "/discovery":
            raise Answer(200, {"api": self.url, "history": self.url, "studio": self.url})
        if path.startswith("/logs/"):
            self.log(path, header.get("Range", "bytes=0-"))
        if header.get("Authorization") != f"Bearer {TOKEN}":
            vaults = f"https://vault.localhost:{self._server.server_port}"  # their common domain
            challenge = f'Bearer authorization="{self.url}/tenant", resource="{vaults}"'
            raise error(401, "Unauthorized", "sign in first", **{"WWW-Authenticate": challenge})
        if header.get("Host", "").startswith(VAULT):
            self.secret(method, path, body)
        if not short:
            vault = f"/subscriptions/x/providers/Microsoft.KeyVault/vaults/{VAULT}"
            facts = {"discoveryUrl": f"{self.url}/discovery", "workspaceId": "space-id"}
            raise resource("", **facts, keyVault=vault, provisioningState="Succeeded")
        if match := re.fullmatch(r"/history/v1.0/runs/([^/]+)/(details|children)", short):
            self.history(*match.groups())
        if short == "/jobs":
            raise Answer(200, {"value": [self.described(name) for name in list(self.jobs)]})
        if match := re.fullmatch(r"/jobs/([^/]+)(/cancel)?", short):
            self.job(method, match[1], bool(match[2]), body)
        if short.startswith("/datastores"):
            self.datastore(short)
        if short.endswith("/startPendingUpload"):
            raise Answer(200, self.upload())
        if method == "PUT":
            properties = {**body.get("properties", {}), "provisioningState": "Succeeded"}
            self.resources[f"{WORKSPACE}{short}"] = {**body, **resource(short, **properties).body}
            raise Answer(201, self.resources[f"{WORKSPACE}{short}"])
        if stored := self.resources.get(f"{WORKSPACE}{short}"):
            raise Answer(200, stored)
        if short.endswith(("/versions", "/listNodes")):
            raise Answer(200, {"value": [], "nodes": []})
        raise error(404, "ResourceNotFound", f"nothing at {path}")

    def secret(self, method: str, path: str, body: Any) -> None:
        name = path.split("/")[2]
        if method == "PUT":
            self.vault[name] = body["value"]
        elif name not in self.vault:
            raise error(404, "SecretNotFound", f"no secret {name}")
        address = f"{self.vault_url}/secrets/{name}/1"
        raise Answer(200, {"value": self.vault[name], "id": address, "attributes": {}})

    def described(self, name: str) -> dict[str, Any]:
        job = self.jobs[name]
        page = {"endpoint": f"https://ml.azure.com/runs/{name}", "jobServiceType": "Studio"}
        state = {"status": job.status, "services": {"Studio": page}}
        return resource(f"/jobs/{name}", **job.body["properties"], **state).body

    def job(self, method: str, name: str, cancel: bool, body: Any) -> None:
        if method == "PUT":
            self.jobs[name] = job = Job(name, body)
            threading.Thread(target=run_job, args=(self, job), daemon=True).start()
        if name not in self.jobs:
            raise error(404, "NotFound", f"no job {name}")
        if cancel:
            job = self.jobs[name]
            job.cancelled = True
            job.status = "Canceled" if job.status == "Queued" else job.status
        raise Answer(200, self.described(name))

    def history(self, name: str, what: str) -> None:
        if name not in self.jobs:
            raise error(404, "NotFound", f"no run {name}")
        job = self.jobs[name]
        if what == "children":
            children = [{"runId": c.name, "status": c.status, "tags": c.tags} for c in job.children]
            raise Answer(200, {"value": children})
        files = {key: f"{self.url}/logs/{name}/{key}" for key in list(job.logs)}
        failure = {"error": {"error": {"message": job.error}}} if job.error else {}
        raise Answer(200, {"runId": name, "status": job.status, "logFiles": files, **failure})

    def log(self, path: str, wanted: str) -> None:
        _, _, name, key = path.split("/", 3)
        content, start = self.jobs[name].logs[key].read_bytes(), int(wanted[6:].rstrip("-"))
        if start >= len(content):
            raise Answer(416, b"", **{"Content-Range": f"bytes */{len(content)}"})
        raise Answer(206, content[start:])

    def datastore(self, short: str) -> None:
        if short.endswith("/listSecrets"):
            raise Answer(200, {"secretsType": "Sas", "sasToken": self.azurite.sas()})
        facts = {"datastoreType": "AzureBlob", "accountName": ACCOUNT, "containerName": CONTAINER}
        facts |= {"endpoint": self.azurite.domain, "protocol": "https", "isDefault": True}
        facts["credentials"] = {"credentialsType": "Sas"}
        answer = resource("/datastores/workspaceblobstore", **facts)
        raise Answer(200, {"value": [answer.body]}) if short == "/datastores" else answer

    def upload(self) -> dict[str, Any]:
        container = self.azurite.new_container()  # each upload has one of its own
        uri = f"https://{ACCOUNT}.blob.{self.azurite.domain}/{container}"
        credential = {"credentialType": "SAS", "sasUri": f"{uri}?{self.azurite.sas(container)}"}
        reference = {"blobUri": uri, "storageAccountArmId": "x", "credential": credential}
        return {"blobReferenceForConsumption": reference, "pendingUploadId": "1"}


def resource(short: str, **properties: Any) -> Answer:
    """A resource of the workspace, or the workspace."""
    path = f"{WORKSPACE}{short}"
    names = {"id": path, "name": path.rpartition("/")[2], "type": "stand-in"}
    return Answer(200, {**names, "location": "westeurope", "properties": properties})


def why_not() -> str | None:
    """What is missing for these tests, None if nothing is."""
    if any(importlib.util.find_spec(name) is None for name in ("azure", "azure.ai", "azure.ai.ml")):
        return "not installed: pip install 'distdl[azure]'"
    return why_no_azurite()


def work_with(azure: Azure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process somebody who works with this Azure."""
    for name in set(os.environ) - set(azure.environment()):
        monkeypatch.delenv(name)
    for name, value in azure.environment(AZUREML_CURRENT_CLOUD="StandIn").items():
        monkeypatch.setenv(name, value)
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **more: Any) -> Any:
        return resolve("127.0.0.1" if str(host).endswith(".localhost") else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azure]:
    azure = Azure(tmp_path_factory.mktemp("azure"))
    yield azure
    azure.close()
